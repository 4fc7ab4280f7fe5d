"""Where the time of an update step goes: its parts as programs of their own, against what the machine could do.

In: a model under training, and a packed microbatch. Out: programs to time, and what their times say: seconds of each
part and of its useful FLOPs at the matmul rate. Called by `bench_trainer`. Waits for the device.

    layer products   norms, projections, rotations and feed-forward of a layer, forward and backward, times the layers
    attention        the mixing of a layer over packed rows, forward and backward, times the layers
    head             log-probabilities and entropies from the last hidden states, forward and backward
    optimizer        an empty accumulator, clipping and AdamW
    rest             what the step takes beyond: embedding, the angles of rotations, copies between the parts, what XLA
                     cannot overlap, dispatch

Every backward pass gets its cotangents as an argument, so that no product is simplified away.

Parts compute in the dtype and with the kernels of the step, from float32 params that are cast on the way, as there.

Shapes: R rows, L tokens, D model, N query heads, K key/value heads, H head size.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from areal_jax.config import TrainerConfig
from areal_jax.models import attention, attention_kernels, flops, logprobs
from areal_jax.models.attention import Kernels
from areal_jax.models.transformer import (
    VOCAB_AXIS,
    Layer,
    Params,
    TransformerConfig,
    bind,
    cast,
    graph,
    rope_frequencies,
    rotations,
)
from areal_jax.trainer.step import CONTEXT
from areal_jax.types import TrainBatch
from experiments.bench_steps import FORWARD_AND_BACKWARD, Training


@dataclasses.dataclass(frozen=True)
class Part:
    """A program, how often a microbatch runs it, and the FLOPs of one run that the model asks for."""

    run: Callable[[], Any]
    times: int
    flops: float


def compared(parts: Mapping[str, Part], found: Mapping[str, float], step: float, rate: float) -> dict[str, Any]:
    """By part: its seconds in a step, those that its FLOPs take at `rate`, and the difference, which is lost.

    `found` are the seconds of one run of each part, `step` those of a step of this one microbatch.
    """
    taken = {name: part.times * found[name] for name, part in parts.items()}
    best = {name: part.times * part.flops / rate for name, part in parts.items()}
    taken["rest"], best["rest"] = step - sum(taken.values()), 0.0
    return {
        name: {"seconds": s, "at_the_matmul_rate": best[name], "lost": s - best[name], "share": s / step}
        for name, s in taken.items()
    }


def make_parts(training: Training, batch: TrainBatch) -> dict[str, Part]:
    model, config, rows = training.model, training.config, training.programs.put(batch, CONTEXT)
    kernels = attention_kernels.kernels_for(model.kernels, training.programs.mesh)
    R, L = batch.tokens.shape
    one_layer = dataclasses.replace(model, layers=1)
    kept = [name for name in training.state.params if name.startswith("layers.0.") or not name.startswith("layers.")]
    params = {name: jnp.copy(training.state.params[name]) for name in kept}  # a step donates the state's own
    hidden_RLD = jax.random.normal(jax.random.key(0), (R, L, model.d_model), config.dtype)
    lengths = flops.sequence_lengths(batch.segment_ids)
    head = 2.0 * FORWARD_AND_BACKWARD * model.vocab_size * model.d_model * lengths.sum()
    layer = flops.train_flops(one_layer, lengths) - head
    mixing = layer - 2.0 * FORWARD_AND_BACKWARD * layer_weights(one_layer) * lengths.sum()
    return {
        "layer products": Part(layer_products(one_layer, params, hidden_RLD, rows), model.layers, layer - mixing),
        "attention": Part(mixing_of_a_layer(model, rows["segment_ids"], config.dtype, kernels), model.layers, mixing),
        "head": Part(head_of(one_layer, params, hidden_RLD, rows, config), 1, head),
        "optimizer": Part(functools.partial(optimizer, training), 1, 0.0),
    }


def layer_weights(one_layer: TransformerConfig) -> int:
    """Weights of the products of one layer."""
    return flops.matrix_weights(one_layer) - one_layer.vocab_size * one_layer.d_model


def layer_products(
    one_layer: TransformerConfig, params: Params, hidden_RLD: Array, rows: Mapping[str, Array]
) -> Callable[[], Any]:
    """A layer in which a token keeps its own query, key and value for what others would mix in."""
    graphdef, repeats = graph(one_layer), one_layer.heads // one_layer.kv_heads
    turns = rotations(rope_frequencies(one_layer), rows["positions"])  # which a step computes once for all layers

    def loss(own: Params, others: Params, hidden_RLD: Array, cotangent_RLD: Array) -> Array:
        layer: Layer = bind(graphdef, cast(own | others, hidden_RLD.dtype)).layers[0]
        query_RLNH, key_RLKH, value_RLKH = layer.before(hidden_RLD, *turns)
        own_RLNH = query_RLNH + jnp.repeat(key_RLKH + value_RLKH, repeats, axis=2)
        return jnp.vdot(layer.after(hidden_RLD, own_RLNH), cotangent_RLD)

    program = jax.jit(jax.grad(loss, argnums=(0, 2)))
    own = {name: array for name, array in params.items() if name.startswith("layers.")}
    others = {name: array for name, array in params.items() if name not in own}
    return functools.partial(program, own, others, hidden_RLD, hidden_RLD)


def mixing_of_a_layer(
    model: TransformerConfig, segment_ids_RL: Array, dtype: str, kernels: Kernels
) -> Callable[[], Any]:
    R, L = segment_ids_RL.shape
    keys = jax.random.split(jax.random.key(1), 4)
    heads = (model.heads, model.kv_heads, model.kv_heads, model.heads)
    query, key, value, cotangent = (
        jax.random.normal(k, (R, L, n, model.head_size), dtype) for k, n in zip(keys, heads, strict=True)
    )

    def loss(query: Array, key: Array, value: Array, cotangent: Array) -> Array:
        return jnp.vdot(attention.packed_attention(query, key, value, segment_ids_RL, kernels), cotangent)

    return functools.partial(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), query, key, value, cotangent)


def head_of(
    one_layer: TransformerConfig,
    params: Params,
    hidden_RLD: Array,
    rows: Mapping[str, Array],
    config: TrainerConfig,
) -> Callable[[], Any]:
    graphdef, block = graph(one_layer), config.vocab_block

    def loss(head: Params, others: Params, hidden_RLD: Array, cotangent_RL: Array) -> tuple[Array, Array]:
        model = bind(graphdef, cast(head | others, hidden_RLD.dtype))
        found_RL, entropy_RL = logprobs.token_logprobs(model, hidden_RLD, rows["tokens"], temperature=1.0, block=block)
        return jnp.vdot(found_RL, cotangent_RL), entropy_RL

    program = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
    head = {name: array for name, array in params.items() if name in VOCAB_AXIS}
    others = {name: array for name, array in params.items() if name not in VOCAB_AXIS}
    return functools.partial(program, head, others, hidden_RLD, hidden_RLD[..., 0].astype(jnp.float32))


def optimizer(training: Training) -> Any:
    """An update of a gradient of zeros."""
    training.state, facts = training.programs.apply(training.state, training.programs.zeros())
    return training.state, facts
