"""The key/value cache of the slots: which axis lies where, so that attention reads it as it lies.

In: keys and values of new tokens, or of prefilled rows. Out: the cache with them in it, updated in its place. Called by
decode steps and by the engine's programs; attention reads it.

A layer's cache is one piece, or several that follow each other and end where the engine's length buckets end. Attention
over a bucket then takes whole arrays. A slice would do as well, but XLA copies one before a product on the CPU, which
took longer than the product itself.

Shapes: S slots, C cached tokens, B rows, L tokens of a row, K key/value heads, H head size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

Piece = tuple[Array, Array]  # keys and values of tokens that follow each other
LayerCache = tuple[Piece, ...]


@struct.dataclass
class KVCache:
    """The pieces of each layer. Arrays of their own, so that each is updated in its place."""

    layers: tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The axes of cached keys and values, in order, by the letters s, c, k, h of their shapes.

    k has the same place in both, so that one partition fits both.
    """

    keys: str
    values: str
    in_pieces: bool = False

    def spec(self, slots: Any = None) -> PartitionSpec:
        """Heads over the mesh axis `tensor`, slots over `slots`."""
        return PartitionSpec(*({"k": "tensor", "s": slots}.get(axis) for axis in self.keys))

    def length(self, piece: Piece) -> int:
        return piece[0].shape[self.keys.index("c")]

    def shapes(self, slots: int, tokens: int, heads: int, head_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the keys and the values of one piece."""
        sizes = {"s": slots, "c": tokens, "k": heads, "h": head_size}
        return tuple(sizes[axis] for axis in self.keys), tuple(sizes[axis] for axis in self.values)

    def first(self, layer: LayerCache, tokens: int) -> LayerCache:
        """The first `tokens` of a layer: the pieces that hold them, the last one cut where it reaches beyond."""
        return tuple(
            self._cut(piece, min(tokens - start, self.length(piece)))
            for start, piece in self._placed(layer)
            if start < tokens
        )

    def reaching(self, layer: LayerCache, tokens: int) -> int:
        """How many pieces of a layer hold its first `tokens`."""
        return sum(start < tokens for start, _ in self._placed(layer))

    def with_token(
        self, layer: LayerCache, key_SKH: Array, value_SKH: Array, positions_S: Array, most: int
    ) -> LayerCache:
        """The layer with one more token per slot, at its position below `most`; beyond the cache nothing is written."""
        return tuple(
            self._put(piece, key_SKH, value_SKH, positions_S - start) if start < most else piece
            for start, piece in self._placed(layer)
        )

    def of_rows(self, key_BLKH: Array, value_BLKH: Array, like: LayerCache) -> LayerCache:
        """Rows from position 0 on, as pieces that end where those of `like` end, or where the rows do."""
        L = key_BLKH.shape[1]
        ends = [(start, min(start + self.length(piece), L)) for start, piece in self._placed(like) if start < L]
        return tuple(
            (
                jnp.einsum(f"sckh->{self.keys}", key_BLKH[:, start:end]).astype(like[0][0].dtype),
                jnp.einsum(f"sckh->{self.values}", value_BLKH[:, start:end]).astype(like[0][1].dtype),
            )
            for start, end in ends
        )

    def _placed(self, layer: LayerCache) -> list[tuple[int, Piece]]:
        """The pieces, each with the position of its first token."""
        start, placed = 0, []
        for piece in layer:
            placed.append((start, piece))
            start += self.length(piece)
        return placed

    def _cut(self, piece: Piece, tokens: int) -> Piece:
        keys, values = piece
        return (
            jax.lax.slice_in_dim(keys, 0, tokens, axis=self.keys.index("c")),
            jax.lax.slice_in_dim(values, 0, tokens, axis=self.values.index("c")),
        )

    def _put(self, piece: Piece, key_SKH: Array, value_SKH: Array, at_S: Array) -> Piece:
        slots_S = jnp.arange(len(at_S))
        at_S = jnp.where(at_S < 0, self.length(piece), at_S)  # outside: a negative index counts from the end

        def put(cached: Array, axes: str, new_SKH: Array) -> Array:
            index = tuple({"s": slots_S, "c": at_S}.get(axis, slice(None)) for axis in axes)
            return cached.at[index].set(new_SKH.astype(cached.dtype), mode="drop")

        return put(piece[0], self.keys, key_SKH), put(piece[1], self.values, value_SKH)


# Neither product of plain attention has to turn an operand round, which is a copy on a CPU.
IN_PIECES = CacheLayout("skhc", "skch", in_pieces=True)
HEADS_FIRST = CacheLayout("skch", "skch")  # as Pallas' `gqa` reads it
TOKENS_FIRST = CacheLayout("sckh", "sckh")


def init_cache(
    layout: CacheLayout, ends: Sequence[int], dtype: Any, *, layers: int, slots: int, heads: int, head_size: int
) -> KVCache:
    """An empty cache of 2 * layers * slots * ends[-1] * heads * head_size numbers, in pieces that end at `ends`."""
    ends = list(ends) if layout.in_pieces else [ends[-1]]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    shapes = [layout.shapes(slots, size, heads, head_size) for size in sizes]

    def layer() -> LayerCache:
        return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for keys, values in shapes)

    return KVCache(tuple(layer() for _ in range(layers)))


def write_rows(
    layout: CacheLayout, cache: KVCache, rows: Sequence[tuple[Array, Array]], row_of_slot_S: Array
) -> KVCache:
    """Puts row `row_of_slot[s]` of a prefill, keys and values [B, L, K, H] per layer, at the start of slot s.

    Slots with -1 keep what they have. One slot after the other, so that it costs what is written and not what the cache
    holds.
    """
    taken_S = row_of_slot_S >= 0
    slots_S = jnp.argsort(~taken_S)  # those that take a row come first

    def write(number: Array, layers: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        slot = slots_S[number]
        row = row_of_slot_S[slot]

        def put(cached: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice(cached, new, (slot, *[0] * (cached.ndim - 1)))

        def of_layer(layer: LayerCache, rows: tuple[Array, Array]) -> LayerCache:
            keys, values = (jax.lax.dynamic_slice_in_dim(each, row, 1) for each in rows)
            pieces = layout.of_rows(keys, values, like=layer)
            return jax.tree.map(put, layer[: len(pieces)], pieces) + layer[len(pieces) :]

        return tuple(map(of_layer, layers, rows))

    return KVCache(jax.lax.fori_loop(0, jnp.sum(taken_S), write, cache.layers))
