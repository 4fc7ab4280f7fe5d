import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.config import Config, OptimizerConfig, build
from areal_jax.models import sharding
from areal_jax.trainer import state

pytestmark = pytest.mark.usefixtures("quickly_compiled")

OPTIMIZER = OptimizerConfig(lr=0.5, warmup_fraction=0.0)


def rates(config, updates, counts):
    schedule = state.learning_rate(config, updates)
    return [float(schedule(count)) for count in counts]


def test_rate_at_step_50_of_500_with_a_tenth_of_warmup_is_the_peak():
    values = {"trainer": {"steps": 500, "optimizer": {"warmup_fraction": 0.1, "schedule": "cosine"}}}
    config = build(values)
    assert config.trainer.optimizer.lr == Config().trainer.optimizer.lr == 2e-5
    got = rates(config.trainer.optimizer, config.trainer.steps, [0, 24, 49, 50, 51])
    # Update 0 has 1/50 of the peak, update 24 has 25/50, update 49 (the fiftieth) and update 50 have all of it.
    np.testing.assert_allclose(got[:4], [2e-5 / 50, 1e-5, 2e-5, 2e-5], rtol=1e-5)
    assert got[4] < 2e-5


def test_constant_stays_linear_and_cosine_fall_to_zero():
    counts = [0, 1, 50, 99, 100]
    config = OptimizerConfig(lr=1.0, warmup_fraction=0.0)
    assert rates(config, 100, counts) == [1.0] * 5
    linear = rates(dataclasses.replace(config, schedule="linear"), 100, counts)
    np.testing.assert_allclose(linear, [1, 0.99, 0.5, 0.01, 0], atol=1e-6)
    cosine = rates(dataclasses.replace(config, schedule="cosine"), 100, counts)
    # cos at 0, 1.8, 90, 178.2, 180 degrees: (1 + c) / 2
    np.testing.assert_allclose(cosine, [1, 0.99975, 0.5, 0.00025, 0], atol=1e-5)


def test_the_papers_warmup_of_one_update_is_none():
    # 0.001 * 250 steps * 4 minibatches = 1 update, and the first one already moves at full rate.
    assert rates(OptimizerConfig(), 1000, [0, 1, 999]) == pytest.approx([2e-5] * 3)


def test_after_the_warmup_each_schedule_is_at_its_own_start_and_ends_with_the_run():
    # 10 updates, 4 of them warm-up: 1/4, 2/4, 3/4, 1, then 6 from the peak; half of those are done at update 7.
    counts = [0, 1, 2, 3, 4, 7, 10]
    rise = [0.25, 0.5, 0.75, 1.0]
    after = {"constant": [1.0, 1.0, 1.0], "linear": [1.0, 0.5, 0.0], "cosine": [1.0, 0.5, 0.0]}
    for schedule, rest in after.items():
        config = OptimizerConfig(lr=1.0, warmup_fraction=0.4, schedule=schedule)
        np.testing.assert_allclose(rates(config, 10, counts), rise + rest, atol=1e-6, err_msg=schedule)


def one_update(params, grads, config):
    optimizer = state.make_optimizer(config, state.learning_rate(config, 10))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_weight_decay_leaves_norms_and_biases_alone():
    names = ["embedding", "layers.0.attention.query.kernel", "layers.0.attention.query.bias", "norm.scale"]
    params = {name: jnp.full((2, 2), 4.0) for name in names}
    moved = one_update(params, jax.tree.map(jnp.zeros_like, params), OPTIMIZER)
    # No gradient: lr * decay * weight = 0.5 * 0.05 * 4 = 0.1 is taken off.
    assert {name: float(value[0, 0]) for name, value in moved.items()} == pytest.approx(
        {names[0]: 3.9, names[1]: 3.9, names[2]: 4.0, names[3]: 4.0}
    )


