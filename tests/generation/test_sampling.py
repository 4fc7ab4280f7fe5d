"""Draws and truncations, on numbers worked out by hand, against slow twins and against Hugging Face's processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.generation.sampling import (
    BLOCK,
    Truncation,
    least_logits,
    no_truncation,
    request_keys,
    sample,
    sample_at,
    without_tokens,
)
from tests.generation.by_hand import slow_kept


def draw(logits, temperature, n, **limits):
    """n tokens from one row of logits, and their log-probabilities; `limits` are those of `Truncation`."""
    rows = jnp.tile(jnp.asarray(logits), (n, 1))
    keys = request_keys(jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.uint32))
    temperatures = jnp.full(n, temperature)
    return _drawn(rows, keys, temperatures, truncation(n, **limits))


@jax.jit
def _drawn(rows, keys, temperatures, limits):
    n = len(rows)
    least = least_logits(rows, temperatures, limits, jnp.full(n, True))
    return sample(rows, least, keys, jnp.zeros(n, jnp.int32), temperatures)


def truncation(n, *, top_k=0, top_p=1.0, min_p=0.0) -> Truncation:
    return Truncation(np.full(n, top_k, np.int32), np.full(n, top_p, np.float32), np.full(n, min_p, np.float32))


def test_temperature_divides_the_logits():
    tokens, logprobs = draw([1.0, 0.0, -1.0, -2.0], 0.5, 64)
    # logits / 0.5 = [2, 0, -2, -4]; 2 - ln(e^2 + e^0 + e^-2 + e^-4) = -0.1451
    np.testing.assert_allclose(np.asarray(logprobs)[np.asarray(tokens) == 0], -0.1451, atol=1e-4)


def test_frequencies_are_the_probabilities():
    n = 20000
    logits = np.array([0.5, -1.0, 2.0, 0.0, -3.0], np.float32)
    tokens, _ = draw(logits, 1.0, n)
    expected = np.exp(logits) / np.exp(logits).sum()
    # four standard deviations of a share over n draws
    np.testing.assert_array_less(np.abs(np.bincount(tokens, minlength=5) / n - expected), 4 * np.sqrt(expected / n))


def at(logits, uniforms, temperatures=None) -> tuple[np.ndarray, np.ndarray]:
    """What `sample_at` draws where all tokens may be drawn."""
    S = len(uniforms)
    temperatures = jnp.ones(S) if temperatures is None else jnp.asarray(temperatures)
    tokens, logprobs = sample_at(jnp.asarray(logits), jnp.full(S, -jnp.inf), jnp.asarray(uniforms), temperatures)
    return np.asarray(tokens), np.asarray(logprobs)


def test_what_is_drawn_is_the_plain_inverse_of_the_cumulative_sum():
    """The slow twin: one cumulative sum over the whole vocabulary, in float64."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(64, 3 * BLOCK + 17)).astype(np.float32)
    uniforms = rng.random(64).astype(np.float32)
    temperatures = rng.choice([0.5, 1.0, 1.7], 64).astype(np.float32)
    logprobs = jax.nn.log_softmax(logits.astype(np.float64) / temperatures[:, None])
    cumulative = np.cumsum(np.exp(np.asarray(logprobs, np.float64)), axis=1)
    expected = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(1)
    tokens, found = at(logits, uniforms, temperatures)
    assert (tokens == expected).mean() > 0.95  # rounding at edges
    np.testing.assert_allclose(found, np.take_along_axis(np.asarray(logprobs), tokens[:, None], 1)[:, 0], atol=2e-6)


def test_a_token_without_probability_is_never_drawn():
    logits = np.full((3, BLOCK + 8), -np.inf, np.float32)
    logits[:, [5, BLOCK - 2]] = np.log(0.5)
    assert at(logits, [0.0, 0.49999997, 1.0])[0].tolist() == [5, 5, BLOCK - 2]


def test_of_equally_likely_tokens_temperature_zero_takes_the_first():
    logits = np.zeros((2, 2 * BLOCK), np.float32)
    logits[0, [7, 9, BLOCK + 3]] = logits[1, [BLOCK + 3, BLOCK + 4]] = 1.0
    assert at(logits, [0.9, 0.9], [0.0, 0.0])[0].tolist() == logits.argmax(-1).tolist() == [7, BLOCK + 3]


