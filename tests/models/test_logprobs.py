import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.logprobs import from_logits, token_logprobs
from areal_jax.models.transformer import TransformerConfig, bind, graph, init_params

CONFIG = TransformerConfig(vocab_size=64, d_model=16, layers=1, heads=2, kv_heads=1, head_size=8, d_ff=32)


def test_temperature_divides_logits_not_logprobs():
    logprob, _ = from_logits(jnp.array([1.0, 0.0, -1.0, -2.0]), jnp.array(0), temperature=0.5)
    # [2, 0, -2, -4]: 2 - ln(7.3891 + 1 + 0.1353 + 0.0183) = 2 - 2.1451
    np.testing.assert_allclose(logprob, -0.1451, atol=1e-4)


def test_entropy_of_four_equal_choices_is_ln_4():
    _, entropy = from_logits(jnp.zeros(4), jnp.array(2), temperature=1.0)
    np.testing.assert_allclose(entropy, np.log(4), rtol=1e-6)


def batch(R: int = 4, L: int = 12):
    hidden = jax.random.normal(jax.random.key(1), (R, L, CONFIG.d_model))
    return hidden, jax.random.randint(jax.random.key(2), (R, L), 0, CONFIG.vocab_size)


def full(model, hidden, tokens, temperature):
    logprobs = jax.nn.log_softmax(model.logits(hidden) / temperature)
    chosen = jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)[:, :-1]
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


@pytest.mark.parametrize("chunk", [1, 8, 12, 48, 1000])
def test_chunks_give_the_full_computation_and_its_gradient(chunk):
    params = init_params(CONFIG, jax.random.key(0))
    hidden, tokens = batch(L=13)  # chunks of equal size do not fill up such a row
    weights = jax.random.normal(jax.random.key(3), tokens.shape)

    def weighted(compute):
        def loss(params, hidden):
            logprobs, entropy = compute(bind(graph(CONFIG), params), hidden)
            return jnp.sum(weights * logprobs) + 0.1 * jnp.sum(weights * entropy)

        return jax.value_and_grad(loss, argnums=(0, 1))(params, hidden)

    ours = weighted(lambda m, h: token_logprobs(m, h, tokens, temperature=0.7, chunk=chunk))
    theirs = weighted(lambda m, h: full(m, h, tokens, 0.7))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_the_gradient_of_the_head_adds_up_in_float32():
    """The same token 1,024 times, one chunk each: in bfloat16 a sum stays where it is from 256 times a term on."""
    config = dataclasses.replace(CONFIG, tied_embeddings=True)
    params = {name: p.astype(jnp.bfloat16) for name, p in init_params(config, jax.random.key(0)).items()}
    hidden = jnp.broadcast_to(batch()[0][:1, :1].astype(jnp.bfloat16), (1, 1025, config.d_model))

    def gradient(chunk):
        def loss(embedding):
            model = bind(graph(config), params | {"embedding": embedding})
            return token_logprobs(model, hidden, jnp.zeros((1, 1025), jnp.int32), temperature=1.0, chunk=chunk)[0].sum()

        return jax.jit(jax.grad(loss))(params["embedding"]).astype(jnp.float32)

    np.testing.assert_allclose(gradient(1), gradient(1025), rtol=2e-2, atol=2.0)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_a_logit_of_the_smallest_float_means_no_probability_and_stays_finite(temperature):
    """Of [0, min, 0]: log 1/2, entropy log 2; the masked token's is no NaN once a loss mask of 0 is put on it."""
    logits = jnp.array([[0.0, jnp.finfo(jnp.float32).min, 0.0]] * 2)
    logprobs, entropy = from_logits(logits, jnp.array([2, 1]), temperature=temperature)
    np.testing.assert_allclose(logprobs[0], np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(2.0), rtol=1e-6)
    assert logprobs[1] < -1e37 and logprobs[1] * 0.0 == 0.0
