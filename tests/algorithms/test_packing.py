import numpy as np
import pytest

from areal_jax.algorithms import packing
from areal_jax.types import ROW_ARRAYS, Trajectory


def trajectory(prompt, completion, *, uid=0, versions=None, logprobs=None):
    n = len(completion)
    return Trajectory(
        uid=uid,
        sample=0,
        prompt_tokens=np.array(prompt, np.int32),
        tokens=np.array(completion, np.int32),
        behav_logprobs=np.array(logprobs or [-0.5] * n, np.float32),
        versions=np.array(versions or [0] * n, np.int32),
        reward=1.0,
        truncated=False,
    )


def random_trajectories(rng, count, longest):
    return [
        trajectory(
            rng.integers(1, 30, rng.integers(1, longest // 2)),
            rng.integers(1, 30, n := rng.integers(1, longest // 2)),
            uid=i,
            versions=np.sort(rng.integers(0, 9, n)).tolist(),
            logprobs=rng.normal(size=n).tolist(),
        )
        for i in range(count)
    ]


def algorithm_1(lengths, capacity, k_min):
    """The paper's Algorithm 1 as it is written."""
    microbatches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [m for m in microbatches if sum(lengths[i] for i in m) + lengths[index] <= capacity]
        if len(microbatches) < k_min or not fitting:
            microbatches.append([index])
        else:
            min(fitting, key=len).append(index)
    return microbatches


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("min_bins", [1, 3, 50])
def test_allocation_is_algorithm_1(seed, min_bins):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, rng.integers(0, 40)).tolist()
    bins = packing.allocate(lengths, 100, min_bins=min_bins)
    assert bins == algorithm_1(lengths, 100, min_bins)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in b) <= 100 for b in bins)
    assert len(bins) >= min(min_bins, len(lengths))


def test_allocation_worked_by_hand():
    # Capacity 10. 7 opens A, 6 opens B (7 + 6 > 10), 4 goes to B (6 + 4 = 10), 3 goes to A (10), 2 opens C, 1 joins C.
    assert packing.allocate([1, 2, 3, 4, 6, 7], 10) == [[5, 2], [4, 3], [1, 0]]
    # Fewest sequences first: 5 | 2 2 | and then 1 goes to the bin with one sequence, although both can hold it.
    assert packing.allocate([5, 2, 2, 1], 6, min_bins=2) == [[0, 3], [1, 2]]


def test_sequence_over_the_capacity_is_refused():
    with pytest.raises(ValueError, match="a sequence of 11 tokens does not fit into a row of 10"):
        packing.allocate([3, 11], 10)


def test_packed_row_worked_by_hand():
    layout = packing.Layout((8,), token_budget=16)
    first = trajectory([11, 12], [13, 14, 15], logprobs=[-1.0, -2.0, -3.0], versions=[4, 5, 6])
    second = trajectory([21], [22, 23], logprobs=[-4.0, -5.0], versions=[6, 6])
    (batch,) = packing.pack([second, first], np.array([0.5, -0.5]), layout, version=6, max_staleness=1)
    assert batch.tokens.tolist() == [[11, 12, 13, 14, 15, 21, 22, 23], [0] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0] * 8]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [0] * 8]
    # Version 4 is two behind 6 and eta is 1: that token is masked, the rest of its trajectory trains.
    assert batch.loss_mask.tolist() == [[0, 0, 0, 1, 1, 0, 1, 1], [0] * 8]
    assert batch.behav_logprobs.tolist() == [[0, 0, -1, -2, -3, 0, -4, -5], [0] * 8]
    assert batch.advantages.tolist() == [[0, 0, -0.5, -0.5, -0.5, 0, 0.5, 0.5], [0] * 8]
    assert batch.versions.tolist() == [[-1, -1, 4, 5, 6, -1, 6, 6], [-1] * 8]
    assert packing.loss_tokens([batch]) == 4
    assert packing.padding_share([batch]) == 0.5
    assert {getattr(batch, name).dtype.name for name in ("tokens", "positions", "segment_ids", "versions")} == {"int32"}
    assert {getattr(batch, name).dtype.name for name in ("loss_mask", "behav_logprobs", "advantages")} == {"float32"}


def test_mask_follows_lengths_and_not_token_ids():
    # Pad id = end-of-sequence id = 0. With it: three tokens train; cut off without it: three tokens train too.
    layout = packing.Layout((6,), token_budget=6)
    for completion in ([5, 6, 0], [5, 6, 7]):
        (batch,) = packing.pack([trajectory([9], completion)], np.ones(1), layout, version=0, max_staleness=0)
        assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("seed", range(10))
