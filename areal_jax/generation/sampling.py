"""Drawing one token per slot, with a key that depends on the request and the position and on nothing else.

In: logits, keys, temperatures, which tokens may be drawn. Out: tokens and their log-probabilities under the very
distribution they were drawn from, which is what the trainer needs as behaviour log-probabilities.

Which tokens may be drawn is one number per slot: the least logit that may. Top-k, top-p and min-p all keep the most
likely tokens, so each is such a number; it is found without sorting, and not looked for where no slot asks for it.

Shapes: S slots, V vocabulary, N blocks of the vocabulary, W tokens of a block, E stop tokens of a slot.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

BLOCK = 256  # tokens per block of the search in two levels; a cumulative sum over the whole vocabulary takes far longer


@struct.dataclass
class Truncation:
    """Limits per slot, applied in this order, as Hugging Face's `generate` does; see `least_logits`."""

    top_k: Any  # [S] int32, 0 = all
    top_p: Any  # [S] float32, 1 = all
    min_p: Any  # [S] float32, 0 = all


def no_truncation(slots: int, module: Any = np) -> Truncation:
    """In arrays of numpy, or of `module`, which is jax.numpy where nothing may be allocated yet."""
    return Truncation(module.zeros(slots, np.int32), module.ones(slots, np.float32), module.zeros(slots, np.float32))


def request_keys(seeds_S: Array, uids_S: Array, samples_S: Array) -> Array:
    """Key data [S, 2] of each request: the seed with prompt uid and sample index folded in (uint32 each)."""

    def one(seed: Array, uid: Array, sample: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), uid), sample))

    return jax.vmap(one)(seeds_S, uids_S, samples_S)


def sample(
    logits_SV: Array, least_S: Array, keys_S2: Array, positions_S: Array, temperatures_S: Array
) -> tuple[Array, Array]:
    """Tokens [S] drawn from softmax(logits / temperature), and their log-probabilities [S] under it.

    Only tokens whose logit is at least `least_S` have a part in it (-inf: all). Temperature 0 takes the most likely
    token and gives its log-probability at temperature 1. `positions_S` is the place of the drawn token in its sequence.
    """
    uniforms_S = jax.vmap(lambda data, at: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), at)))(
        keys_S2, positions_S
    )
    return sample_at(logits_SV, least_S, uniforms_S, temperatures_S)


