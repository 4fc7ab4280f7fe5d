"""The programs of a training step, and the update made of them.

In: a `TrainState`, packed microbatches, an objective. Out: the next state and sums for the metrics. Called by the loops
of reinforcement learning (loop.py) and supervised fine-tuning (sft.py); waits for nothing: calls are dispatched, and
whoever looks at a result waits for it (but on a CPU see `run_in_turn`).

Six programs, each one visible jit:

    zeros       -> grads                                          an empty accumulator
    accumulate  (params, grads*, rows, 1/tokens, scalars) -> grads, sums, logprobs     once per microbatch
    apply       (state*, grads) -> state, facts                   once per minibatch
    logprobs    (params, rows, temperature) -> logprobs           the proximal pass
    export      params -> a copy in the generator's dtype         never donated, so that it may be published
    gather      param -> the same on every device                 where several processes train, to publish it

(* donated). Params, gradients and moments are sharded by `param_shardings`, rows over the mesh axes data and fsdp.
Gradients and moments are of those params that train (lora.py), and what is exported is the model, adapters merged.

Shapes: R packed rows, L tokens of a row, D model.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax import room
from areal_jax.algorithms.loss import Sums, decoupled_ppo_loss, supervised_loss
from areal_jax.algorithms.packing import empty_batch, loss_tokens
from areal_jax.config import ModelConfig, TrainerConfig
from areal_jax.models import attention_kernels, logprobs, sharding, transformer
from areal_jax.models.transformer import Params, TransformerConfig
from areal_jax.trainer import lora
from areal_jax.trainer.lora import Trainable
from areal_jax.trainer.state import (
    TrainState,
    abstract_state,
    global_norm,
    initial_state,
    learning_rate,
    make_optimizer,
    shardings_of,
    updates_done,
)
from areal_jax.types import TrainBatch

Rows = dict[str, Array]  # the arrays [R, L] of one microbatch that programs read
Scalars = Mapping[str, Any]  # hyperparameters that are arguments of a program, not part of it
Forward = Callable[[Params, Rows, Array], tuple[Array, Array]]
Objective = Callable[[Array, Rows, Scalars], tuple[Array, Sums]]  # (logprobs [R, L], rows, scalars) -> loss sum, sums

GATHERED = 1 << 30  # bytes of a version's whole parameters that may lie on a device, on their way to the host
CONTEXT = ("tokens", "positions", "segment_ids")
TRAINED = (*CONTEXT, "loss_mask", "behav_logprobs", "advantages")


def decoupled_objective(logprobs_RL: Array, rows: Rows, scalars: Scalars) -> tuple[Array, Sums]:
    """Decoupled PPO. `own_prox`: the weights are still those of the step's start, so prox is what was just computed."""
    own_RL = jax.lax.stop_gradient(logprobs_RL)
    prox_RL = jnp.where(scalars["own_prox"], own_RL, rows["prox_logprobs"])
    return decoupled_ppo_loss(
        logprobs_RL,
        prox_RL,
        rows["behav_logprobs"],
        rows["advantages"],
        rows["loss_mask"],
        clip_eps=scalars["clip_eps"],
    )


def supervised_objective(logprobs_RL: Array, rows: Rows, scalars: Scalars) -> tuple[Array, Sums]:
    """Cross-entropy of the tokens that train."""
    del scalars
    return supervised_loss(logprobs_RL, rows["loss_mask"])


