import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import sharding
from areal_jax.models.logprobs import from_logits, token_logprobs
from areal_jax.models.transformer import TransformerConfig, bind, graph, init_params

pytestmark = pytest.mark.usefixtures("quickly_compiled")

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


@pytest.mark.parametrize("block", [1, 8, 24, 64, 1000])
def test_blocks_give_the_full_computation_and_its_gradient(block):
    params = init_params(CONFIG, jax.random.key(0))
    hidden, tokens = batch(L=13)
    weights = jax.random.normal(jax.random.key(3), tokens.shape)

    def weighted(compute):
        def loss(params, hidden):
            logprobs, entropy = compute(bind(graph(CONFIG), params), hidden)
            return jnp.sum(weights * logprobs) + 0.1 * jnp.sum(weights * entropy)

        return jax.value_and_grad(loss, argnums=(0, 1))(params, hidden)

    ours = weighted(lambda m, h: token_logprobs(m, h, tokens, temperature=0.7, block=block))
    theirs = weighted(lambda m, h: full(m, h, tokens, 0.7))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_gradients_add_up_in_float32():
    """Over 1,024 blocks of one id, and over 1,024 tokens, as in one product: half of it would be lost in bfloat16."""
    config = dataclasses.replace(CONFIG, tied_embeddings=True, vocab_size=1024)
    params = {name: p.astype(jnp.bfloat16) for name, p in init_params(config, jax.random.key(0)).items()}
    hidden = jax.random.normal(jax.random.key(1), (1, 1025, config.d_model), jnp.bfloat16)
    tokens = jnp.zeros((1, 1025), jnp.int32)

    def gradients(block):
        def loss(embedding, hidden):
            model = bind(graph(config), params | {"embedding": embedding})
            return token_logprobs(model, hidden, tokens, temperature=1.0, block=block)[0].sum()

        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(params["embedding"], hidden)
        return [gradient.astype(jnp.float32) for gradient in found]

    for found, expected in zip(gradients(1), gradients(1024), strict=True):
        assert jnp.linalg.norm(found - expected) < 4e-3 * jnp.linalg.norm(expected)


def test_a_head_that_does_not_train_has_no_gradient_computed():
    params = init_params(CONFIG, jax.random.key(0))
    hidden, tokens = batch()

    def compiled(argnums):
        def loss(params, hidden):
            return token_logprobs(bind(graph(CONFIG), params), hidden, tokens, temperature=1.0, block=8)[0].sum()

        return jax.jit(jax.grad(loss, argnums=argnums)).lower(params, hidden).compile().as_text()

    of_the_head = "tv,td->dv/dot_general"
    assert of_the_head in compiled((0, 1)) and of_the_head not in compiled(1)


def test_a_target_without_probability_moves_no_weight_of_its_own():
    """As in the plain formula, in which its logit is a constant."""
    config = dataclasses.replace(CONFIG, live_vocab=20, tied_embeddings=True)
    params = init_params(config, jax.random.key(0))
    hidden, tokens = batch()

    def compute(logprobs_of):
        def loss(params, hidden):
            return jnp.sum(logprobs_of(bind(graph(config), params), hidden)[0])

        return jax.grad(loss, argnums=(0, 1))(params, hidden)

    of_params, of_hidden = compute(lambda m, h: token_logprobs(m, h, tokens, temperature=1.0, block=8))
    expected_params, expected_hidden = compute(lambda m, h: full(m, h, tokens, 1.0))
    assert np.any(tokens >= 20) and not np.any(of_params["embedding"][20:])
    np.testing.assert_allclose(of_params["embedding"], expected_params["embedding"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_hidden, expected_hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (4, 12, 1)])
def test_one_temperature_or_one_for_each_token_also_under_a_checkpoint_and_over_a_mesh(shape):
    model = bind(graph(CONFIG), init_params(CONFIG, jax.random.key(0)))
    hidden, tokens = batch()
    temperature = 0.7 if shape == () else jax.random.uniform(jax.random.key(5), shape, minval=0.5, maxval=2.0)

    def gradient(mesh):
        @jax.checkpoint
        def loss(hidden):
            return token_logprobs(model, hidden, tokens, temperature=temperature, block=12, mesh=mesh)[0].sum()

        return jax.jit(jax.grad(loss))(hidden)

    split = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    expected = jax.grad(lambda hidden: full(model, hidden, tokens, temperature)[0].sum())(hidden)
    np.testing.assert_allclose(gradient(None), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient(split), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_device_whose_ids_are_all_without_probability_adds_nothing(tied):
    """Of four parts of 64 ids the last two hold no live one; gradients too are those of a device that holds all."""
    config = dataclasses.replace(CONFIG, live_vocab=20, tied_embeddings=tied)
    params = init_params(config, jax.random.key(0))
    hidden, tokens = batch()

    def weighted(mesh):
        def loss(params, hidden):
            model = bind(graph(config), params)
            logprobs, entropy = token_logprobs(model, hidden, tokens % 20, temperature=0.7, block=12, mesh=mesh)
            return jnp.sum(logprobs) + 0.1 * jnp.sum(entropy)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, hidden)

    split = sharding.make_mesh({"data": 2, "fsdp": 1, "tensor": 4})
    for found, expected in zip(jax.tree.leaves(weighted(split)), jax.tree.leaves(weighted(None)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_a_logit_of_the_smallest_float_means_no_probability_and_stays_finite(temperature):
    """Of [0, min, 0]: log 1/2, entropy log 2; the masked token's is no NaN once a loss mask of 0 is put on it."""
    logits = jnp.array([[0.0, jnp.finfo(jnp.float32).min, 0.0]] * 2)
    logprobs, entropy = from_logits(logits, jnp.array([2, 1]), temperature=temperature)
    np.testing.assert_allclose(logprobs[0], np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(2.0), rtol=1e-6)
    assert logprobs[1] < -1e37 and logprobs[1] * 0.0 == 0.0
