"""Causal attention over packed rows, over prefilled rows, and over the cache of a decode step.

The plain forms here run everywhere and are what every kernel is tested against. A program is given the `Kernels` of its
backend (attention_kernels.py); a shape that a kernel does not take is computed by the plain form, by the kernel's own
rule, which is logged once. Called by the layers of the transformer; waits for nobody.

Shapes: B rows, L tokens, S slots, C cached tokens, N query heads, K key/value heads, G = N / K
queries per key, H head size. Scores and softmax are float32 whatever the inputs are.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from areal_jax.models import tiled_attention
from areal_jax.models.kv_cache import IN_PIECES, CacheLayout, LayerCache
from areal_jax.models.sharding import ROWS
from areal_jax.models.tiled_attention import Tile

log = logging.getLogger(__name__)

ROW_HEADS = PartitionSpec(*ROWS, None, "tensor", None)  # [B, L, N, H]: rows over data and fsdp, heads over tensor
PACKED = (ROW_HEADS, ROW_HEADS, ROW_HEADS, ROWS)
ONE_HEADS = PartitionSpec(*ROWS, "tensor", None)  # [S, N, H]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An attention kernel of some package, and the rule that says what it takes."""

    name: str
    refusal: Callable[[Array, Array], str]  # (query, key) -> why it does not take them; "" = it does
    run: Callable[..., Array]


def all_at_once(
    fn: Callable[..., Any], params: Any, *arrays: Array, axes: int, plain: Callable[..., Any] | None = None
) -> Any:
    """fn(params, *arrays) for work on each token by itself; the first `axes` axes of the arrays are the tokens'.

    `plain` is the same function in a form for many tokens.
    """
    del axes
    return (plain or fn)(params, *arrays)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a backend (None: there is only the plain form), and the mesh that splits rows and heads.

    causal(query_BLNH, key_BLKH, value_BLKH)
    packed(query_BLNH, key_BLKH, value_BLKH, segment_ids_BL), with gradients
    decode(query_SNH, keys, values, lengths_S), over the first `lengths` of each slot, at least one; the cache in one
        piece, its axes in the order of `cache`
    """

    causal: Kernel | None = None
    packed: Kernel | None = None
    decode: Kernel | None = None
    cache: CacheLayout = IN_PIECES
    mesh: Mesh | None = None
    tile: Tile | None = None  # of the plain form of packed attention; None = the fastest on a CPU
    per_token: Callable[..., Any] = all_at_once  # not attention: how norms, projections, feed-forward, head are run


PLAIN = Kernels()


def packed_attention(
    query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, segment_ids_BL: Array, kernels: Kernels = PLAIN
) -> Array:
    """Causal attention in which a token sees the earlier tokens of its own segment and itself.

    Tokens of a segment are neighbours in order, so causality by place in the row is causality by position.
    """
    if (kernel := kernels.packed) is not None and _takes(kernel, query_BLNH, key_BLKH):
        run = kernel.run
    else:
        tile = kernels.tile or tiled_attention.tile_for(query_BLNH.shape[1], query_BLNH.shape[3])
        run = functools.partial(tiled_attention.packed, tile=tile)
    return _on_each_device(run, kernels.mesh, PACKED)(query_BLNH, key_BLKH, value_BLKH, segment_ids_BL)


def causal_attention(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, kernels: Kernels = PLAIN) -> Array:
    """Attention in which a token sees the earlier tokens of its row and itself. No gradient is asked for."""
    if (kernel := kernels.causal) is not None and _takes(kernel, query_BLNH, key_BLKH):
        return _on_each_device(kernel.run, kernels.mesh, PACKED[:3])(query_BLNH, key_BLKH, value_BLKH)
    one_segment_BL = jnp.ones(query_BLNH.shape[:2], jnp.int32)
    plain = dataclasses.replace(kernels, packed=None)
    return packed_attention(query_BLNH, key_BLKH, value_BLKH, one_segment_BL, plain)


def decode_attention(
    query_SNH: Array,
    layer: LayerCache,
    positions_S: Array,
    *,
    attended: int,
    kernels: Kernels = PLAIN,
) -> Array:
    """One query per slot, at `positions_S`, over the cached tokens up to and including that position.

    The cache lies as `kernels.cache` says. Its first `attended` tokens must reach beyond every position within it.
    """
    layout = kernels.cache
    if (kernel := kernels.decode) is not None and _takes(kernel, query_SNH, layer[0][0]):
        ((keys, values),) = layer  # the whole cache, as it lies: the kernel stops at each slot's own length
        # A free slot stands behind the cache, and nobody reads what it gets.
        lengths_S = jnp.where(positions_S < layout.length(layer[0]), positions_S + 1, 1)
        cache = layout.spec(ROWS[0])
        specs = (ONE_HEADS, cache, cache, ROWS)
        return _on_each_device(kernel.run, kernels.mesh, specs)(query_SNH, keys, values, lengths_S)
    return _plain_decode(query_SNH, layout.first(layer, attended), layout, positions_S)


def _plain_decode(query_SNH: Array, layer: LayerCache, layout: CacheLayout, positions_S: Array) -> Array:
    """Scores of all pieces side by side under one softmax; what each piece adds is summed in float32."""
    S, N, H = query_SNH.shape
    K = layer[0][0].shape[layout.keys.index("k")]
    query_SKGH = query_SNH.reshape(S, K, N // K, H)
    scores_SKGC = H**-0.5 * jnp.concatenate(
        [_einsum32(f"skgh,{layout.keys}->skgc", query_SKGH, keys) for keys, _ in layer], axis=-1
    )
    visible_SC = jnp.arange(scores_SKGC.shape[-1])[None] <= positions_S[:, None]
    scores_SKGC = jnp.where(visible_SC[:, None, None], scores_SKGC, jnp.finfo(jnp.float32).min)
    weights_SKGC = jax.nn.softmax(scores_SKGC, axis=-1).astype(layer[0][1].dtype)
    ends = np.cumsum([layout.length(piece) for piece in layer])
    parts = zip(jnp.split(weights_SKGC, ends[:-1], axis=-1), layer, strict=True)
    mixed = [_einsum32(f"skgc,{layout.values}->skgh", weights, values) for weights, (_, values) in parts]
    return functools.reduce(jnp.add, mixed).astype(query_SNH.dtype).reshape(S, N, H)


def _einsum32(axes: str, left: Array, right: Array) -> Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


def _takes(kernel: Kernel, query: Array, key: Array) -> bool:
    reason = kernel.refusal(query, key)
    if reason:
        _log_refusal(kernel.name, reason)
    return not reason


@functools.cache  # one line per kernel and reason, not one per layer and program
def _log_refusal(name: str, reason: str) -> None:
    log.warning("attention: the plain form instead of %s, as %s", name, reason)


def _on_each_device(
    run: Callable[..., Array], mesh: Mesh | None, specs: tuple[PartitionSpec, ...]
) -> Callable[..., Array]:
    """A kernel on each device's own rows and heads: the partitioner cannot look into it."""
    if mesh is None or mesh.size == 1:
        return run
    # check_vma off: a Pallas call does not say along which axes its results differ.
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
