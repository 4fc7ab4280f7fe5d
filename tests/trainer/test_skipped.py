import os

import numpy as np
import pytest

from areal_jax.trainer import step
from areal_jax.trainer.skipped import SkippedMinibatches


@pytest.fixture
def minibatch(make_trajectories, make_minibatch):
    return make_minibatch(make_trajectories(9), 32, 64)


def outcome_of(minibatch):
    return step.Outcome([], {}, [np.full_like(batch.behav_logprobs, np.nan) for batch in minibatch.batches])


def test_a_file_has_every_array_of_every_microbatch(tmp_path, minibatch):
    assert len(minibatch.batches) == 2
    (with_prox,) = step.with_behav_as_prox([minibatch])
    path = SkippedMinibatches(tmp_path / "skipped").save(7, 2, with_prox, outcome_of(minibatch))
    assert path == tmp_path / "skipped" / "7.npz"
    with np.load(path, allow_pickle=False) as saved:
        assert saved["minibatch"] == 2
        arrays = ("tokens", "positions", "segment_ids", "loss_mask", "behav_logprobs", "advantages", "versions")
        names = {f"{i}/{name}" for i in (0, 1) for name in (*arrays, "logprobs", "prox_logprobs")}
        assert set(saved) == names | {"minibatch"}
        for i, batch in enumerate(minibatch.batches):
            for name in arrays:
                np.testing.assert_array_equal(saved[f"{i}/{name}"], getattr(batch, name))
            np.testing.assert_array_equal(saved[f"{i}/prox_logprobs"], batch.behav_logprobs)
            assert np.isnan(saved[f"{i}/logprobs"]).all()


def test_a_minibatch_without_proximal_logprobs_has_none_in_its_file(tmp_path, minibatch):
    path = SkippedMinibatches(tmp_path).save(7, 0, minibatch, outcome_of(minibatch))
    with np.load(path) as saved:
        assert not [name for name in saved if name.endswith("prox_logprobs")]


def test_the_newest_three_files_stay_whatever_their_versions(tmp_path, minibatch):
    files = SkippedMinibatches(tmp_path)
    for when, version in enumerate((10, 11, 12, 5, 6)):  # a run that went on from version 5
        path = files.save(version, 0, minibatch, outcome_of(minibatch))
        os.utime(path, (when, when))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12.npz", "5.npz", "6.npz"]
