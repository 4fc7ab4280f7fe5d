"""Log-probabilities and entropies of given tokens, without ever holding the logits of all of them.

The logits exist for one chunk of tokens at a time, forward and backward (each chunk is rematerialised), so no float32
array of tokens x vocabulary is ever allocated (19.9 GB for 32,768 x 151,936).

Shapes: R rows, L tokens, D model, V vocabulary, C chunks of W tokens of each row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from areal_jax.models import sharding
from areal_jax.models.transformer import Transformer

SUMS = "sums over the vocabulary"  # what `jax.checkpoint` calls those that the backward pass needs, a number per token


def from_logits(logits: Array, tokens: Array, *, temperature: float | Array) -> tuple[Array, Array]:
    """log p(token) and entropy, both [...], of the distribution softmax(logits / temperature), logits [..., V].

    A logit of finfo.min means no probability: it adds nothing to the entropy and gets no gradient.
    """
    # A temperature below 1 takes finfo.min to -inf; a loss mask of 0 does not undo that.
    scaled = jnp.maximum(logits.astype(jnp.float32) / temperature, jnp.finfo(jnp.float32).min)
    return _of_scaled(scaled, tokens)


@jax.custom_vjp
def _of_scaled(scaled: Array, tokens: Array) -> tuple[Array, Array]:
    """`from_logits` at temperature 1. Its gradient needs two sums per token, which `jax.checkpoint` keeps."""
    return _of_scaled_forward(scaled, tokens)[0]


def _of_scaled_forward(scaled: Array, tokens: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    log_z = checkpoint_name(jax.nn.logsumexp(scaled, axis=-1), SUMS)
    # A masked sum rather than a gather: it stays local when the vocabulary is sharded.
    chosen = jnp.sum(jnp.where(_is_token(scaled, tokens), scaled, 0.0), axis=-1)
    probabilities = jnp.exp(scaled - log_z[..., None])
    # XLA's CPU backend takes a bare sum of products for a product of two vectors, ten times as slow.
    mean = jnp.sum(jnp.where(probabilities > 0, probabilities * scaled, 0.0), axis=-1)
    mean = checkpoint_name(mean, SUMS)
    return (chosen - log_z, log_z - mean), (scaled, tokens, log_z, mean)


def _of_scaled_backward(saved: tuple[Array, ...], gradients: tuple[Array, Array]) -> tuple[Array, None]:
    """With p the probabilities and s the scaled logits: 1 - p at the token, else -p; and p (mean s - s)."""
    scaled, tokens, log_z, mean = saved
    of_logprob, of_entropy = (gradient[..., None] for gradient in gradients)
    probabilities = jnp.exp(scaled - log_z[..., None])
    away = jnp.where(probabilities > 0, mean[..., None] - scaled, 0.0)
    return of_logprob * (_is_token(scaled, tokens) - probabilities) + of_entropy * probabilities * away, None


def _is_token(logits: Array, tokens: Array) -> Array:
    """Where along the vocabulary each token is, [..., V] bool."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == tokens[..., None]


_of_scaled.defvjp(_of_scaled_forward, _of_scaled_backward)


def from_logits_of(
    model: Transformer, logits: Array, tokens: Array, *, temperature: float | Array
) -> tuple[Array, Array]:
    """As `from_logits`, carried out as the model carries out what it does per token."""

    def score(_: tuple[()], logits: Array, tokens: Array, temperature: float | Array) -> tuple[Array, Array]:
        return from_logits(logits, tokens, temperature=temperature)

    return model.kernels.per_token(score, (), logits, tokens, temperature, axes=tokens.ndim)


def token_logprobs(
    model: Transformer, hidden_RLD: Array, tokens_RL: Array, *, temperature: float | Array, chunk: int
) -> tuple[Array, Array]:
    """log p(tokens[r, l] | tokens before it) and the entropy of that choice, both [R, L] float32.

    Aligned to the token: entry l comes from the hidden state at l - 1; entry 0 of a row is 0. The first token of a
    later segment gets a number too, which belongs in no loss. `chunk` bounds the tokens whose logits exist at a time.
    """
    return _in_chunks(model, model.head_weights, hidden_RLD, tokens_RL, temperature, chunk=chunk)


def sharded_token_logprobs(
    mesh: Mesh | AbstractMesh,
    model: Transformer,
    hidden_RLD: Array,
    tokens_RL: Array,
    *,
    temperature: float | Array,
    chunk: int,
) -> tuple[Array, Array]:
    """As `token_logprobs`, where the mesh splits rows: each shard of them goes through chunks of its own.

    So the head's weights are gathered once, before the chunks, and their gradient is summed over the shards once, after
    them. Left to the partitioner, both happen in every chunk.
    """
    if sharding.row_shards(mesh) == 1:
        return token_logprobs(model, hidden_RLD, tokens_RL, temperature=temperature, chunk=chunk)
    by_shard = jax.shard_map(
        functools.partial(_in_chunks, model, chunk=chunk),
        mesh=mesh,
        in_specs=(sharding.REPLICATED, sharding.ROWS, sharding.ROWS, sharding.REPLICATED),
        out_specs=(sharding.ROWS, sharding.ROWS),
        axis_names=set(sharding.ROW_AXES),
        check_vma=False,  # else the gradient of what does not vary is summed where it is used: in the chunks
    )
    return by_shard(model.head_weights, hidden_RLD, tokens_RL, jnp.asarray(temperature))


def _in_chunks(
    model: Transformer,
    head_weights: Array,
    hidden_RLD: Array,
    tokens_RL: Array,
    temperature: float | Array,
    *,
    chunk: int,
) -> tuple[Array, Array]:
    """`token_logprobs` under `head_weights`, which lie as the model's do."""
    R, L, D = hidden_RLD.shape
    C = -(-L // max(1, chunk // R))
    width = -(-L // C)
    filled = (0, C * width - L)
    hidden_RLD = jnp.pad(hidden_RLD, ((0, 0), filled, (0, 0)))
    next_RL = jnp.pad(jnp.roll(tokens_RL, -1, axis=1), ((0, 0), filled))
    dtype, head_weights = head_weights.dtype, head_weights.astype(jnp.float32)  # as which the chunks' gradients add up

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SUMS))
    def one_chunk(hidden_RWD: Array, targets_RW: Array) -> tuple[Array, Array]:
        logits_RWV = model.logits_by(head_weights.astype(dtype), hidden_RWD)
        return from_logits_of(model, logits_RWV, targets_RW, temperature=temperature)

    # Chunks run along the row, so that the rows stay where they are sharded.
    chunks = hidden_RLD.reshape(R, C, width, D).swapaxes(0, 1), next_RL.reshape(R, C, width).swapaxes(0, 1)
    if C == 1:
        results = jax.tree.map(lambda x: x[None], one_chunk(chunks[0][0], chunks[1][0]))
    else:
        results = jax.lax.map(lambda pair: one_chunk(*pair), chunks)

    def align(values_CRW: Array) -> Array:
        values_RL = values_CRW.swapaxes(0, 1).reshape(R, C * width)
        return jnp.pad(values_RL[:, : L - 1], ((0, 0), (1, 0)))

    return align(results[0]), align(results[1])
