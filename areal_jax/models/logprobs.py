"""Log-probabilities and entropies of given tokens: from logits, and from the hidden states of packed rows.

In: logits, or a model and its hidden states; tokens. Out: two numbers per token. Called by the trainer's programs, and
where a batch-invariant engine draws tokens; waits for nobody.

Shapes: R rows, L tokens, D model, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from areal_jax.models import vocabulary_blocks
from areal_jax.models.transformer import Transformer


def from_logits(logits: Array, tokens: Array, *, temperature: float | Array) -> tuple[Array, Array]:
    """log p(token) and entropy, both [...], of the distribution softmax(logits / temperature), logits [..., V].

    A logit of finfo.min means no probability: it adds nothing to the entropy.
    """
    # A temperature below 1 takes finfo.min to -inf; a loss mask of 0 does not undo that.
    scaled = jnp.maximum(logits.astype(jnp.float32) / temperature, jnp.finfo(jnp.float32).min)
    log_z = jax.nn.logsumexp(scaled, axis=-1)
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    probabilities = jnp.exp(scaled - log_z[..., None])
    mean = jnp.sum(jnp.where(probabilities > 0, probabilities * scaled, 0.0), axis=-1)
    return chosen - log_z, log_z - mean


def from_logits_of(
    model: Transformer, logits: Array, tokens: Array, *, temperature: float | Array
) -> tuple[Array, Array]:
    """As `from_logits`, carried out as the model carries out what it does per token."""

    def score(_: tuple[()], logits: Array, tokens: Array, temperature: float | Array) -> tuple[Array, Array]:
        return from_logits(logits, tokens, temperature=temperature)

    return model.kernels.per_token(score, (), logits, tokens, temperature, axes=tokens.ndim)


def token_logprobs(
    model: Transformer,
    hidden_RLD: Array,
    tokens_RL: Array,
    *,
    temperature: float | Array,
    block: int,
    mesh: Mesh | AbstractMesh | None = None,
) -> tuple[Array, Array]:
    """log p(tokens[r, l] | tokens before it) and the entropy of that choice, both [R, L] float32.

    Aligned to the token: entry l comes from the hidden state at l - 1; entry 0 of a row is 0. The first token of a
    later segment gets a number too, which belongs in no loss. `block` bounds the ids whose logits exist at a time;
    `mesh` is what splits rows and vocabulary.
    """

    def from_whole_logits(
        head_weights: Array, hidden: Array, targets: Array, temperature: float | Array
    ) -> tuple[Array, Array]:
        """The engine's formula, for the kernels that take few tokens at a time."""
        logits = jax.lax.optimization_barrier(model.logits_by(head_weights, hidden))
        return from_logits(logits, targets, temperature=temperature)

    head = vocabulary_blocks.Head(model.head_axes, model.config.vocab_rows, model.config.live_rows, block, mesh)
    found = model.kernels.per_token(
        from_whole_logits,
        model.head_weights,
        hidden_RLD,
        jnp.roll(tokens_RL, -1, axis=1),
        temperature,
        axes=2,
        plain=functools.partial(vocabulary_blocks.score, head),
    )
    logprobs_RL, entropy_RL = (jnp.pad(numbers_RL[:, :-1], ((0, 0), (1, 0))) for numbers_RL in found)
    return logprobs_RL, entropy_RL