def sample_at(logits_SV: Array, least_S: Array, uniforms_S: Array, temperatures_S: Array) -> tuple[Array, Array]:
    """As `sample`, for given numbers between 0 and 1: the token at which the cumulative probability passes its number.

    First its block, then its place there. The vocabulary is gone over twice, for the highest logit and for the mass of
    each block, and nothing of its size is written.
    """
    S, V = logits_SV.shape
    greedy_S = temperatures_S == 0.0
    filled_SV = jnp.pad(logits_SV, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    blocks_SNW = filled_SV.reshape(S, -1, BLOCK)
    most_SN = blocks_SNW.max(-1)
    most_S = most_SN.max(-1)

    def scaled(logits: Array) -> Array:
        """Log-probabilities up to a constant of each slot: 0 for its most likely token."""
        per_slot = (S, *[1] * (logits.ndim - 1))
        return (logits - most_S.reshape(per_slot)) / jnp.where(greedy_S, 1.0, temperatures_S).reshape(per_slot)

    def masses(logits: Array) -> Array:
        barred = logits < least_S.reshape(S, *[1] * (logits.ndim - 1))
        return jnp.where(barred, 0.0, jnp.exp(scaled(logits)))

    masses_SN = masses(blocks_SNW).sum(-1)
    total_S = masses_SN.sum(-1)
    block_S, rest_S = _passing(masses_SN, uniforms_S * total_S)
    block_S = jnp.where(greedy_S, jnp.argmax(most_SN, axis=-1), block_S)
    chosen_SW = jnp.take_along_axis(blocks_SNW, block_S[:, None, None], axis=1)[:, 0]
    place_S = jnp.where(greedy_S, jnp.argmax(chosen_SW, axis=-1), _passing(masses(chosen_SW), rest_S)[0])
    chosen_S = jnp.take_along_axis(chosen_SW, place_S[:, None], axis=-1)[:, 0]
    return block_S * BLOCK + place_S, scaled(chosen_S) - jnp.log(total_S)


def most_likely(logits_SV: Array, least_S: Array, temperatures_S: Array, count: int) -> tuple[Array, Array]:
    """The `count` most likely tokens [S, count] of the distribution that `sample` draws from, and their log-probs.

    -inf is the log-probability of those that it never draws.
    """
    scaled_SV = logits_SV / jnp.where(temperatures_S == 0.0, 1.0, temperatures_S)[:, None]
    kept_SV = jnp.where(logits_SV < least_S[:, None], -jnp.inf, scaled_SV)
    logprobs, tokens = jax.lax.top_k(kept_SV, count)
    return tokens, logprobs - jax.nn.logsumexp(kept_SV, axis=-1, keepdims=True)


def without_tokens(logits_SV: Array, tokens_SE: Array, slots_S: Array) -> Array:
    """The logits with -inf at these tokens (-1 = none) of the slots where `slots_S`."""
    V = logits_SV.shape[1]
    at_SE = jnp.where(slots_S[:, None] & (tokens_SE >= 0), tokens_SE, V)
    return jax.lax.cond(
        jnp.any(slots_S),
        lambda logits_SV: logits_SV.at[jnp.arange(len(logits_SV))[:, None], at_SE].set(-jnp.inf, mode="drop"),
        lambda logits_SV: logits_SV,
        logits_SV,
    )


def least_logits(logits_SV: Array, temperatures_S: Array, truncation: Truncation, live_S: Array) -> Array:
    """The least logit [S] that each slot may draw, -inf where it may draw all.

    Of softmax(logits / temperature): top-k keeps the k most likely tokens; top-p, of what is left, the fewest most
    likely ones whose share of the mass reaches p; min-p those at least min_p times as likely as the most likely one.
    Tokens as likely as the last one kept are kept too. Temperature 0 and slots that are not live keep all.
    """
    live_S = live_S & (temperatures_S > 0)
    all_S = jnp.full(logits_SV.shape[:1], -jnp.inf, logits_SV.dtype)
    masses: Callable[[Array], Array] = lambda logits_SV: jnp.exp(  # noqa: E731  (1 for the most likely token)
        (logits_SV - logits_SV.max(-1, keepdims=True)) / jnp.where(live_S, temperatures_S, 1.0)[:, None]
    )

    def where_any(wanted_S: Array, least: Callable[[Array], Array]) -> Array:
        found_S = jax.lax.cond(jnp.any(wanted_S), least, lambda logits_SV: all_S, logits_SV)
        return jnp.where(wanted_S, found_S, -jnp.inf)

    least_k_S = where_any(live_S & (truncation.top_k > 0), lambda logits_SV: _top_k(logits_SV, truncation.top_k))
    least_p_S = where_any(
        live_S & (truncation.top_p < 1),
        lambda logits_SV: _top_p(
            logits_SV, jnp.where(logits_SV < least_k_S[:, None], 0.0, masses(logits_SV)), truncation.top_p
        ),
    )
    least_m_S = where_any(
        live_S & (truncation.min_p > 0),
        lambda logits_SV: jnp.where(masses(logits_SV) < truncation.min_p[:, None], jnp.inf, logits_SV).min(-1),
    )
    return jnp.maximum(jnp.maximum(least_k_S, least_p_S), least_m_S)


def _top_k(logits_SV: Array, k_S: Array) -> Array:
    return _largest(logits_SV, lambda least_S: jnp.sum(logits_SV >= least_S[:, None], axis=-1) >= k_S)


def _top_p(logits_SV: Array, masses_SV: Array, p_S: Array) -> Array:
    def mass(least_S: Array) -> Array:
        return jnp.sum(jnp.where(logits_SV < least_S[:, None], 0.0, masses_SV), axis=-1)

    goal_S = p_S * masses_SV.sum(-1)
    return _largest(logits_SV, lambda least_S: mass(least_S) >= goal_S)


def _largest(logits_SV: Array, holds: Callable[[Array], Array]) -> Array:
    """The largest number [S] that holds, of those from -inf (which is taken to hold) to the largest logit.

    `holds` must be true up to some number and false beyond. Floats are ordered as their bits are, so that halving the
    interval of bit patterns 32 times ends at one: exact, and each time one pass over [S, V] instead of a sort.
    """

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low_S, high_S = ends
        middle_S = (low_S | high_S) - ((low_S ^ high_S) >> 1)  # their mean rounded up, without overflow
        holds_S = holds(_from_ordered(middle_S))
        return jnp.where(holds_S, middle_S, low_S), jnp.where(holds_S, high_S, middle_S - 1)

    most_S = logits_SV.max(-1)
    ends = (_to_ordered(jnp.full_like(most_S, -jnp.inf)), _to_ordered(most_S))
    return _from_ordered(jax.lax.fori_loop(0, 32, halve, ends)[0])


def _to_ordered(numbers: Array) -> Array:
    """Integers in the order of float32 numbers: the bits, and for negative numbers the others turned round."""
    bits = jax.lax.bitcast_convert_type(numbers.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(integers: Array) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(integers < 0, integers ^ 0x7FFFFFFF, integers), jnp.float32)


def _passing(masses: Array, goal_S: Array) -> tuple[Array, Array]:
    """Index of the mass with which the cumulative sum passes the goal, and how much of the goal is left before it.

    Where rounding leaves none, the last mass that is not 0.
    """
    cumulative = jnp.cumsum(masses, axis=-1)
    last_S = masses.shape[-1] - 1 - jnp.argmax(masses[:, ::-1] > 0, axis=-1)
    index_S = jnp.minimum(jnp.sum(cumulative <= goal_S[:, None], axis=-1), last_S)
    before_S = jnp.take_along_axis(jnp.pad(cumulative, ((0, 0), (1, 0))), index_S[:, None], axis=-1)[:, 0]
    return index_S, goal_S - before_S
