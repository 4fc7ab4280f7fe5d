"""The plain form of packed causal attention: JAX without kernels, a tile of queries and keys at a time.

A row's scores never exist as a whole, forward or backward, and only those tiles are computed in which a query may see a
key: from the tile in which the oldest segment of the queries begins to the one on the diagonal. So the work grows with
the pairs that attend, memory with the row, and a tile stays in the processor's cache between its products. The softmax
is summed while the keys go by, and the backward pass computes each tile once more from the saved log-sum-exp
(FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2).

In: queries, keys, values, segments. Out: what they mix to. Called by `attention`; waits for nobody. Scores, softmax and
sums are float32; products take their operands in the dtype of the inputs.

Shapes: B rows, L tokens, N query heads, K key/value heads, G = N / K queries per key, H head size, T keys of a tile, U
tokens whose queries are a tile's; Q = G * U of these queries.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from areal_jax.models.products import sum_of_products

HIDDEN = jnp.finfo(jnp.float32).min / 2  # a score that adds nothing beside any other; differences of two are finite


@dataclasses.dataclass(frozen=True)
class Tile:
    """How many tokens' queries, and how many keys, are a tile; a row need not be a multiple of either."""

    queries: int
    keys: int


SMALL, LARGE = Tile(64, 64), Tile(256, 128)


def tile_for(length: int, head_size: int) -> Tile:
    """The tile that is fastest on a CPU (`bench_trainer --parts=tiles`).

    Larger products use more cores, but more of a tile is hidden or of other segments. So heads of 64 and more gain, in
    rows that have room for long segments.
    """
    return SMALL if length < 2048 or head_size < 64 else LARGE


@functools.partial(jax.custom_vjp, nondiff_argnames=("tile",))
def packed(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, segment_ids_BL: Array, tile: Tile) -> Array:
    """As `attention.packed_attention`, a tile at a time."""
    return _forward(query_BLNH, key_BLKH, value_BLKH, segment_ids_BL, tile)[0]


def _forward(
    query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, segment_ids_BL: Array, tile: Tile
) -> tuple[Array, tuple[Array, ...]]:
    begins_BL = _begins(segment_ids_BL, tile)
    rows = (*_by_head(query_BLNH, key_BLKH, value_BLKH, tile), begins_BL)
    out_BKGLH, log_z_BKGL = _map(functools.partial(_row, tile=tile), rows)
    out_BLNH = _by_token(out_BKGLH, query_BLNH.shape)
    return out_BLNH, (query_BLNH, key_BLKH, value_BLKH, begins_BL, out_BLNH, log_z_BKGL)


def _backward(tile: Tile, residuals: tuple[Array, ...], gradient_BLNH: Array) -> tuple[Array, Array, Array, None]:
    query_BLNH, key_BLKH, value_BLKH, begins_BL, out_BLNH, log_z_BKGL = residuals
    query_BKGLH, key_BKLH, value_BKLH = _by_head(query_BLNH, key_BLKH, value_BLKH, tile)
    gradient_BKGLH = _by_head(gradient_BLNH, key_BLKH, value_BLKH, tile)[0]
    # What a row of the softmax's Jacobian subtracts: the mean of the weights' gradients under the weights.
    mean_BLN1 = sum_of_products(out_BLNH, gradient_BLNH)[..., None]
    mean_BKGL = _by_head(mean_BLN1, key_BLKH, value_BLKH, tile)[0][..., 0]
    rows = (query_BKGLH, key_BKLH, value_BKLH, begins_BL, gradient_BKGLH, log_z_BKGL, mean_BKGL)
    found = _map(functools.partial(_gradients_of_row, tile=tile), rows)
    shapes = (query_BLNH.shape, key_BLKH.shape, value_BLKH.shape)
    query, key, value = (_by_token(x, shape) for x, shape in zip(found, shapes, strict=True))
    return query, key, value, None


packed.defvjp(_forward, _backward)


# A row.


