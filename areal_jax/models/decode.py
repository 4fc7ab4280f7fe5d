"""Prefill and single-token decoding through the transformer's own layers, with a key/value cache per layer.

In: a bound model, tokens, a cache. Out: the cache with the new tokens in it, and logits where one asks. Called by the
generation engine, inside its jitted programs.

Shapes: B rows, L tokens, S slots, C cached tokens, K key/value heads, H head size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from areal_jax.models import attention, kv_cache
from areal_jax.models.kv_cache import CacheLayout, KVCache, LayerCache
from areal_jax.models.transformer import Transformer, TransformerConfig

Rows = tuple[tuple[Array, Array], ...]  # keys and values [B, L, K, H] of each layer


def init_cache(
    config: TransformerConfig,
    slots: int,
    ends: Sequence[int],
    dtype: Any,
    layout: CacheLayout = attention.PLAIN.cache,
) -> KVCache:
    """An empty cache of 2 * layers * slots * ends[-1] * kv_heads * head_size numbers; see `kv_cache.init_cache`."""
    sizes = {"layers": config.layers, "slots": slots, "heads": config.kv_heads, "head_size": config.head_size}
    return kv_cache.init_cache(layout, ends, dtype, **sizes)


def prefill(model: Transformer, tokens_BL: Array) -> Rows:
    """Keys and values [B, L, K, H] of every layer, for rows that start at position 0.

    Rows may be padded at the end: a token never sees a later one. There is no LM head here; the last token's logits
    come from the decode step that feeds it, so that there is one sampling path.
    """

    def attend(query: Array, key: Array, value: Array, cache: None) -> tuple[Array, tuple[Array, Array]]:
        return attention.causal_attention(query, key, value, model.kernels), (key, value)

    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    return model.forward(tokens_BL, positions_BL, attend, [None] * len(model.layers))[1]


def decode_step(
    model: Transformer, tokens_S: Array, positions_S: Array, cache: KVCache, *, attended: int
) -> tuple[Array, KVCache]:
    """Feeds one token per slot at its position: logits [S, V] of the next one, and the cache with this one in it.

    Attention covers the first `attended` cached tokens, which must reach beyond every live position. A slot whose
    position lies outside the cache writes nothing.
    """

    kernels = model.kernels

    def attend(query: Array, key: Array, value: Array, layer: LayerCache) -> tuple[Array, LayerCache]:
        layer = kernels.cache.with_token(layer, key[:, 0], value[:, 0], positions_S, attended)
        mixed_SNH = attention.decode_attention(query[:, 0], layer, positions_S, attended=attended, kernels=kernels)
        return mixed_SNH[:, None], layer

    hidden_S1D, layers = model.forward(tokens_S[:, None], positions_S[:, None], attend, cache.layers)
    return model.logits(hidden_S1D[:, 0]), KVCache(layers)