def test_every_token_is_packed_once_with_its_own_values(seed):
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(rng, 25, 40)
    advantages = rng.normal(size=25).astype(np.float32)
    layout = packing.make_layout((), max_length=40, token_budget=300, shards=2)
    batches = packing.pack(trajectories, advantages, layout, version=8, max_staleness=3)
    assert len({b.tokens.shape for b in batches}) == 1 and batches[0].tokens.shape in layout.shapes
    found = []
    for batch in batches:
        for r in range(len(batch.tokens)):
            for segment in range(1, batch.segment_ids[r].max() + 1):
                at = np.flatnonzero(batch.segment_ids[r] == segment)
                assert (np.diff(at) == 1).all() and batch.positions[r, at].tolist() == list(range(len(at)))
                found.append({name: getattr(batch, name)[r, at] for name in ROW_ARRAYS})
    assert len(found) == 25
    by_advantage = {float(f["advantages"][-1]): f for f in found}
    for t, advantage in zip(trajectories, advantages, strict=True):
        p, f = len(t.prompt_tokens), by_advantage[float(advantage)]
        np.testing.assert_array_equal(f["tokens"], np.concatenate([t.prompt_tokens, t.tokens]))
        np.testing.assert_array_equal(f["versions"], np.concatenate([np.full(p, -1), t.versions]))
        np.testing.assert_array_equal(f["loss_mask"], np.concatenate([np.zeros(p), 8 - t.versions <= 3]))
        np.testing.assert_array_equal(f["behav_logprobs"][p:], t.behav_logprobs)
        np.testing.assert_array_equal(f["advantages"][p:], np.full(len(t.tokens), advantage))


@pytest.mark.parametrize("seed", range(10))
def test_no_token_older_than_max_staleness_trains(seed):
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(rng, 20, 40)
    layout = packing.make_layout((), max_length=40, token_budget=160)
    for batch in packing.pack(trajectories, np.ones(20), layout, version=8, max_staleness=2):
        assert (8 - batch.versions[batch.loss_mask > 0] <= 2).all()
        assert (8 - batch.versions[(batch.loss_mask == 0) & (batch.versions >= 0)] > 2).all()


def test_empty_prompt_is_a_defect_of_ours():
    with pytest.raises(AssertionError, match="prompt 7 has no token"):
        packing.pack([trajectory([], [1], uid=7)], np.ones(1), packing.Layout((8,), 8), version=0, max_staleness=0)


def test_default_buckets_are_powers_of_two_up_to_the_longest():
    layout = packing.make_layout((), max_length=28672, token_budget=32768)
    assert layout.shapes == [(8, 4096), (4, 8192), (2, 16384), (1, 32768)]
    assert packing.make_layout((), max_length=100, token_budget=1024).lengths == (32, 64, 128)
    assert packing.make_layout((), max_length=5, token_budget=64).lengths == (8,)


def test_longest_bucket_shrinks_to_the_budget():
    assert packing.make_layout((), max_length=100, token_budget=110).lengths == (32, 64, 110)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_microbatches_hold_the_budget_and_divide_the_shards(shards):
    layout = packing.make_layout((), max_length=100, token_budget=1100, shards=shards)
    for rows, length in layout.shapes:
        assert rows > 0 and rows % shards == 0 and rows * length <= 1100 < (rows + shards) * length


def test_budget_under_the_longest_sequence_is_refused():
    with pytest.raises(ValueError, match=r"token_budget=99 must hold the longest .*, 100 tokens .* at least 100"):
        packing.make_layout((), max_length=100, token_budget=99)
    with pytest.raises(ValueError, match=r"each of the 8 shards .* at least 800"):
        packing.make_layout((), max_length=100, token_budget=799, shards=8)


@pytest.mark.parametrize("buckets", [(64,), (100, 64), (100, 100), (100, 2000), (0, 100)])
def test_bad_row_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match=r"trainer.row_buckets=.* must rise"):
        packing.make_layout(buckets, max_length=100, token_budget=1024)


def test_bucket_that_computes_the_fewest_tokens_is_chosen():
    layout = packing.Layout((32, 64, 128), token_budget=256)
    assert packing.choose_rows([20] * 8, layout)[0] == 32  # 8 rows of 32 = 256; 3 rows of 64, filled up to 4 = 256
    assert packing.choose_rows([32] * 4 + [33], layout)[0] == 64  # 33 tokens do not fit into 32
    assert packing.choose_rows([42] * 6, layout)[0] == 128  # 2 rows of 128 = 256; 6 rows of 64, filled up to 8 = 512


@pytest.mark.parametrize("shards", [1, 8])
def test_padding_is_under_five_percent_on_the_papers_lengths(shards):
    """A minibatch of the paper's recipe (512 prompts x 16 answers / 4); rows that fill up the last microbatch count."""
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(np.log(6000), 0.8, 2048)), 1000, 28672).astype(int)
    layout = packing.make_layout((), max_length=28672, token_budget=32768 * shards, shards=shards)
    length, rows = packing.choose_rows(lengths, layout)
    microbatches = -(-len(rows) // layout.rows(length))
    assert 1 - lengths.sum() / (microbatches * layout.rows(length) * length) < 0.05


def test_minibatches_hold_every_trajectory_once_and_about_the_same_tokens():
    trajectories = random_trajectories(np.random.default_rng(0), 64, 200)
    parts = packing.split_minibatches(trajectories, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(64))
    assert {len(part) for part in parts} == {16}
    totals = [sum(len(trajectories[i]) for i in part) for part in parts]
    assert max(totals) < 1.1 * min(totals)