def test_temperature_zero_takes_the_most_likely_token():
    tokens, logprobs = draw([0.0, 1.0, 0.5], 0.0, 4)
    assert (np.asarray(tokens) == 1).all()
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(jnp.array([0.0, 1.0, 0.5]))[1], atol=1e-6)


def test_keys_differ_by_seed_prompt_and_sample():
    u = lambda *x: jnp.array(x, jnp.uint32)  # noqa: E731
    keys = np.asarray(request_keys(u(0, 1, 0, 0), u(0, 0, 1, 0), u(0, 0, 0, 1)))
    assert len({tuple(key) for key in keys}) == 4


# Truncation


def kept(logits, temperature=1.0, **limits) -> np.ndarray:
    """Which tokens of each row may be drawn."""
    rows = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    n = len(rows)
    return np.asarray(_kept(rows, jnp.full(n, temperature), truncation(n, **limits)))


@jax.jit
def _kept(rows, temperatures, limits):
    """Compared where it was found: to XLA on a CPU a number too small for float32's exponents is 0."""
    return ~(rows < least_logits(rows, temperatures, limits, jnp.full(len(rows), True))[:, None])


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_their_distribution_is_renormalised():
    logits = [2.0, 1.0, 0.0, -1.0]
    # probabilities 0.6439, 0.2369, 0.0871, 0.0321: two tokens reach 0.8, with mass 0.8808
    assert kept(logits, top_p=0.8).tolist() == [[True, True, False, False]]
    tokens, logprobs = map(np.asarray, draw(logits, 1.0, 256, top_p=0.8))
    assert set(tokens) == {0, 1}
    np.testing.assert_allclose(logprobs[tokens == 0], -0.3133, atol=1e-4)  # ln(0.6439 / 0.8808)
    np.testing.assert_allclose(logprobs[tokens == 1], -1.3133, atol=1e-4)  # one logit less
    assert kept(logits, top_p=0.6).tolist() == [[True, False, False, False]]


def test_top_p_counts_the_mass_at_the_requests_temperature():
    # logits / 0.5 = [4, 2, 0, -2]: probabilities 0.8650, 0.1171, ...: one token reaches 0.8
    assert kept([2.0, 1.0, 0.0, -1.0], temperature=0.5, top_p=0.8).sum() == 1
    assert kept([2.0, 1.0, 0.0, -1.0], temperature=2.0, top_p=0.8).sum() == 3  # 0.4551, 0.2760, 0.1674: 0.8985


def test_top_k_keeps_k_tokens_and_those_as_likely_as_the_last_of_them():
    logits = [0.0, 3.0, -1.0, 2.0, 2.0, -5.0]
    assert kept(logits, top_k=1).tolist() == [[False, True, False, False, False, False]]
    assert kept(logits, top_k=2).tolist() == [[False, True, False, True, True, False]]
    assert kept(logits, top_k=4).tolist() == [[True, True, False, True, True, False]]
    assert kept(logits, top_k=6).all() and kept(logits, top_k=7).all()


def test_neighbouring_floats_are_told_apart():
    for first in (1.0, -1.0, 1e-30):
        second = np.nextafter(np.float32(first), np.float32(9))
        third = np.nextafter(second, np.float32(9))
        assert [kept([first, second, third], top_k=k).sum() for k in (1, 2, 3)] == [1, 2, 3]
    assert kept([-0.0, 0.0, -1.0], top_k=1).sum() == 2  # equal


def test_min_p_keeps_what_is_that_likely_against_the_most_likely():
    # e^0 = 1, e^-1 = 0.3679, e^-2 = 0.1353, e^-3 = 0.0498
    logits = [1.0, 0.0, -1.0, -2.0]
    assert [kept(logits, min_p=p).sum() for p in (0.4, 0.3, 0.1, 0.01)] == [1, 2, 3, 4]


def test_top_p_is_a_share_of_what_top_k_left():
    # the first two have 0.8808 of the mass: 0.7311 and 0.2689 of it
    assert kept([2.0, 1.0, 0.0, -1.0], top_k=2, top_p=0.73).sum() == 1
    assert kept([2.0, 1.0, 0.0, -1.0], top_p=0.73).sum() == 2


