import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.generation.sampling import BLOCK, inverse_cdf, request_keys, sample


def draw(logits, temperature, n):
    keys = request_keys(jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.uint32))
    return sample(jnp.tile(jnp.asarray(logits), (n, 1)), keys, jnp.zeros(n, jnp.int32), jnp.full(n, temperature))


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


def test_inverse_cdf_is_the_plain_one():
    """The slow twin: one cumulative sum over the whole vocabulary, in float64."""
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(3 * BLOCK + 17, 0.05), 64).astype(np.float32)
    uniforms = rng.random(64).astype(np.float32)
    cumulative = np.cumsum(probabilities.astype(np.float64), axis=1)
    expected = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(1)
    assert (
        np.asarray(inverse_cdf(jnp.asarray(probabilities), jnp.asarray(uniforms))) == expected
    ).mean() > 0.95  # rounding at edges


def test_a_token_without_probability_is_never_drawn():
    probabilities = np.zeros((3, BLOCK + 8), np.float32)
    probabilities[:, [5, BLOCK - 2]] = 0.5
    uniforms = jnp.array([0.0, 0.49999997, 1.0])
    assert inverse_cdf(jnp.asarray(probabilities), uniforms).tolist() == [5, 5, BLOCK - 2]


def test_temperature_zero_takes_the_most_likely_token():
    tokens, logprobs = draw([0.0, 1.0, 0.5], 0.0, 4)
    assert (np.asarray(tokens) == 1).all()
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(jnp.array([0.0, 1.0, 0.5]))[1], atol=1e-6)


def test_keys_differ_by_seed_prompt_and_sample():
    u = lambda *x: jnp.array(x, jnp.uint32)  # noqa: E731
    keys = np.asarray(request_keys(u(0, 1, 0, 0), u(0, 0, 1, 0), u(0, 0, 0, 1)))
    assert len({tuple(key) for key in keys}) == 4
