"""The decoder-only transformer that trainer and generation servers share.

In: token ids. Out: hidden states, and logits for those who ask. One class covers the Llama, Qwen2 and Qwen3 families:
RMSNorm, rotary positions, grouped-query attention, SwiGLU; by configuration query/key norms, biases, tied embeddings.
How a layer attends is handed in (`Attend`), so that packed training, prefill and decoding run the same layers.

Weights travel between the parts as `params`: a flat dict from canonical name ("layers.0.attention.query.kernel") to
array. `bind` makes a model of them. The dtype of the params is the dtype of the computation; norms, rotations, softmax
and logits are float32 inside.

Shapes: B rows, L tokens, D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import Array

from areal_jax.models import attention

Params = dict[str, Array]

# (query_BLNH, key_BLKH, value_BLKH, cache of this layer) -> (out_BLNH, cache of this layer)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model, as a Hugging Face `config.json` gives it."""

    vocab_size: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    d_ff: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    max_positions: int = 32768


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * normed.astype(x.dtype)


class Projection(nnx.Module):
    """A linear map from the axes `inputs` to the axes `outputs`; heads keep an axis of their own."""

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int], rngs: nnx.Rngs, *, bias: bool = False):
        scale = functools.reduce(lambda a, b: a * b, inputs) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (*inputs, *outputs)))
        self.bias = nnx.Param(jnp.zeros(tuple(outputs))) if bias else None
        self.contracted = len(inputs)

    def __call__(self, x: Array) -> Array:
        out = jnp.tensordot(x, self.kernel[...], axes=self.contracted)
        return out if self.bias is None else out + self.bias[...]


def rotate(x_BLNH: Array, positions_BL: Array, theta: float) -> Array:
    """Rotary position embedding over halves of the head (arXiv 2104.09864, in Hugging Face's layout)."""
    half = x_BLNH.shape[-1] // 2
    frequencies_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_BL1h = positions_BL.astype(jnp.float32)[:, :, None, None] * frequencies_h
    cos, sin = jnp.cos(angles_BL1h), jnp.sin(angles_BL1h)
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLNH.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; the caller's `attend` mixes the tokens."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        c = config
        self.query = Projection([c.d_model], [c.heads, c.head_size], rngs, bias=c.qkv_bias)
        self.key = Projection([c.d_model], [c.kv_heads, c.head_size], rngs, bias=c.qkv_bias)
        self.value = Projection([c.d_model], [c.kv_heads, c.head_size], rngs, bias=c.qkv_bias)
        self.out = Projection([c.heads, c.head_size], [c.d_model], rngs)
        self.query_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.key_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.rope_theta = c.rope_theta

    def __call__(self, x_BLD: Array, positions_BL: Array, attend: Attend, cache: Any) -> tuple[Array, Any]:
        query_BLNH, key_BLKH, value_BLKH = self.query(x_BLD), self.key(x_BLD), self.value(x_BLD)
        if self.query_norm is not None and self.key_norm is not None:
            query_BLNH, key_BLKH = self.query_norm(query_BLNH), self.key_norm(key_BLKH)
        query_BLNH = rotate(query_BLNH, positions_BL, self.rope_theta)
        key_BLKH = rotate(key_BLKH, positions_BL, self.rope_theta)
        mixed_BLNH, cache = attend(query_BLNH, key_BLKH, value_BLKH, cache)
        return self.out(mixed_BLNH), cache


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.gate = Projection([config.d_model], [config.d_ff], rngs)
        self.up = Projection([config.d_model], [config.d_ff], rngs)
        self.down = Projection([config.d_ff], [config.d_model], rngs)

    def __call__(self, x_BLD: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config, rngs)

    def __call__(self, x_BLD: Array, positions_BL: Array, attend: Attend, cache: Any) -> tuple[Array, Any]:
        mixed_BLD, cache = self.attention(self.attention_norm(x_BLD), positions_BL, attend, cache)
        x_BLD = x_BLD + mixed_BLD
        return x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD)), cache


class Transformer(nnx.Module):
    """Token ids to hidden states (`__call__`, `forward`) and hidden states to logits (`logits`)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        scale = config.d_model**-0.5
        self.embedding = nnx.Param(scale * jax.random.normal(rngs.params(), (config.vocab_size, config.d_model)))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tied_embeddings else Projection([config.d_model], [config.vocab_size], rngs)

    def __call__(self, tokens_BL: Array, positions_BL: Array, segment_ids_BL: Array) -> Array:
        """Hidden states [B, L, D] of packed rows: causal within each segment, nothing across."""

        def attend(query: Array, key: Array, value: Array, cache: None) -> tuple[Array, None]:
            return attention.packed_attention(query, key, value, segment_ids_BL), cache

        return self.forward(tokens_BL, positions_BL, attend, [None] * len(self.layers))[0]

    def forward(
        self, tokens_BL: Array, positions_BL: Array, attend: Attend, caches: Sequence[Any]
    ) -> tuple[Array, tuple[Any, ...]]:
        """Hidden states [B, L, D] under the caller's attention, and what it made of each layer's cache."""
        x_BLD = self.embedding[...][tokens_BL]
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BLD, cache = layer(x_BLD, positions_BL, attend, cache)
            new_caches.append(cache)
        return self.norm(x_BLD), tuple(new_caches)

    def logits(self, hidden: Array) -> Array:
        """Float32 logits [..., V] of hidden states [..., D]."""
        kernel_DV = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(hidden, kernel_DV, preferred_element_type=jnp.float32)


def graph(config: TransformerConfig) -> nnx.GraphDef:
    """The model without its arrays: hashable, the same for equal configs."""
    return nnx.split(_abstract(config), nnx.Param)[0]


def param_shapes(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Canonical name -> shape and dtype, without allocating anything."""
    return _flatten(nnx.to_pure_dict(nnx.split(_abstract(config), nnx.Param)[1]))


def init_params(config: TransformerConfig, key: Array) -> Params:
    """Random float32 params; jit it with `out_shardings` to have them born in their place."""
    return _flatten(nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(params=key)), nnx.Param)))


def bind(graphdef: nnx.GraphDef, params: Mapping[str, Array]) -> Transformer:
    """The model of `graphdef` with these params."""
    nested = traverse_util.unflatten_dict(
        {tuple(int(part) if part.isdigit() else part for part in name.split(".")): a for name, a in params.items()}
    )
    return nnx.merge(graphdef, nested)


def cast(params: Mapping[str, Array], dtype: Any) -> Params:
    """The same params in another dtype."""
    return {name: array.astype(dtype) for name, array in params.items()}


@functools.cache
def _abstract(config: TransformerConfig) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))


def _flatten(nested: Mapping[Any, Any]) -> dict[str, Any]:
    flat = traverse_util.flatten_dict(nested)
    return {
        ".".join(str(part) for part in path): value for path, value in sorted(flat.items(), key=lambda kv: str(kv[0]))
    }