def test_first_adam_update_worked_by_hand():
    # Norm of (3, 4) is 5, clipped to 1: 0.6, 0.8. First update: m / (sqrt(v) + eps) = g / (g + 1e-5).
    moved = one_update({"norm.scale": jnp.zeros(2)}, {"norm.scale": jnp.array([3.0, 4.0])}, OPTIMIZER)
    np.testing.assert_allclose(moved["norm.scale"], [-0.5 * 0.6 / 0.60001, -0.5 * 0.8 / 0.80001], rtol=1e-5)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        # The norm of (2, 1, 2) over both is 3; halved it is (1, 1/2, 1). First update with eps 1: 0.5 * g / (g + 1).
        (1.5, ([-1 / 4], [-1 / 6, -1 / 4])),
        (3.0, ([-1 / 3], [-1 / 4, -1 / 3])),  # not above the most: (2, 1, 2) as it is
    ],
)
def test_clipping_is_by_the_norm_over_all_params_together(most, expected):
    grads = {"embedding": jnp.array([2.0]), "norm.scale": jnp.array([1.0, 2.0])}
    config = dataclasses.replace(OPTIMIZER, eps=1.0, weight_decay=0.0, max_grad_norm=most)
    moved = one_update(jax.tree.map(jnp.zeros_like, grads), grads, config)
    assert float(state.global_norm(grads)) == 3.0
    for value, wanted in zip(moved.values(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)


def test_the_first_moment_may_be_bfloat16_beside_a_float32_second_one():
    # Two updates with gradient g: m = (1 - 0.9^2) g as bfloat16 rounds it, v = (1 - 0.95^2) g^2.
    params, grads = {"norm.scale": jnp.zeros(1)}, {"norm.scale": jnp.array([0.7])}
    config = dataclasses.replace(OPTIMIZER, moment_dtype="bfloat16")
    optimizer = state.make_optimizer(config, state.learning_rate(config, 10))
    opt_state = optimizer.init(params)
    for _ in range(2):
        updates, opt_state = optimizer.update(grads, opt_state, params)
    mu, nu = (optax.tree.get(opt_state, name)["norm.scale"] for name in ("mu", "nu"))
    assert (mu.dtype, nu.dtype, updates["norm.scale"].dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert float(mu[0]) == pytest.approx(0.19 * 0.7, rel=2**-7) and float(mu[0]) != np.float32(0.19 * 0.7)
    assert float(nu[0]) == pytest.approx(0.0975 * 0.49, rel=1e-5)


@pytest.fixture(scope="module")
def sharded(model_config):
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    optimizer = state.make_optimizer(OPTIMIZER, optax.constant_schedule(0.5))
    return state.abstract_state(model_config, optimizer, mesh), optimizer


def assert_in_place(made, abstract):
    for array, leaf in zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)


def test_state_is_born_in_its_shards(sharded, params, model_config):
    abstract, optimizer = sharded
    made = state.initial_state(state.copies(params, abstract.params), abstract, optimizer)
    assert_in_place(made, abstract)
    assert_in_place(state.random_state(model_config, abstract, optimizer, 0), abstract)
    moment = optax.tree.get(made.opt_state, "mu")["layers.0.feed_forward.up.kernel"]
    assert moment.addressable_shards[0].data.shape == (16 // 2, 32 // 2)
    for name, value in params.items():
        np.testing.assert_array_equal(made.params[name], value)


def test_random_state_does_not_depend_on_the_mesh(sharded, model_config):
    abstract, optimizer = sharded
    alone = state.abstract_state(
        model_config, optimizer, sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    )
    spread = state.random_state(model_config, abstract, optimizer, 3)
    single = state.random_state(model_config, alone, optimizer, 3)
    for name in spread.params:
        np.testing.assert_allclose(spread.params[name], single.params[name], rtol=1e-6)


def test_params_of_another_model_are_refused(sharded, params):
    abstract, _ = sharded
    for wrong in ({**params, "norm.scale": np.ones(7)}, {k: v for k, v in params.items() if k != "norm.scale"}):
        with pytest.raises(ValueError, match=r"norm.scale has shape (\(7,\)|None) where the model has \(16,\)"):
            state.copies(wrong, abstract.params)


def test_the_state_takes_its_params_over_without_a_copy(sharded, params):
    abstract, optimizer = sharded
    mine = state.copies(params, abstract.params)
    made = state.initial_state(mine, abstract, optimizer)
    assert all(made.params[name] is mine[name] for name in params)
    with pytest.raises(AssertionError, match="embedding is not in its place"):
        state.initial_state({**mine, "embedding": jax.device_put(params["embedding"])}, abstract, optimizer)
