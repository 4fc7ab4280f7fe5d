import numpy as np
import pytest

from areal_jax.algorithms.advantage import trajectory_advantages


def advantages(rewards, uids=None, *, group_size=None, normalize="batch", std="population", group_baseline=False):
    uids = np.zeros(len(rewards), int) if uids is None else np.array(uids)
    size = group_size or len(rewards) // len(set(uids.tolist()))
    return trajectory_advantages(
        np.array(rewards, np.float32),
        uids,
        group_size=size,
        normalize=normalize,
        std=std,
        group_baseline=group_baseline,
    )


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("none", [0.75, -0.25, -0.25, -0.25]),
        # sqrt((0.75^2 + 3 * 0.25^2) / 4) = sqrt(0.1875) = 0.4330; 0.75 / 0.4330 = 1.7321, 0.25 / 0.4330 = 0.5774
        ("population", [1.7321, -0.5774, -0.5774, -0.5774]),
        # sqrt(0.75 / 3) = 0.5
        ("sample", [1.5, -0.5, -0.5, -0.5]),
    ],
)
@pytest.mark.parametrize("normalize", ["batch", "group"])
def test_config_says_which_standard_deviation(std, expected, normalize):
    np.testing.assert_allclose(advantages([1, 0, 0, 0], normalize=normalize, std=std), expected, atol=1e-4)


def test_batch_normalisation_takes_all_groups_together():
    # Rewards 5 5 | 5 -5: mean 2.5, population std sqrt((3 * 2.5^2 + 7.5^2) / 4) = 4.3301.
    got = advantages([5, 5, 5, -5], [3, 3, 9, 9])
    np.testing.assert_allclose(got, [0.5774, 0.5774, 0.5774, -1.7321], atol=5e-5)


def test_group_normalisation_takes_each_group_by_itself_in_any_order():
    # Group 3 has rewards 4, 2 (mean 3, std 1), group 9 has 10, 0 (mean 5, std 5).
    got = advantages([4, 10, 0, 2], [3, 9, 9, 3], normalize="group")
    np.testing.assert_allclose(got, [1, 1, -1, -1], atol=2e-6)


def test_group_baseline_comes_before_batch_normalisation():
    # Centred by group: 1 -1 | 5 -5; mean 0, population std sqrt((1 + 1 + 25 + 25) / 4) = 3.6056.
    got = advantages([4, 2, 10, 0], [3, 3, 9, 9], group_baseline=True)
    np.testing.assert_allclose(got, np.array([1, -1, 5, -5]) / 3.6056, atol=5e-5)


def test_no_normalisation_leaves_rewards_as_they_are():
    np.testing.assert_array_equal(advantages([5, -5, 1, 0], normalize="none"), [5, -5, 1, 0])
    got = advantages([5, -5, 1, 0], [0, 0, 1, 1], normalize="none", group_baseline=True)
    np.testing.assert_array_equal(got, [5, -5, 0.5, -0.5])


@pytest.mark.parametrize("reward", [0.0, 0.1, 5.0, -1 / 3])
@pytest.mark.parametrize("normalize", ["batch", "group"])
@pytest.mark.parametrize("std", ["population", "sample"])
def test_zero_variance_gives_zeros_and_no_nan(reward, normalize, std):
    np.testing.assert_array_equal(advantages([reward] * 7, normalize=normalize, std=std), np.zeros(7))


@pytest.mark.parametrize("size", [4, 6, 7, 12])
@pytest.mark.parametrize("right", [1.0, 5.0, 1 / 3])
@pytest.mark.parametrize("normalize", ["batch", "group", "none"])
def test_groups_of_equal_rewards_beside_others_get_exact_zeros(size, right, normalize):
    """By that their tokens are known to have no gradient, and are not computed."""
    rewards = np.concatenate([np.full(size, right), np.full(size, 0.1), np.arange(size), np.full(size, -right)])
    got = advantages(rewards, np.repeat([4, 2, 9, 1], size), normalize=normalize, group_baseline=True)
    assert [np.count_nonzero(part) for part in got.reshape(4, size)] == [0, 0, 2 * (size // 2), 0]
    many = np.repeat(np.random.default_rng(0).choice([right, 0.1], 39), size)
    got = trajectory_advantages(
        np.append(many, np.arange(size) / 7),  # float64, as the loop has them: means are rounded
        np.repeat(np.arange(40), size),
        group_size=size,
        normalize=normalize,
        std="population",
        group_baseline=True,
    )
    assert not np.any(got[:-size]) and np.any(got[-size:])
    without = advantages(rewards, np.repeat([4, 2, 9, 1], size), normalize="batch")
    assert np.count_nonzero(without) == 4 * size  # against the batch's mean the groups differ


def test_group_of_one_is_finite():
    np.testing.assert_array_equal(advantages([3, 7], [0, 1], normalize="group", std="sample"), [0, 0])


def test_partial_group_is_refused():
    with pytest.raises(ValueError, match=r"prompt 4 has 2 trajectories .* rollout.group_size=3"):
        advantages([1, 2, 3, 1, 2], [2, 2, 2, 4, 4], group_size=3, normalize="group")
