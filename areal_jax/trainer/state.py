"""The train state, where it lives, and the optimizer that moves it.

In: the optimizer's section of the config, and params in their places: read from a model directory, copied, or random.
Out: `TrainState`, sharded at birth: no array ever exists whole on one device of a larger mesh. Called by the loops
before their first step.

The weights and the optimizer's moments are float32, whatever the forward pass computes in; the first moment may be kept
in bfloat16 (`moment_dtype`). Optax keeps the second one in the params' dtype, and brings no state of 8 bit.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from areal_jax import host_memory
from areal_jax.config import OptimizerConfig
from areal_jax.models import sharding, transformer
from areal_jax.models.transformer import Params, TransformerConfig
from areal_jax.trainer import lora
from areal_jax.trainer.lora import Trainable

DECAYED = ("kernel", "embedding", "lora_a", "lora_b")  # last part of a name; norms' scales and biases do not


class TrainState(NamedTuple):
    """What an update changes, and the params that do not train beside those that do (lora.py)."""

    params: dict[str, Any]  # canonical name -> array (or, in an abstract state, its shape and sharding)
    opt_state: optax.OptState


def learning_rate(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """The rate of each optimizer update, counted from 0.

    Rises linearly over the first warmup_fraction of `updates`, from peak / warm-up to the peak (the first update moves
    too), then stays ("constant") or falls to 0 at the end of the run ("cosine", "linear").
    """
    warmup = round(config.warmup_fraction * updates)
    rest = max(1, updates - warmup)
    after = {
        "constant": lambda: optax.constant_schedule(config.lr),
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, rest),
        "linear": lambda: optax.linear_schedule(config.lr, 0.0, rest),
    }[config.schedule]()
    if warmup == 0:
        return after
    rise = optax.linear_schedule(config.lr / warmup, config.lr, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW whose weight decay leaves norms and biases alone."""
    decay_mask = lambda params: {name: name.split(".")[-1] in DECAYED for name in params}  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
            mu_dtype=config.moment_dtype,
        ),
    )


def abstract_state(
    model_config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    trainable: Trainable = lora.EVERYTHING,
) -> TrainState:
    """Shape, dtype and sharding of every array of the state; nothing is allocated.

    Moments live where their params do, counters everywhere; params that do not train have none.
    """
    shapes = trainable.shapes(transformer.param_shapes(model_config))
    shardings = sharding.param_shardings(shapes, mesh)
    everywhere = NamedSharding(mesh, sharding.REPLICATED)
    opt_shapes, places = jax.eval_shape(optimizer.init, trainable.trained(shapes)), trainable.trained(shardings)
    opt_shardings = optax.tree.map_params(
        optimizer, lambda _, place: place, opt_shapes, places, transform_non_params=lambda _: everywhere
    )

    def place(shape: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    return jax.tree.map(place, TrainState(shapes, opt_shapes), TrainState(shardings, opt_shardings))


def shardings_of(abstract: Any) -> Any:
    """The sharding of each leaf of an abstract state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def initial_state(
    params: Mapping[str, Array],
    abstract: TrainState,
    optimizer: optax.GradientTransformation,
    trainable: Trainable = lora.EVERYTHING,
) -> TrainState:
    """The state of version 0: params that are in their places, and a fresh optimizer.

    It takes the params over, without a copy: the first update donates them. `copies` makes such ones of others.
    """
    for name, leaf in abstract.params.items():
        array = params[name]
        found = (array.shape, array.dtype, array.sharding)
        assert found == (leaf.shape, leaf.dtype, leaf.sharding), f"{name} is not in its place: {found}, not {leaf}"
    init = jax.jit(optimizer.init, out_shardings=shardings_of(abstract.opt_state))
    return TrainState(dict(params), init(trainable.trained(params)))


def copies(params: Mapping[str, np.ndarray | Array], places: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """The params once more, each straight in the dtype and the sharding of its place; the caller keeps the given ones.

    Raises ValueError when names or shapes are not those of the model.
    """
    expected = {name: place.shape for name, place in places.items()}
    given = {name: tuple(value.shape) for name, value in params.items()}
    if given != expected:
        wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
        raise ValueError(
            f"params do not fit the model: {wrong[0]} has shape {given.get(wrong[0])} where the model has "
            f"{expected.get(wrong[0])} ({len(wrong)} such names); they must be of the same architecture"
        )
    return {
        name: jax.device_put(params[name].astype(place.dtype), place.sharding, may_alias=False)
        for name, place in places.items()
    }


def random_state(
    model_config: TransformerConfig, abstract: TrainState, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """A state of random params that all train, made shard by shard."""

    def init(key: Array) -> TrainState:
        params = transformer.init_params(model_config, key)
        return TrainState(params, optimizer.init(params))

    return jax.jit(init, out_shardings=shardings_of(abstract))(jax.random.key(seed))


def reserve_beside(state: TrainState) -> None:
    """Sets as much of the host's memory apart as this process' part of a state on CPU devices takes; once it is there.

    Gradients, what an update of it takes, and all that is smaller have room there, beside the temporaries of a
    microbatch, which then lie in one place from step to step (`host_memory.reserve`).
    """
    shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    if shards[0].device.platform == "cpu":
        host_memory.reserve(sum(shard.data.nbytes for shard in shards))


def updates_done(state: TrainState) -> Array:
    """Optimizer updates so far, as the schedule counts them."""
    return optax.tree.get(state.opt_state, "ScaleByAdamState").count


def global_norm(grads: Params) -> Array:
    """Euclidean norm over all gradients together, float32."""
    return jnp.asarray(optax.tree.norm(grads), jnp.float32)
