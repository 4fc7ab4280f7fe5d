"""The decoder-only transformer that trainer and generation servers share.

In: token ids. Out: hidden states, and logits for those who ask. One class covers the Llama, Qwen2, Qwen3 and Mistral
families: RMSNorm, rotary positions, grouped-query attention, SwiGLU; by configuration query/key norms, biases, tied
embeddings, rope scaling. How a layer attends is handed in (`Attend`), so that packed training, prefill and decoding run
the same layers. Called by the trainer's programs and the generation engine; waits for nobody.

Weights travel between the parts as `params`: a flat dict from canonical name ("layers.0.attention.query.kernel") to
array. `bind` makes a model of them. The dtype of the params is the dtype of the computation; norms, rotations, softmax
and logits are float32 inside.

The vocabulary may have more rows in memory than the model has (`padded_vocab`), so that a mesh axis divides them, and
more than its tokenizer defines. Ids that are not live have the smallest float32 as their logit: no probability, no
gradient.

Shapes: B rows, L tokens, D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary,
h half a head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax import Array

from areal_jax.models import attention
from areal_jax.models.attention import PLAIN, Kernels
from areal_jax.models.products import ROUNDED, add_bias, product, product_in_float32, sum_of_products, sum_over_tokens

Params = dict[str, Array]
AnyArray = TypeVar("AnyArray", np.ndarray, Array)

VOCAB_AXIS = {"embedding": 0, "head.kernel": 1}  # the parameters with a row (or column) per token id

# (query_BLNH, key_BLKH, value_BLKH, cache of this layer) -> (out_BLNH, cache of this layer)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

# What the backward pass finds of a layer, and what it computes once more (`jax.checkpoint`): nothing, all from the
# layer's input (arXiv 1604.06174), or all but the products with weights, as rounded: no float32 sums are kept.
REMAT: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda layer: layer,
    "layers": jax.checkpoint,
    "dots": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(ROUNDED),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model, as a Hugging Face `config.json` gives it, and how its vocabulary lies in memory."""

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
    family: str = ""  # model_type of the config.json; "" = whichever has these flags
    rope_type: str = "default"  # default | linear | llama3
    rope_factor: float = 1.0  # by which the slow rotations are slowed further
    rope_low_freq_factor: float = 1.0  # llama3 only, as the next two
    rope_high_freq_factor: float = 4.0
    rope_original_positions: int = 0
    padded_vocab: int = 0  # rows in memory; 0 = vocab_size
    live_vocab: int = 0  # ids from here on get no probability; 0 = vocab_size
    kernels: str = "auto"  # auto | plain | batch_invariant: see attention_kernels.kernels_for

    def __post_init__(self) -> None:
        if self.padded_vocab and self.padded_vocab < self.vocab_size:
            raise ValueError(f"padded_vocab={self.padded_vocab} must not be below vocab_size={self.vocab_size}")
        if not 0 <= self.live_vocab <= self.vocab_size:
            raise ValueError(
                f"live_vocab={self.live_vocab} must be between 0 (= all) and vocab_size={self.vocab_size}: the model "
                "has no weights for token ids beyond it"
            )
        if self.rope_type not in ("default", "linear", "llama3"):
            raise ValueError(f"rope_type={self.rope_type!r} is not supported; supported are default, linear, llama3")

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the LM head, in memory."""
        return self.padded_vocab or self.vocab_size

    @property
    def live_rows(self) -> int:
        """Ids below this one can be sampled."""
        return self.live_vocab or self.vocab_size


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return _rms_norm(self.eps, x, self.scale[...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps: float, x: Array, scale: Array) -> Array:
    return _rms_norm_forward(eps, x, scale)[0]


def _rms_norm_forward(eps: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return scale * (x32 * inverse).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(eps: float, saved: tuple[Array, Array, Array], out: Array) -> tuple[Array, Array]:
    """With n = x / rms(x): dx = (g - n mean(g n)) / rms(x), where g = scale * dy, and dscale = sum dy n."""
    x, scale, inverse = saved
    normed = x.astype(jnp.float32) * inverse
    inward = (scale * out).astype(jnp.float32)
    mean = sum_of_products(inward, normed)[..., None] / x.shape[-1]
    # Of a norm per head [B, L, N, H] the heads come last: they may lie on several devices, which tokens do not.
    of_heads = sum_over_tokens(out.astype(jnp.float32) * normed, min(2, out.ndim - 1))
    dscale = jnp.sum(of_heads, axis=tuple(range(of_heads.ndim - 1)))
    return (inverse * (inward - normed * mean)).astype(x.dtype), dscale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class Projection(nnx.Module):
    """A linear map from the axes `inputs` to the axes `outputs`; heads keep an axis of their own."""

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int], rngs: nnx.Rngs, *, bias: bool = False):
        scale = functools.reduce(lambda a, b: a * b, inputs) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (*inputs, *outputs)))
        self.bias = nnx.Param(jnp.zeros(tuple(outputs))) if bias else None
        self.contracted = len(inputs)

    def __call__(self, x: Array) -> Array:
        out = product(x, self.kernel[...], self.contracted)
        return out if self.bias is None else add_bias(out, self.bias[...])


def rope_frequencies(config: TransformerConfig) -> np.ndarray:
    """Radians per position of each pair of a head, [h] float32: theta^(-i/h), scaled by `rope_type`.

    `linear` divides all by `rope_factor`. `llama3` (Llama 3.1, in transformers `_compute_llama3_parameters`) divides
    those that turn fewer than `low` times over the original positions, keeps those that turn more than `high` times,
    and goes from one to the other linearly in the number of turns.
    """
    half = config.head_size // 2
    frequencies_h = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.rope_type != "default":
        slowed_h = frequencies_h / config.rope_factor
        kept_h = _share_kept(config, frequencies_h) if config.rope_type == "llama3" else 0.0
        frequencies_h = kept_h * frequencies_h + (1 - kept_h) * slowed_h
    return frequencies_h.astype(np.float32)


def _share_kept(config: TransformerConfig, frequencies_h: np.ndarray) -> np.ndarray:
    turns_h = config.rope_original_positions * frequencies_h / (2 * np.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    return np.clip((turns_h - low) / (high - low), 0.0, 1.0)


def rotations(frequencies_h: np.ndarray, positions_BL: Array) -> tuple[Array, Array]:
    """Cosines and sines [B, L, 1, h] of the angles by which the pairs of a head turn at these positions."""
    angles_BL1h = positions_BL.astype(jnp.float32)[:, :, None, None] * frequencies_h
    if jax.default_backend() != "cpu":
        return jnp.cos(angles_BL1h), jnp.sin(angles_BL1h)
    # XLA's CPU backend would compute them again for every head of every layer, which takes many times as long as to
    # turn it, wherever it can put them into the program that does so. What comes out of a loop it leaves as it is.
    both = jax.lax.map(lambda i: jax.lax.cond(i == 0, jnp.cos, jnp.sin, angles_BL1h), jnp.arange(2))
    return both[0], both[1]


def rotate(x_BLNH: Array, cos_BL1h: Array, sin_BL1h: Array) -> Array:
    """Rotary position embedding over halves of the head (arXiv 2104.09864, in Hugging Face's layout)."""
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos_BL1h - second * sin_BL1h, second * cos_BL1h + first * sin_BL1h]
    return jnp.concatenate(turned, axis=-1).astype(x_BLNH.dtype)