LIMITS = [(0, 0.9, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.02), (40, 0.7, 0.01), (1, 0.5, 0.0), (300, 0.99, 0.0), (0, 1e-6, 0)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), LIMITS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_kept_tokens_are_those_of_the_slow_twin(temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(0, 3, (16, 2 * BLOCK + 11)).astype(np.float32)
    found = kept(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, mine in zip(logits, found, strict=True):
        np.testing.assert_array_equal(mine, slow_kept(row, temperature, top_k, top_p, min_p))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), LIMITS)
def test_truncation_is_that_of_transformers(top_k, top_p, min_p):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers").generation.logits_process
    logits = np.random.default_rng(5).normal(0, 3, (16, 2 * BLOCK + 11)).astype(np.float32)
    processors = [process.TemperatureLogitsWarper(0.8)]
    processors += [process.TopKLogitsWarper(top_k)] if top_k else []
    processors += [process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [process.MinPLogitsWarper(min_p)] if min_p else []
    theirs = torch.tensor(logits)
    for processor in processors:
        theirs = processor(None, theirs)
    mine = kept(logits, 0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_array_equal(mine, np.isfinite(theirs.numpy()))


def test_a_slot_that_truncates_changes_not_one_bit_of_the_others():
    """Company must not matter; and nothing asked for is as if there were no truncation."""
    n = 6
    logits = jnp.asarray(np.random.default_rng(7).normal(0, 2, (n, BLOCK + 3)), jnp.float32)
    temperatures = jnp.array([1.0, 0.7, 0.0, 1.3, 1.0, 0.5], jnp.float32)
    keys = request_keys(jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.uint32))

    @jax.jit
    def drawn(logits, limits):
        least = least_logits(logits, temperatures, limits, jnp.full(n, True))
        return sample(logits, least, keys, jnp.zeros(n, jnp.int32), temperatures)

    @jax.jit
    def plain(logits):
        logprobs = jax.nn.log_softmax(logits / jnp.where(temperatures == 0, 1.0, temperatures)[:, None])
        uniforms = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), 0)))(keys)
        cumulative = jnp.cumsum(jnp.exp(logprobs), axis=-1)
        drawn = jnp.sum(cumulative <= uniforms[:, None] * cumulative[:, -1:], axis=-1)
        tokens = jnp.where(temperatures == 0, logits.argmax(-1), drawn)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]

    beside = no_truncation(n)
    beside.top_k[0], beside.top_p[0], beside.min_p[0] = 3, 0.5, 0.1
    alone, together = drawn(logits, no_truncation(n)), drawn(logits, beside)
    tokens, logprobs = plain(logits)
    np.testing.assert_array_equal(alone[0], tokens)
    np.testing.assert_allclose(alone[1], logprobs, atol=2e-6)
    for mine, theirs in zip(together, alone, strict=True):
        np.testing.assert_array_equal(mine[1:], theirs[1:])
    assert together[1][0] > alone[1][0]


def test_temperature_zero_and_slots_that_ended_truncate_nothing():
    logits = jnp.zeros((2, 4)).at[:, 1].set(1.0)
    least = least_logits(logits, jnp.array([0.0, 1.0]), truncation(2, top_k=1, top_p=0.1), jnp.array([True, False]))
    assert np.isneginf(least).all()


def test_frequencies_under_truncation_are_the_renormalised_probabilities():
    n = 20000
    logits = np.array([0.5, -1.0, 2.0, 0.0, -3.0, 1.5], np.float32)
    tokens, logprobs = map(np.asarray, draw(logits, 0.8, n, top_k=5, top_p=0.95, min_p=0.05))
    keep = slow_kept(logits, 0.8, 5, 0.95, 0.05)
    expected = np.where(keep, np.exp(logits / 0.8), 0)
    expected /= expected.sum()
    assert 1 < keep.sum() < 5
    counts = np.bincount(tokens, minlength=6)
    assert (counts[~keep] == 0).all()
    chi_square = ((counts - n * expected)[keep] ** 2 / (n * expected[keep])).sum()
    assert chi_square < 16.3  # three degrees of freedom: above it with probability 0.001
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


def test_tokens_without_mass_are_left_out_of_the_distribution_of_their_slots_alone():
    logits = jnp.tile(jnp.array([3.0, 1.0, 1.0, 0.0]), (2, 1))
    left = without_tokens(logits, jnp.array([[0, -1], [0, -1]]), jnp.array([True, False]))
    np.testing.assert_array_equal(left, [[-np.inf, 1, 1, 0], [3, 1, 1, 0]])
