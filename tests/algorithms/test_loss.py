import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.loss import decoupled_ppo_loss, supervised_loss

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_silent_broadcasting():
    with jax.numpy_rank_promotion("raise"):
        yield


def arrays(*rows):
    return [jnp.asarray(row, jnp.float32) for row in rows]


def random_tokens(shape=(3, 7)):
    logprobs, prox, behav = (jnp.asarray(RNG.normal(-1.0, 0.3, shape), jnp.float32) for _ in range(3))
    advantages = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    return logprobs, prox, behav, advantages, jnp.asarray(RNG.random(shape) < 0.7, jnp.float32)


def loss_and_gradient(logprobs, *rest, clip_eps=0.2):
    return jax.value_and_grad(lambda x: decoupled_ppo_loss(x, *rest, clip_eps=clip_eps)[0])(logprobs)


def test_objective_of_the_worked_example():
    # behav -1.0, prox -1.2, A = 1: weight e^-0.2 = 0.8187.
    # logp -1.1: ratio e^0.1 = 1.1052, in the interval: 0.8187 * 1.1052 = 0.9048, and the gradient is the same.
    # logp -0.9: ratio e^0.3 = 1.3499, clipped at 1.2:   0.8187 * 1.2    = 0.9825, and there is no gradient.
    for logprob, objective, gradient in [(-1.1, 0.9048, 0.9048), (-0.9, 0.9825, 0.0)]:
        loss, grad = loss_and_gradient(*arrays([logprob], [-1.2], [-1.0], [1.0], [1.0]))
        np.testing.assert_allclose(-loss, objective, atol=5e-5)
        np.testing.assert_allclose(-grad, [gradient], atol=5e-5)


def test_sum_and_metrics_of_three_tokens():
    # token 0: ratio e^0 = 1, weight e^0 = 1, A = 2:                 objective 2
    # token 1: ratio e^0.5 = 1.6487 -> 1.2, weight e^0.1 = 1.1052, A = 1: 1.1052 * 1.2 = 1.3262, clipped
    # token 2: ratio e^-0.5 = 0.6065 -> 0.8, weight 1, A = -1:       min(-0.6065, -0.8) = -0.8, clipped
    # token 3: masked
    loss, sums = decoupled_ppo_loss(
        *arrays(
            [-1.0, -0.5, -1.5, -9.0],
            [-1.0, -1.0, -1.0, -1.0],
            [-1.0, -1.1, -1.0, -5.0],
            [2.0, 1.0, -1.0, 7.0],
            [1, 1, 1, 0],
        ),
        clip_eps=0.2,
    )
    np.testing.assert_allclose(loss, -(2 + 1.3262 - 0.8), atol=1e-4)
    expected = {
        "tokens": 3,
        "ratio": 1 + 1.6487 + 0.6065,
        "clipped": 2,
        "behav_weight": 1 + 1.1052 + 1,
        "behav_weight_max": 1.1052,
        # u - 1 - log u: 0, 1.6487 - 1 - 0.5 = 0.1487, 0.6065 - 1 + 0.5 = 0.1065
        "approx_kl": 0.1487 + 0.1065,
    }
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, atol=2e-4, err_msg=name)


def plain_ppo_loss(logprobs, behav_logprobs, advantages, loss_mask, clip_eps):
    ratio = jnp.exp(logprobs - behav_logprobs)
    limited = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    return -jnp.sum(loss_mask * jnp.minimum(ratio * advantages, limited * advantages))


def test_prox_equal_to_behav_is_plain_ppo_bit_for_bit():
    logprobs, _, behav, advantages, mask = random_tokens((8, 64))
    loss, gradient = loss_and_gradient(logprobs, behav, behav, advantages, mask)
    ppo, ppo_gradient = jax.value_and_grad(plain_ppo_loss)(logprobs, behav, advantages, mask, 0.2)
    assert loss == ppo and jnp.array_equal(gradient, ppo_gradient)
    assert jnp.any(gradient == 0) and jnp.any(gradient != 0)


def test_all_policies_equal_gives_gradient_minus_advantage_over_n():
    logprobs, _, _, advantages, _ = random_tokens((5,))
    _, gradient = loss_and_gradient(logprobs, logprobs, logprobs, advantages, jnp.ones(5))
    np.testing.assert_allclose(gradient / 5, -advantages / 5, rtol=1e-6)


def test_ratio_is_clipped_around_prox_and_not_around_behav():
    # logp = prox, both far from behav: the ratio is 1, so nothing is clipped and the gradient is weight * A.
    _, gradient = loss_and_gradient(*arrays([-1.0], [-1.0], [-2.0], [1.0], [1.0]))
    np.testing.assert_allclose(gradient, [-np.e], rtol=1e-6)


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 1.3), (-1.0, 0.7)])
def test_clipped_token_has_zero_gradient(advantage, ratio):
    _, gradient = loss_and_gradient(*arrays([np.log(ratio)], [0.0], [0.0], [advantage], [1.0]))
    assert gradient == 0


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 0.7), (-1.0, 1.3)])
def test_clip_never_stops_the_way_back(advantage, ratio):
    _, gradient = loss_and_gradient(*arrays([np.log(ratio)], [0.0], [0.0], [advantage], [1.0]))
    np.testing.assert_allclose(gradient, [-ratio * advantage], rtol=1e-6)


def test_no_gradient_flows_through_prox_and_behav():
    logprobs, prox, behav, *rest = random_tokens()
    loss = lambda p, b: decoupled_ppo_loss(logprobs, p, b, *rest, clip_eps=0.2)[0]  # noqa: E731
    assert not any(jnp.any(gradient) for gradient in jax.grad(loss, argnums=(0, 1))(prox, behav))


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -1e30])
def test_masked_tokens_change_nothing_whatever_they_hold(rubbish):
    *values, mask = random_tokens()
    spoiled = [jnp.where(mask > 0, x, rubbish) for x in values]
    for got, expected in zip(loss_and_gradient(*spoiled, mask), loss_and_gradient(*values, mask), strict=True):
        assert jnp.array_equal(got, expected)


def test_order_of_tokens_changes_nothing():
    values = random_tokens((40,))
    order = RNG.permutation(40)
    loss, gradient = loss_and_gradient(*values)
    mixed_loss, mixed_gradient = loss_and_gradient(*[x[order] for x in values])
    np.testing.assert_allclose(mixed_loss, loss, rtol=1e-6)
    np.testing.assert_array_equal(mixed_gradient, gradient[order])


def test_microbatches_of_1_and_3_tokens_have_the_token_mean():
    # Per-token loss 1.0 | 0.0 0.0 0.0: (1 + 0) / 4 = 0.25, where a mean of means says 0.50.
    parts = [supervised_loss(*arrays([-1.0, -7.0], [1, 0])), supervised_loss(*arrays([0.0, 0.0, 0.0], [1, 1, 1]))]
    assert sum(float(loss) for loss, _ in parts) / sum(float(sums["tokens"]) for _, sums in parts) == 0.25


def test_supervised_gradient_is_minus_one_on_the_tokens_that_train():
    logprobs, mask = arrays([-1.0, np.nan, -3.0], [1, 0, 1])
    assert jax.grad(lambda x: supervised_loss(x, mask)[0])(logprobs).tolist() == [-1, 0, -1]
