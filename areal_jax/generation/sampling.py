"""Drawing one token per slot, with a key that depends on the request and the position and on nothing else.

In: logits, keys, temperatures. Out: tokens and their log-probabilities under the very distribution they were drawn
from, which is what the trainer needs as behaviour log-probabilities.

Shapes: S slots, V vocabulary, N blocks of the vocabulary, W tokens of a block.
"""

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = (
    256  # tokens per block of the two-level search; one cumulative sum over the whole vocabulary is 8x slower on a CPU
)


def request_keys(seeds_S: Array, uids_S: Array, samples_S: Array) -> Array:
    """Key data [S, 2] of each request: the seed with prompt uid and sample index folded in (uint32 each)."""

    def one(seed: Array, uid: Array, sample: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), uid), sample))

    return jax.vmap(one)(seeds_S, uids_S, samples_S)


def sample(logits_SV: Array, keys_S2: Array, positions_S: Array, temperatures_S: Array) -> tuple[Array, Array]:
    """Tokens [S] drawn from softmax(logits / temperature), and their log-probabilities [S] under it.

    Temperature 0 takes the most likely token and gives its log-probability at temperature 1. `positions_S` is the
    place of the drawn token in its sequence.
    """
    greedy_S = temperatures_S == 0.0
    logprobs_SV = jax.nn.log_softmax(logits_SV / jnp.where(greedy_S, 1.0, temperatures_S)[:, None])
    uniforms_S = jax.vmap(lambda data, at: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), at)))(
        keys_S2, positions_S
    )
    drawn_S = inverse_cdf(jnp.exp(logprobs_SV), uniforms_S)
    tokens_S = jnp.where(greedy_S, jnp.argmax(logits_SV, axis=-1), drawn_S)
    return tokens_S, jnp.take_along_axis(logprobs_SV, tokens_S[:, None], axis=-1)[:, 0]


def inverse_cdf(probabilities_SV: Array, uniforms_S: Array) -> Array:
    """The token at which the cumulative probability passes `uniform`: first its block, then its place there."""
    S, V = probabilities_SV.shape
    blocks_SNW = jnp.pad(probabilities_SV, ((0, 0), (0, -V % BLOCK))).reshape(S, -1, BLOCK)
    masses_SN = blocks_SNW.sum(-1)
    cumulative_SN = jnp.cumsum(masses_SN, axis=-1)
    goal_S = uniforms_S * cumulative_SN[:, -1]  # the total is 1 up to rounding
    block_S = _passes(masses_SN, cumulative_SN, goal_S)
    before_S = jnp.take_along_axis(jnp.pad(cumulative_SN, ((0, 0), (1, 0))), block_S[:, None], axis=-1)[:, 0]
    chosen_SW = jnp.take_along_axis(blocks_SNW, block_S[:, None, None], axis=1)[:, 0]
    return block_S * BLOCK + _passes(chosen_SW, jnp.cumsum(chosen_SW, axis=-1), goal_S - before_S)


def _passes(masses: Array, cumulative: Array, goal_S: Array) -> Array:
    """Index of the first cumulative sum above the goal; where rounding leaves none, of the last mass that is not 0."""
    last_S = masses.shape[-1] - 1 - jnp.argmax(masses[:, ::-1] > 0, axis=-1)
    return jnp.minimum(jnp.sum(cumulative <= goal_S[:, None], axis=-1), last_S)
