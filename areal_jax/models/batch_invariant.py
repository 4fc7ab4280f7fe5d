"""Arithmetic whose result for a token does not depend, in any bit, on what else is computed beside it.

XLA picks other matrix kernels, fusions and orders of summation for other shapes, so that a token's log-probability
differs in its last bits between a decode step, a prefill and a training forward. Here every token goes through programs
of one shape, whoever asks:

    per-token work   in tiles of TILE tokens (the last one filled up), one after the other, each between barriers over
                     which XLA fuses nothing
    attention        in tiles of TILE queries; a query goes over the keys of its own sequence in blocks of KEYS, counted
                     from the start of the sequence, so that neither the row's nor the cache's length shows

The gradient is that of the plain form, at the inputs of the exact one: only forward numbers are compared bit for bit.

In: a mesh of one device. Out: `KERNELS`, with which both sides build their model for `generation.batch_invariant`. It
is a tool that proves: what is then left between generator and trainer is not rounding but a difference of algorithm. It
costs speed. Tested on the CPU, where both sides must have the same version of XLA and the same number of threads.

Shapes: T tokens (or queries), W keys of a block, R rows, L tokens of a row, S slots, C cached tokens, N query heads,
K key/value heads, G = N / K queries per key, H head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from areal_jax.models import attention
from areal_jax.models.kv_cache import TOKENS_FIRST

TILE = 8  # tokens; XLA's CPU matrix kernels are the same for every place in such a tile
KEYS = 64  # per block; with fewer the loop costs more than the products


def per_token(
    fn: Callable[..., Any], params: Any, *arrays: Array, axes: int, plain: Callable[..., Any] | None = None
) -> Any:
    """fn(params, *arrays) in tiles; the first `axes` axes of arrays and results are those of the tokens.

    `plain` is the same function in a form for many tokens, whose gradient is taken.

    A number among the arrays becomes one per token, [..., 1]: XLA divides by it in another way than by an array.
    """
    shape = arrays[0].shape[:axes]
    arrays = tuple(x if jnp.ndim(x) else jnp.full((*shape, 1), x) for x in arrays)
    tile = (*[1] * (axes - 1), TILE)

    def tiled(params: Any, *arrays: Array) -> Any:
        rows = (array.reshape(-1, *array.shape[axes:]) for array in arrays)
        found = in_tiles(fn, params, *rows, tile=tile)
        return jax.tree.map(lambda array: array.reshape(*shape, *array.shape[1:]), found)

    return with_gradient_of(plain or fn, tiled, params, *arrays)


def in_tiles(fn: Callable[..., Any], params: Any, *rows: Array, tile: tuple[int, ...] = (TILE,)) -> Any:
    """fn(params, *rows) for rows [T, ...], called with `tile` in the place of T, whatever T is."""
    params = jax.lax.optimization_barrier(params)  # else XLA would take a cast out of the loop and drop its rounding

    def one(rows: tuple[Array, ...]) -> Any:
        found = fn(params, *jax.lax.optimization_barrier(rows))
        return jax.lax.optimization_barrier(found)

    T = len(rows[0])
    found = jax.lax.map(one, tuple(_split(array, tile) for array in rows))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[1 + len(tile) :])[:T], found)


def _split(array: Array, tile: tuple[int, ...]) -> Array:
    filled = jnp.pad(array, [(0, -len(array) % TILE), *[(0, 0)] * (array.ndim - 1)], mode="edge")
    return filled.reshape(-1, *tile, *array.shape[1:])


def with_gradient_of(plain: Callable[..., Any], exact: Callable[..., Any], *arguments: Any) -> Any:
    """exact(*arguments), with the derivatives that `plain` has there."""

    @jax.custom_vjp
    def call(*arguments: Any) -> Any:
        return exact(*arguments)

    call.defvjp(
        lambda *arguments: (exact(*arguments), arguments),
        lambda arguments, cotangents: jax.vjp(plain, *arguments)[1](cotangents),
    )
    return call(*arguments)


def packed_attention(query_RLNH: Array, key_RLKH: Array, value_RLKH: Array, segment_ids_RL: Array) -> Array:
    """As `attention.packed_attention`; the tokens of a segment are neighbours."""

    def exact(query_RLNH: Array, key_RLKH: Array, value_RLKH: Array, segment_ids_RL: Array) -> Array:
        R, L = segment_ids_RL.shape
        places_RL = jnp.broadcast_to(jnp.arange(L), (R, L))
        begins_RL = jnp.diff(segment_ids_RL, axis=1, prepend=segment_ids_RL[:, :1] - 1) != 0
        starts_RL = jax.lax.cummax(jnp.where(begins_RL, places_RL, 0), axis=1)
        rows_RL = jnp.broadcast_to(jnp.arange(R)[:, None], (R, L))
        flat = (x.reshape(R * L, *x.shape[2:]) for x in (query_RLNH, rows_RL, starts_RL, places_RL))
        return _attend(key_RLKH, value_RLKH, *flat).reshape(query_RLNH.shape)

    return with_gradient_of(attention.packed_attention, exact, query_RLNH, key_RLKH, value_RLKH, segment_ids_RL)


def causal_attention(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array) -> Array:
    """As `attention.causal_attention`."""
    return packed_attention(query_BLNH, key_BLKH, value_BLKH, jnp.ones(query_BLNH.shape[:2], jnp.int32))


def decode_attention(query_SNH: Array, key_SCKH: Array, value_SCKH: Array, lengths_S: Array) -> Array:
    """One query per slot over its first `lengths` cached tokens."""
    starts_S = jnp.zeros_like(lengths_S)
    return _attend(key_SCKH, value_SCKH, query_SNH, jnp.arange(len(lengths_S)), starts_S, lengths_S - 1)


def _attend(
    key_RCKH: Array, value_RCKH: Array, query_TNH: Array, rows_T: Array, starts_T: Array, places_T: Array
) -> Array:
    """Attention of queries over the keys start to place of their row."""

    def tile(cache: tuple[Array, Array], query: Array, rows: Array, starts: Array, places: Array) -> Array:
        return _attend_tile(*cache, query, rows, starts, places)

    return in_tiles(tile, (key_RCKH, value_RCKH), query_TNH, rows_T, starts_T, places_T)


def _attend_tile(
    key_RCKH: Array, value_RCKH: Array, query_TNH: Array, rows_T: Array, starts_T: Array, places_T: Array
) -> Array:
    """Online softmax (arXiv 1805.02867): a block that a query does not see leaves its sums as they are."""
    T, N, H = query_TNH.shape
    K = key_RCKH.shape[2]
    query_TKGH = query_TNH.reshape(T, K, N // K, H)
    least = jnp.finfo(jnp.float32).min

    def block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most_TKG, total_TKG, mixed_TKGH = carry
        at_TW = starts_T[:, None] + index * KEYS + jnp.arange(KEYS)
        visible_TKGW = (at_TW <= places_T[:, None])[:, None, None]
        inside = (rows_T[:, None], jnp.minimum(at_TW, key_RCKH.shape[1] - 1))
        key_TWKH, value_TWKH = jax.lax.optimization_barrier((key_RCKH[inside], value_RCKH[inside]))
        scores_TKGW = jnp.einsum("tkgh,twkh->tkgw", query_TKGH, key_TWKH, preferred_element_type=jnp.float32)
        scores_TKGW = jnp.where(visible_TKGW, scores_TKGW * H**-0.5, least)
        higher_TKG = jnp.maximum(most_TKG, scores_TKGW.max(-1))
        weights_TKGW = jnp.where(visible_TKGW, jnp.exp(scores_TKGW - higher_TKG[..., None]), 0.0)
        shrink_TKG = jnp.exp(most_TKG - higher_TKG)
        more_TKGH = jnp.einsum("tkgw,twkh->tkgh", weights_TKGW, value_TWKH.astype(jnp.float32))
        return (
            higher_TKG,
            total_TKG * shrink_TKG + weights_TKGW.sum(-1),
            mixed_TKGH * shrink_TKG[..., None] + more_TKGH,
        )

    blocks = jnp.max(places_T - starts_T) // KEYS + 1
    zeros_TKG = jnp.zeros(query_TKGH.shape[:3], jnp.float32)
    nothing = (jnp.full_like(zeros_TKG, least), zeros_TKG, jnp.zeros(query_TKGH.shape, jnp.float32))
    _, total_TKG, mixed_TKGH = jax.lax.fori_loop(0, blocks, block, nothing)
    return (mixed_TKGH / total_TKG[..., None]).astype(query_TNH.dtype).reshape(T, N, H)


def kernels_for(mesh: Mesh) -> attention.Kernels:
    """`KERNELS`. Raises ValueError for a mesh of several devices, which add up in an order of their own."""
    if mesh.size > 1:
        raise ValueError(
            f"generation.batch_invariant promises its bits on one device, and this mesh has {mesh.size}: "
            f"{dict(mesh.shape)}; set trainer.mesh.data=1 on a machine with one device, or take the mode off"
        )
    return KERNELS


def _takes_all(query: Array, key: Array) -> str:
    del query, key
    return ""


KERNELS = attention.Kernels(
    causal=attention.Kernel("batch-invariant attention", _takes_all, causal_attention),
    packed=attention.Kernel("batch-invariant attention", _takes_all, packed_attention),
    decode=attention.Kernel("batch-invariant attention", _takes_all, decode_attention),
    cache=TOKENS_FIRST,
    per_token=per_token,
)
