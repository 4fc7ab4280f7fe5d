"""The slow twin of generation: one forward pass of a whole sequence, as a program that is compiled once."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.transformer import TransformerConfig, bind, graph

LENGTH = 64  # tokens are padded to multiples of this: no token sees what comes after it


def logits_behind(config: TransformerConfig, params: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] behind each of T tokens, float32."""
    row_1L = np.zeros((1, -(-len(tokens) // LENGTH) * LENGTH), np.int32)
    row_1L[0, : len(tokens)] = tokens
    return np.asarray(_logits(config, dict(params), row_1L))[0, : len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: TransformerConfig, params: Mapping[str, Any], row_1L: jax.Array) -> jax.Array:
    model = bind(graph(config), params)
    return model.logits(model(row_1L, jnp.arange(row_1L.shape[1])[None], jnp.ones_like(row_1L)))


def full_logprobs(
    config: TransformerConfig, params: Mapping[str, Any], tokens: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """log p of every token but the first, in float64."""
    scaled_TV = logits_behind(config, params, tokens)[:-1].astype(np.float64) / temperature
    scaled_TV -= scaled_TV.max(-1, keepdims=True)
    return scaled_TV[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(scaled_TV).sum(-1))
