"""Prefill and single-token decoding through the transformer's own layers, with a key/value cache per layer.

In: a bound model, tokens, a cache. Out: the cache with the new tokens in it, and logits where one asks. Called by the
generation engine, inside its jitted programs.

Shapes: B rows, L tokens, S slots, C cached tokens, K key/value heads, H head size, V vocabulary.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from areal_jax.models import attention
from areal_jax.models.transformer import Transformer, TransformerConfig

LayerCache = tuple[Array, Array]  # keys, values


@struct.dataclass
class KVCache:
    """Keys and values per layer, each [S, C, K, H]. One array per layer, so that each is updated in its place."""

    layers: tuple[LayerCache, ...]

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]


def init_cache(config: TransformerConfig, slots: int, length: int, dtype: Any) -> KVCache:
    """An empty cache of 2 * layers * slots * length * kv_heads * head_size numbers."""
    shape_SCKH = (slots, length, config.kv_heads, config.head_size)
    return KVCache(tuple((jnp.zeros(shape_SCKH, dtype), jnp.zeros(shape_SCKH, dtype)) for _ in range(config.layers)))


def prefill(model: Transformer, tokens_BL: Array) -> tuple[LayerCache, ...]:
    """Keys and values [B, L, K, H] of every layer, for rows that start at position 0.

    Rows may be padded at the end: a token never sees a later one. There is no LM head here; the last token's logits
    come from the decode step that feeds it, so that there is one sampling path.
    """

    def attend(query: Array, key: Array, value: Array, cache: None) -> tuple[Array, LayerCache]:
        return attention.causal_attention(query, key, value, model.kernels), (key, value)

    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    return model.forward(tokens_BL, positions_BL, attend, [None] * len(model.layers))[1]


def write_rows(cache: KVCache, rows: tuple[LayerCache, ...], row_of_slot_S: Array) -> KVCache:
    """Puts row `row_of_slot[s]` of a prefill at the start of slot s; slots with -1 keep what they have."""
    length = rows[0][0].shape[1]
    taken = (row_of_slot_S >= 0)[:, None, None, None]

    def write(cached_SCKH: Array, rows_BLKH: Array) -> Array:
        old = cached_SCKH[:, :length]
        return cached_SCKH.at[:, :length].set(jnp.where(taken, rows_BLKH[row_of_slot_S].astype(old.dtype), old))

    pairs = zip(cache.layers, rows, strict=True)
    return KVCache(tuple((write(keys, k), write(values, v)) for (keys, values), (k, v) in pairs))


def decode_step(
    model: Transformer, tokens_S: Array, positions_S: Array, cache: KVCache, *, attended: int
) -> tuple[Array, KVCache]:
    """Feeds one token per slot at its position: logits [S, V] of the next one, and the cache with this one in it.

    Attention covers the first `attended` cached tokens, which must reach beyond every live position. A slot whose
    position lies outside the cache writes nothing.
    """
    slots = jnp.arange(tokens_S.shape[0])

    def attend(query: Array, key: Array, value: Array, layer: LayerCache) -> tuple[Array, LayerCache]:
        keys, values = (
            cached.at[slots, positions_S].set(new[:, 0].astype(cached.dtype), mode="drop")
            for cached, new in zip(layer, (key, value), strict=True)
        )
        mixed_SNH = attention.decode_attention(
            query[:, 0], keys, values, positions_S, attended=attended, kernels=model.kernels
        )
        return mixed_SNH[:, None], (keys, values)

    hidden_S1D, layers = model.forward(tokens_S[:, None], positions_S[:, None], attend, cache.layers)
    return model.logits(hidden_S1D[:, 0]), KVCache(layers)
