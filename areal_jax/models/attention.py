"""Causal attention over packed rows, and over the cache of a decode step; plain forms for kernels to be tested against.

Shapes: B rows, L tokens, S slots, C cached tokens, N query heads, K key/value heads, G = N / K queries per key,
H head size.
Scores and softmax are float32 whatever the inputs are.
"""

import jax
import jax.numpy as jnp
from jax import Array


def _attend(query_BLNH: Array, key_BCKH: Array, value_BCKH: Array, visible_BLC: Array) -> Array:
    """Softmax attention with grouped queries; `visible` says which keys a query may see, at least one each."""
    B, L, N, H = query_BLNH.shape
    K = key_BCKH.shape[2]
    query_BLKGH = query_BLNH.reshape(B, L, K, N // K, H)
    scores_BKGLC = jnp.einsum("blkgh,bckh->bkglc", query_BLKGH, key_BCKH, preferred_element_type=jnp.float32) * H**-0.5
    scores_BKGLC = jnp.where(visible_BLC[:, None, None], scores_BKGLC, jnp.finfo(jnp.float32).min)
    weights_BKGLC = jax.nn.softmax(scores_BKGLC, axis=-1).astype(value_BCKH.dtype)
    out_BLKGH = jnp.einsum("bkglc,bckh->blkgh", weights_BKGLC, value_BCKH)
    return out_BLKGH.reshape(B, L, N, H)


def packed_attention(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, segment_ids_BL: Array) -> Array:
    """Causal attention in which a token sees the earlier tokens of its own segment and itself.

    Tokens of a segment are neighbours in order, so causality by place in the row is causality by position.
    """
    L = query_BLNH.shape[1]
    causal_LL = jnp.tril(jnp.ones((L, L), jnp.bool_))
    visible_BLL = (segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]) & causal_LL[None]
    return _attend(query_BLNH, key_BLKH, value_BLKH, visible_BLL)


def decode_attention(query_SNH: Array, key_SCKH: Array, value_SCKH: Array, positions_S: Array) -> Array:
    """One query per slot, at `positions_S`, over the cached tokens up to and including that position."""
    visible_S1C = (jnp.arange(key_SCKH.shape[1])[None] <= positions_S[:, None])[:, None]
    return _attend(query_SNH[:, None], key_SCKH, value_SCKH, visible_S1C)[:, 0]