def run_in_turn() -> None:
    """From here on a call on a CPU returns when its program has ended; accelerators do as they do.

    To be called before there is a backend. Dispatched ahead, the next microbatch takes its temporaries before those of
    the one before are freed, so that a trainer holds them twice, and gains nothing: one program uses all cores.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


class Programs:
    """The jitted programs for one model on one mesh; compiled on first use, or ahead by `compile`."""

    def __init__(
        self,
        model_config: TransformerConfig,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule,
        objective: Objective,
        scalars: Scalars,
        *,
        compute_dtype: str,
        export_dtype: str,
        vocab_block: int,
        remat: str = "none",
        trainable: Trainable = lora.EVERYTHING,
    ):
        """`scalars` holds the hyperparameters that the objective reads, "temperature" among them."""
        self.trainable = trainable
        self.abstract = abstract_state(model_config, optimizer, mesh, trainable)
        self.mesh, self.optimizer, self.scalars = mesh, optimizer, dict(scalars)
        self.rows_sharding = rows = NamedSharding(mesh, sharding.ROWS)
        state = shardings_of(self.abstract)
        grads = trainable.trained(state.params)
        everywhere = NamedSharding(mesh, sharding.REPLICATED)
        seen = rows if jax.process_count() == 1 else everywhere  # by the host, which reads them for the log
        graph = transformer.graph(model_config, attention_kernels.kernels_for(model_config.kernels, mesh))
        forward = _make_forward(graph, trainable, rows, compute_dtype, vocab_block, remat)
        self.zeros = jax.jit(_make_zeros(trainable.trained(self.abstract.params)), out_shardings=grads)
        self.accumulate = jax.jit(
            _make_accumulate(forward, objective, trainable),
            in_shardings=(state.params, grads, rows, everywhere, everywhere),
            out_shardings=(grads, everywhere, seen),
            donate_argnames="grads",
            compiler_options=_compiler_options(remat, mesh),
        )
        self.apply = jax.jit(
            _make_apply(optimizer, schedule, trainable),
            in_shardings=(state, grads),
            out_shardings=(state, everywhere),
            donate_argnames="state",
        )
        self.logprobs = jax.jit(
            lambda params, rows, temperature: forward(params, rows, temperature)[0],
            in_shardings=(state.params, rows, everywhere),
            out_shardings=seen,
        )
        # `jnp.copy`, as a jit may hand an input through that it does not change.
        self.export = jax.jit(
            lambda params: {n: jnp.copy(value).astype(export_dtype) for n, value in trainable.merged(params).items()},
            in_shardings=(state.params,),
            out_shardings=trainable.of_model(state.params),
        )
        self.gather = jax.jit(lambda param: param, out_shardings=everywhere)  # of several processes: see `published`

    def compile(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Compiles every program for every shape [R, L] of a microbatch, so that nothing compiles afterwards."""
        params, number = self.abstract.params, jax.ShapeDtypeStruct((), np.float32)
        grads = self.trainable.trained(params)
        self.zeros.lower().compile()
        self.apply.lower(self.abstract, grads).compile()
        self.export.lower(params).compile()
        for shape in shapes:
            rows = self._abstract_rows(shape)
            self.accumulate.lower(params, grads, rows, number, self.with_own_prox(False)).compile()
            self.logprobs.lower(params, {name: rows[name] for name in CONTEXT}, number).compile()

    def begin(self, read_params: Callable[[Mapping[str, Any]], Mapping[str, Array]], seed: int) -> TrainState:
        """The state of version 0: the model's params, read into their places, and adapters that change nothing yet."""
        places = self.abstract.params
        params = self.trainable.with_adapters(read_params(self.trainable.of_model(places)), places, seed)
        return initial_state(params, self.abstract, self.optimizer, self.trainable)

    def _abstract_rows(self, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        batch = empty_batch(*shape)
        arrays = {name: getattr(batch, name) for name in TRAINED} | {"prox_logprobs": batch.behav_logprobs}
        return {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.rows_sharding) for k, a in arrays.items()}

    @property
    def shards(self) -> int:
        """Parts that the rows of a microbatch are split into."""
        return sharding.row_shards(self.mesh)

    def put(self, batch: TrainBatch, names: Sequence[str]) -> Rows:
        """The named arrays of a microbatch on the mesh, its rows split over data and fsdp."""
        return {name: self.put_rows(getattr(batch, name), batch.rows) for name in names}

    def put_rows(self, values_RL: np.ndarray | Array, rows: int) -> Array:
        """One array of a microbatch of `rows` rows on the mesh, given all of them or those of this process' devices."""
        if isinstance(values_RL, Array) and values_RL.is_fully_addressable:
            return jax.device_put(values_RL, self.rows_sharding)
        host_RL = np.asarray(values_RL)
        if len(host_RL) == rows:
            return jax.make_array_from_callback(host_RL.shape, self.rows_sharding, host_RL.__getitem__)
        mine = self.rows_of(jax.process_index(), rows)

        def shard(index: Any) -> np.ndarray:
            begin, end, _ = index[0].indices(rows)
            place = int(np.searchsorted(mine, begin))
            return host_RL[place : place + end - begin]

        return jax.make_array_from_callback((rows, host_RL.shape[1]), self.rows_sharding, shard)

    def rows_of(self, process: int, rows: int) -> np.ndarray:
        """Which rows of a microbatch of `rows` rows the devices of a process have, rising."""
        places: Mapping[Any, Any] = self.rows_sharding.devices_indices_map((rows, 1))
        spans = [index[0].indices(rows) for device, index in places.items() if device.process_index == process]
        return np.unique([range(*span) for span in spans])

    def with_own_prox(self, own_prox: bool) -> Scalars:
        """The scalars of one call of `accumulate`."""
        return self.scalars | {"own_prox": np.bool_(own_prox)}