def _row(query_KGLH: Array, key_KLH: Array, value_KLH: Array, begins_L: Array, *, tile: Tile) -> tuple[Array, Array]:
    """What its tokens mix to [K, G, L, H], and the log of each softmax's denominator [K, G, L]."""
    K, G, L, H = query_KGLH.shape
    Q = G * tile.queries

    def of_queries(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        query_KQH = _queries(query_KGLH, i, tile)

        def over_keys(j: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest_KQ, sum_KQ, mixed_KQH = so_far
            scores_KQT = _scores(query_KQH, _keys(key_KLH, j, tile), begins_L, i, j, tile)
            new_KQ = jnp.maximum(highest_KQ, jnp.max(scores_KQT, axis=-1))
            # Where all keys so far were hidden this is 1 for each of them, and 0 times it once one is seen: each query
            # sees itself in the end.
            weights_KQT = jnp.exp(scores_KQT - new_KQ[..., None])
            kept_KQ = jnp.exp(highest_KQ - new_KQ)
            more_KQH = _product("kqt,kth->kqh", weights_KQT.astype(value_KLH.dtype), _keys(value_KLH, j, tile))
            sum_KQ = sum_KQ * kept_KQ + jnp.sum(weights_KQT, axis=-1)
            return new_KQ, sum_KQ, mixed_KQH * kept_KQ[..., None] + more_KQH

        nothing = (jnp.full((K, Q), HIDDEN), jnp.zeros((K, Q)), jnp.zeros((K, Q, H)))
        highest_KQ, sum_KQ, mixed_KQH = jax.lax.fori_loop(*_visible(begins_L, i, tile), over_keys, nothing)
        mixed_KQH = (mixed_KQH / sum_KQ[..., None]).astype(query_KGLH.dtype)
        return _put(done[0], mixed_KQH, i, tile), _put(done[1], highest_KQ + jnp.log(sum_KQ), i, tile)

    empty = (jnp.zeros_like(query_KGLH), jnp.zeros((K, G, L)))
    return jax.lax.fori_loop(0, L // tile.queries, of_queries, empty)


def _gradients_of_row(
    query_KGLH: Array,
    key_KLH: Array,
    value_KLH: Array,
    begins_L: Array,
    gradient_KGLH: Array,
    log_z_KGL: Array,
    mean_KGL: Array,
    *,
    tile: Tile,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, from the one of what they mix to."""
    L, H = query_KGLH.shape[2:]
    dtype = query_KGLH.dtype

    def of_queries(i: Array, done: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        query_KQH, gradient_KQH = _queries(query_KGLH, i, tile), _queries(gradient_KGLH, i, tile)
        log_z_KQ, mean_KQ = _queries(log_z_KGL, i, tile), _queries(mean_KGL, i, tile)

        def over_keys(j: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_query_KQH, of_key_KHL, of_value_KHL = so_far
            key_KTH = _keys(key_KLH, j, tile)
            weights_KQT = jnp.exp(_scores(query_KQH, key_KTH, begins_L, i, j, tile) - log_z_KQ[..., None])
            of_weights_KQT = _product("kqh,kth->kqt", gradient_KQH, _keys(value_KLH, j, tile))
            of_scores_KQT = (weights_KQT * (of_weights_KQT - mean_KQ[..., None]) * H**-0.5).astype(dtype)
            of_query_KQH += _product("kqt,kth->kqh", of_scores_KQT, key_KTH)
            # Keys last: XLA's CPU backend is slower where the weights' last axis becomes the first.
            of_key_KHT = _product("kqt,kqh->kht", of_scores_KQT, query_KQH)
            of_value_KHT = _product("kqt,kqh->kht", weights_KQT.astype(dtype), gradient_KQH)
            return of_query_KQH, _add(of_key_KHL, of_key_KHT, j, tile), _add(of_value_KHL, of_value_KHT, j, tile)

        of_query_KGLH, *of_keys = done
        begin = (jnp.zeros(query_KQH.shape), *of_keys)
        of_query_KQH, *of_keys = jax.lax.fori_loop(*_visible(begins_L, i, tile), over_keys, begin)
        return _put(of_query_KGLH, of_query_KQH.astype(dtype), i, tile), *of_keys

    zeros_KHL = jnp.zeros(key_KLH.swapaxes(1, 2).shape)
    zeros = (jnp.zeros_like(query_KGLH), zeros_KHL, zeros_KHL)
    of_query_KGLH, *of_keys = jax.lax.fori_loop(0, L // tile.queries, of_queries, zeros)
    of_key_KLH, of_value_KLH = (each.swapaxes(1, 2).astype(dtype) for each in of_keys)
    return of_query_KGLH, of_key_KLH, of_value_KLH


# A tile.


def _visible(begins_L: Array, i: Array, tile: Tile) -> tuple[Array, Array]:
    """The first tile of keys that some query of tile i sees, and the one after the last."""
    return begins_L[i * tile.queries] // tile.keys, -(-(i + 1) * tile.queries // tile.keys)


def _scores(query_KQH: Array, key_KTH: Array, begins_L: Array, i: Array, j: Array, tile: Tile) -> Array:
    """Of tile i of the queries and tile j of the keys, [K, Q, T]; `HIDDEN` where a query may not see the key."""
    K, _, H = query_KQH.shape
    scores_KQT = _product("kqh,kth->kqt", query_KQH, key_KTH) * H**-0.5
    queries_U1 = (i * tile.queries + jnp.arange(tile.queries))[:, None]
    keys_1T = (j * tile.keys + jnp.arange(tile.keys))[None]
    begins_U1 = jax.lax.dynamic_slice_in_dim(begins_L, i * tile.queries, tile.queries)[:, None]
    visible_UT = (keys_1T <= queries_U1) & (keys_1T >= begins_U1)
    return jnp.where(visible_UT, scores_KQT.reshape(K, -1, *visible_UT.shape), HIDDEN).reshape(scores_KQT.shape)


def _product(axes: str, left: Array, right: Array) -> Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


def _queries(array_KGL: Array, i: Array, tile: Tile) -> Array:
    """Tile i of an array [K, G, L, ...] as [K, Q, ...]."""
    cut = jax.lax.dynamic_slice_in_dim(array_KGL, i * tile.queries, tile.queries, axis=2)
    return cut.reshape(cut.shape[0], -1, *cut.shape[3:])


def _keys(array_KLH: Array, j: Array, tile: Tile) -> Array:
    return jax.lax.dynamic_slice_in_dim(array_KLH, j * tile.keys, tile.keys, axis=1)


def _put(array_KGL: Array, of_tile_KQ: Array, i: Array, tile: Tile) -> Array:
    K, G, _, *rest = array_KGL.shape
    of_tile_KGU = of_tile_KQ.reshape(K, G, tile.queries, *rest)
    return jax.lax.dynamic_update_slice_in_dim(array_KGL, of_tile_KGU, i * tile.queries, axis=2)


def _add(array_KHL: Array, more_KHT: Array, j: Array, tile: Tile) -> Array:
    so_far_KHT = jax.lax.dynamic_slice_in_dim(array_KHL, j * tile.keys, tile.keys, axis=2)
    return jax.lax.dynamic_update_slice_in_dim(array_KHL, so_far_KHT + more_KHT, j * tile.keys, axis=2)


# Rows.


def _begins(segment_ids_BL: Array, tile: Tile) -> Array:
    """At which place of its row the segment of each token begins, [B, L]; L filled up to whole tiles."""
    filled_BL = jnp.pad(segment_ids_BL, ((0, 0), (0, -segment_ids_BL.shape[1] % _whole(tile))), mode="edge")
    first_B1 = jnp.ones((len(filled_BL), 1), jnp.bool_)
    new_BL = jnp.concatenate([first_B1, filled_BL[:, 1:] != filled_BL[:, :-1]], axis=1)
    return jax.lax.cummax(jnp.where(new_BL, jnp.arange(filled_BL.shape[1]), 0), axis=1)


def _by_head(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, tile: Tile) -> tuple[Array, Array, Array]:
    """[B, K, G, L, H], [B, K, L, H] and [B, K, L, H], in which the tokens of a head are neighbours."""
    B, L, N, H = query_BLNH.shape
    K = key_BLKH.shape[2]
    query_BKGLH = query_BLNH.reshape(B, L, K, N // K, H).transpose(0, 2, 3, 1, 4)
    key_BKLH, value_BKLH = (array.swapaxes(1, 2) for array in (key_BLKH, value_BLKH))
    return _fill(query_BKGLH, tile, axis=3), _fill(key_BKLH, tile, axis=2), _fill(value_BKLH, tile, axis=2)


def _by_token(array: Array, shape: tuple[int, ...]) -> Array:
    """[B, K, (G,) L, H] as `shape`, which is [B, L, N, H] without what tiles were filled up with."""
    return jnp.moveaxis(array, -2, 1)[:, : shape[1]].reshape(shape)


def _fill(array: Array, tile: Tile, *, axis: int) -> Array:
    """Whole tiles along an axis, with zeros: of a gradient they add nothing to those of keys and values."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % _whole(tile))
    return jnp.pad(array, widths)


def _whole(tile: Tile) -> int:
    """Tokens that are whole tiles of queries and of keys."""
    return math.lcm(tile.queries, tile.keys)


def _map(one_row: Any, rows: tuple[Array, ...]) -> Any:
    """One row after the other: each has bounds of its own."""
    if len(rows[0]) == 1:
        return jax.tree.map(lambda array: array[None], one_row(*(array[0] for array in rows)))
    return jax.lax.map(lambda row: one_row(*row), rows)