class Attention(nnx.Module):
    """What grouped-query attention with rotary positions needs of each token; the caller's `attend` mixes them."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        c = config
        self.query = Projection([c.d_model], [c.heads, c.head_size], rngs, bias=c.qkv_bias)
        self.key = Projection([c.d_model], [c.kv_heads, c.head_size], rngs, bias=c.qkv_bias)
        self.value = Projection([c.d_model], [c.kv_heads, c.head_size], rngs, bias=c.qkv_bias)
        self.out = Projection([c.heads, c.head_size], [c.d_model], rngs)
        self.query_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.key_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None

    def heads(self, x_BLD: Array, cos_BL1h: Array, sin_BL1h: Array) -> tuple[Array, Array, Array]:
        """Queries [B, L, N, H], keys and values [B, L, K, H]."""
        query_BLNH, key_BLKH, value_BLKH = self.query(x_BLD), self.key(x_BLD), self.value(x_BLD)
        if self.query_norm is not None and self.key_norm is not None:
            query_BLNH, key_BLKH = self.query_norm(query_BLNH), self.key_norm(key_BLKH)
        return rotate(query_BLNH, cos_BL1h, sin_BL1h), rotate(key_BLKH, cos_BL1h, sin_BL1h), value_BLKH


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.gate = Projection([config.d_model], [config.d_ff], rngs)
        self.up = Projection([config.d_model], [config.d_ff], rngs)
        self.down = Projection([config.d_ff], [config.d_model], rngs)

    def __call__(self, x_BLD: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual: what a token needs before and after it is mixed."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config, rngs)

    def before(self, x_BLD: Array, cos_BL1h: Array, sin_BL1h: Array) -> tuple[Array, Array, Array]:
        """Queries [B, L, N, H], keys and values [B, L, K, H]."""
        return self.attention.heads(self.attention_norm(x_BLD), cos_BL1h, sin_BL1h)

    def after(self, x_BLD: Array, mixed_BLNH: Array) -> Array:
        x_BLD = x_BLD + self.attention.out(mixed_BLNH)
        return x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))


@jax.custom_vjp
def look_up(table_VD: Array, tokens: Array) -> Array:
    """table_VD[tokens], whose gradient adds up in float32 what all places of an id contribute.

    In bfloat16 a sum stops growing at 256 times what is added, and a text has the same tokens again and again.
    """
    return table_VD[tokens]


def _look_up_forward(table_VD: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return table_VD[tokens], (table_VD, tokens)


def _look_up_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table_VD, tokens = residuals
    summed_VD = jnp.zeros(table_VD.shape, jnp.float32).at[tokens].add(gradient.astype(jnp.float32))
    return summed_VD.astype(table_VD.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


class Transformer(nnx.Module):
    """Token ids to hidden states (`__call__`, `forward`) and hidden states to logits (`logits`)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, kernels: Kernels = PLAIN):
        scale = config.d_model**-0.5
        self.embedding = nnx.Param(scale * jax.random.normal(rngs.params(), (config.vocab_rows, config.d_model)))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tied_embeddings else Projection([config.d_model], [config.vocab_rows], rngs)
        self.config = config  # a numpy array of frequencies here would make the graph unhashable
        self.kernels = kernels

    def __call__(self, tokens_BL: Array, positions_BL: Array, segment_ids_BL: Array, *, remat: str = "none") -> Array:
        """Hidden states [B, L, D] of packed rows: causal within each segment, nothing across."""

        def attend(query: Array, key: Array, value: Array, cache: None) -> tuple[Array, None]:
            return attention.packed_attention(query, key, value, segment_ids_BL, self.kernels), cache

        return self.forward(tokens_BL, positions_BL, attend, [None] * len(self.layers), remat=remat)[0]

    def forward(
        self, tokens_BL: Array, positions_BL: Array, attend: Attend, caches: Sequence[Any], *, remat: str = "none"
    ) -> tuple[Array, tuple[Any, ...]]:
        """Hidden states [B, L, D] under the caller's attention, and what it made of each layer's cache.

        `remat` is a key of `REMAT`; without a backward pass it changes nothing.
        """
        per_token = functools.partial(self.kernels.per_token, axes=2)
        cos_BL1h, sin_BL1h = per_token(rotations, rope_frequencies(self.config), positions_BL)

        @REMAT[remat]
        def through(layer: Layer, x_BLD: Array, cache: Any) -> tuple[Array, Any]:
            query_BLNH, key_BLKH, value_BLKH = per_token(Layer.before, layer, x_BLD, cos_BL1h, sin_BL1h)
            mixed_BLNH, cache = attend(query_BLNH, key_BLKH, value_BLKH, cache)
            return per_token(Layer.after, layer, x_BLD, mixed_BLNH), cache

        x_BLD = look_up(self.embedding[...], tokens_BL)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BLD, cache = through(layer, x_BLD, cache)
            new_caches.append(cache)
        return per_token(RMSNorm.__call__, self.norm, x_BLD), tuple(new_caches)

    @property
    def head_weights(self) -> Array:
        """What makes logits of hidden states, as it lies in memory: its axes are `head_axes`."""
        return self.embedding[...] if self.head is None else self.head.kernel[...]

    @property
    def head_axes(self) -> str:
        return "vd" if self.head is None else "dv"

    def logits(self, hidden: Array) -> Array:
        """Float32 logits [..., V] of hidden states [..., D]; V = rows in memory, ids not live: finfo.min."""
        return self.kernels.per_token(self.logits_by, self.head_weights, hidden, axes=hidden.ndim - 1)

    def logits_by(self, head_weights: Array, hidden: Array) -> Array:
        """As `logits`, by weights that are given, all tokens at once."""
        kernel_DV = head_weights.T if self.head is None else head_weights
        logits = product_in_float32(hidden, kernel_DV, 1)
        if self.config.live_rows == self.config.vocab_rows:
            return logits
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(ids < self.config.live_rows, logits, jnp.finfo(jnp.float32).min)