def build_programs(
    model_config: TransformerConfig,
    config: TrainerConfig,
    objective: Objective,
    *,
    updates: int,
    temperature: float,
    export_dtype: str,
    model: ModelConfig = ModelConfig(),
) -> Programs:
    """The programs for the trainer's section of a config, on the mesh that it describes.

    `updates` is the number of optimizer updates of the whole run, which the learning rate's schedule needs; `model`
    says what trains. Raises ValueError where that is nothing, where it or the mesh does not fit the model, or where the
    devices have no room for it.
    """
    schedule = learning_rate(config.optimizer, updates)
    programs = Programs(
        model_config,
        sharding.make_mesh(dataclasses.asdict(config.mesh)),
        make_optimizer(config.optimizer, schedule),
        schedule,
        objective,
        {"temperature": np.float32(temperature), "clip_eps": np.float32(config.objective.clip_eps)},
        compute_dtype=config.dtype,
        export_dtype=export_dtype,
        vocab_block=config.vocab_block,
        remat=config.remat,
        trainable=lora.trainable(model_config, model),
    )
    room.check(
        (programs.abstract, programs.trainable.trained(programs.abstract.params)),
        what="the trainer's weights, gradients and optimizer state",
        remedy="split them over more devices (config.trainer.mesh.fsdp, .tensor), keep less "
        "(config.trainer.optimizer.moment_dtype=bfloat16, config.model.lora.rank, config.model.freeze), or take a "
        "smaller model; --dry_run prints the plan",
    )
    return programs


def _compiler_options(remat: str, mesh: Mesh) -> dict[str, str]:
    """XLA's order on a CPU is by default the widest, which does early, and keeps, what is to be computed again late."""
    if remat == "none" or mesh.devices.flat[0].platform != "cpu":
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def _make_forward(
    graph: nnx.GraphDef,
    trainable: Trainable,
    rows_sharding: NamedSharding,
    compute_dtype: str,
    block: int,
    remat: str,
) -> Forward:
    lookup_sharding = NamedSharding(rows_sharding.mesh, PartitionSpec("tensor"))

    def forward(params: Params, rows: Rows, temperature: Array) -> tuple[Array, Array]:
        """Log-probabilities and entropies, both [R, L] float32, of the tokens of packed rows."""
        merged = transformer.cast(trainable.merged(params), compute_dtype)
        # Whole along the model axis before the lookup, which would else spread tokens of all rows over every device.
        merged["embedding"] = jax.lax.with_sharding_constraint(merged["embedding"], lookup_sharding)
        model = trainable.with_low_rank_gradients(transformer.bind(graph, merged), params)
        hidden_RLD = model(rows["tokens"], rows["positions"], rows["segment_ids"], remat=remat)
        hidden_RLD = jax.lax.with_sharding_constraint(hidden_RLD, rows_sharding)
        return logprobs.token_logprobs(
            model, hidden_RLD, rows["tokens"], temperature=temperature, block=block, mesh=rows_sharding.mesh
        )

    return forward


def _make_zeros(params: Mapping[str, jax.ShapeDtypeStruct]) -> Callable[[], Params]:
    def zeros() -> Params:
        return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in params.items()}

    return zeros


def _make_accumulate(
    forward: Forward, objective: Objective, trainable: Trainable
) -> Callable[..., tuple[Params, Sums, Array]]:
    def accumulate(
        params: Params, grads: Params, rows: Rows, inverse_tokens: Array, scalars: Scalars
    ) -> tuple[Params, Sums, Array]:
        """Adds the gradient of the microbatch's loss sum / tokens of the whole minibatch."""

        def scaled_loss(trained: Params) -> tuple[Array, tuple[Sums, Array]]:
            logprobs_RL, entropy_RL = forward(params | trained, rows, scalars["temperature"])
            loss, sums = objective(logprobs_RL, rows, scalars)
            entropy = jnp.sum(jax.lax.stop_gradient(entropy_RL) * rows["loss_mask"])
            return loss * inverse_tokens, (sums | {"loss": loss, "entropy": entropy}, logprobs_RL)

        more, (sums, logprobs_RL) = jax.grad(scaled_loss, has_aux=True)(trainable.trained(params))
        return jax.tree.map(jnp.add, grads, more), sums, logprobs_RL

    return accumulate


def _make_apply(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule, trainable: Trainable
) -> Callable[..., Any]:
    def apply(state: TrainState, grads: Params) -> tuple[TrainState, Sums]:
        """One optimizer update; a gradient that is not finite leaves the state as it was."""
        norm = global_norm(grads)
        finite = jnp.isfinite(norm)
        trained = trainable.trained(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        moved = TrainState(state.params | optax.apply_updates(trained, updates), opt_state)
        facts = {"grad_norm": norm, "lr": schedule(updates_done(state)), "skipped": ~finite}
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state), facts

    return apply


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """The microbatches of one optimizer update, with the proximal log-probabilities of each (empty: its own).

    The mean that the loss is counts the `loss_tokens` of the whole microbatches, of whatever rows this process has, and
    `gradless_tokens`, which no microbatch holds: their advantage is 0.
    """

    batches: Sequence[TrainBatch]
    loss_tokens: int
    gradless_tokens: int = 0
    prox_logprobs: Sequence[Array | np.ndarray] = ()

    @classmethod
    def of(
        cls,
        batches: Sequence[TrainBatch],
        *,
        gradless_tokens: int = 0,
        prox_logprobs: Sequence[Array | np.ndarray] = (),
    ) -> "Minibatch":
        """Of whole microbatches."""
        return cls(batches, loss_tokens(batches), gradless_tokens, prox_logprobs)


class Outcome(NamedTuple):
    """What an update leaves for the metrics, on the device until someone looks."""

    sums: list[Sums]  # per microbatch
    facts: Sums
    logprobs: list[Array]  # [R, L] per microbatch, before the update


def published(programs: Programs, params: Params) -> Mapping[str, Array | np.ndarray]:
    """The exported params as a publisher may keep them, on the devices of this process or on its host.

    Of several processes, process 0 gets them and the others nothing. They are gathered one after the other, and go to
    the host while the loop goes on; it waits for that only where more than `GATHERED` would lie on a device at a time.
    """
    exported = programs.export(params)
    if jax.process_count() == 1:
        return exported
    whole: dict[str, Array | np.ndarray] = {}
    on_device: collections.deque[str] = collections.deque()
    for name, value in exported.items():
        while on_device and value.nbytes + sum(whole[each].nbytes for each in on_device) > GATHERED:
            oldest = on_device.popleft()
            whole[oldest] = np.asarray(whole[oldest])
        gathered = programs.gather(value)  # by all processes
        if jax.process_index() == 0:
            on_one = gathered.addressable_data(0)
            on_one.copy_to_host_async()
            whole[name] = on_one
            on_device.append(name)
            del on_one
        del gathered  # so that the other devices forget it at once, and this one as soon as its copy is made
    return whole


def with_prox_logprobs(programs: Programs, params: Params, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
    """Adds the log-probabilities under the weights before the step's first update (AReaL, section 4.2).

    The first minibatch needs no pass: its update starts from those very weights, so its own are the same numbers. They
    come out of another program, whose rounding may differ in the last bit where rows are long.
    """
    temperature = programs.scalars["temperature"]

    def recompute(minibatch: Minibatch) -> Minibatch:
        passes = [programs.logprobs(params, programs.put(b, CONTEXT), temperature) for b in minibatch.batches]
        return dataclasses.replace(minibatch, prox_logprobs=passes)

    return [minibatches[0], *map(recompute, minibatches[1:])]


def with_behav_as_prox(minibatches: Sequence[Minibatch]) -> list[Minibatch]:
    """Naive PPO: the behaviour policy is the proximal one."""
    return [dataclasses.replace(m, prox_logprobs=[b.behav_logprobs for b in m.batches]) for m in minibatches]


def update(programs: Programs, state: TrainState, minibatch: Minibatch) -> tuple[TrainState, Outcome]:
    """One optimizer update; `state` is donated. Gradients are summed over microbatches and divided once, exactly."""
    inverse_tokens = np.float32(1.0 / max(1, minibatch.loss_tokens + minibatch.gradless_tokens))
    own_prox = not minibatch.prox_logprobs
    scalars = programs.with_own_prox(own_prox)
    grads, sums, logprobs_RL = programs.zeros(), [], []
    for i, batch in enumerate(minibatch.batches):
        rows = programs.put(batch, TRAINED)
        prox_RL = rows["behav_logprobs"] if own_prox else programs.put_rows(minibatch.prox_logprobs[i], batch.rows)
        rows["prox_logprobs"] = prox_RL
        grads, *results = programs.accumulate(state.params, grads, rows, inverse_tokens, scalars)
        sums.append(results[0])
        logprobs_RL.append(results[1])
    state, facts = programs.apply(state, grads)
    return state, Outcome(sums, facts, logprobs_RL)