def graph(config: TransformerConfig, kernels: Kernels = PLAIN) -> nnx.GraphDef:
    """The model without its arrays: hashable, the same for equal configs and kernels."""
    return nnx.split(_abstract(config, kernels), nnx.Param)[0]


def param_shapes(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Canonical name -> shape and dtype, without allocating anything."""
    return dict(_param_shapes(config))


def param_count(config: TransformerConfig) -> int:
    """Numbers in the model, without the rows that padding adds."""
    whole = dataclasses.replace(config, padded_vocab=0)
    return sum(math.prod(shape.shape) for shape in param_shapes(whole).values())


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


def strip_rows(name: str, array: AnyArray, config: TransformerConfig) -> AnyArray:
    """The parameter as the model has it, without the rows that padding added; on the host or inside a program."""
    axis = VOCAB_AXIS.get(name)
    if axis is None or array.shape[axis] == config.vocab_size:
        return array
    return array[: config.vocab_size] if axis == 0 else array[:, : config.vocab_size]


@functools.cache  # a generation server asks for every version that it takes
def _param_shapes(config: TransformerConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    return _flatten(nnx.to_pure_dict(nnx.split(_abstract(config), nnx.Param)[1]))


@functools.cache
def _abstract(config: TransformerConfig, kernels: Kernels = PLAIN) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0), kernels))


def _flatten(nested: Mapping[Any, Any]) -> dict[str, Any]:
    flat = traverse_util.flatten_dict(nested)
    return {
        ".".join(str(part) for part in path): value for path, value in sorted(flat.items(), key=lambda kv: str(kv[0]))
    }
