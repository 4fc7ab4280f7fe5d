import dataclasses

import jax
import numpy as np
import optax
import pytest

from areal_jax.models import transformer
from areal_jax.trainer import step
from areal_jax.trainer.checkpoint import Checkpoints
from areal_jax.trainer.state import random_state

pytestmark = pytest.mark.usefixtures("quickly_compiled")

QUEUE = {
    "uid": np.array([3, 2**40], np.int64),
    "tokens": np.arange(5, dtype=np.int32),
    "truncated": np.array([True, False]),
    "empty": np.zeros(0, np.float32),
    "counters": np.array(7, np.int64),
}
RUN = {"seed": 1, "group_size": 4}


def facts(model_config, version=3, **run):
    return {"version": version, "model": dataclasses.asdict(model_config), "run": {**RUN, **run}}


@pytest.fixture(scope="module")
def programs(make_programs):
    return make_programs((2, 2, 2))


@pytest.fixture
def saved(tmp_path, programs, fresh_state, model_config):
    """A directory with the checkpoint of version 3, and the state in it."""
    state = fresh_state(programs)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(state, facts(model_config), QUEUE)
    checkpoints.close()
    return tmp_path / "checkpoints", state


def test_round_trip_keeps_values_dtypes_and_places(saved, programs, model_config):
    directory, state = saved
    checkpoints = Checkpoints(directory, keep=2)
    restored = checkpoints.restore(programs.abstract, facts(model_config, version=0))
    checkpoints.close()
    assert restored.version == 3
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    for got, expected in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert got.sharding == expected.sharding and got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    assert restored.queue.keys() == QUEUE.keys()
    for name, expected in QUEUE.items():
        assert restored.queue[name].dtype == expected.dtype
        np.testing.assert_array_equal(restored.queue[name], expected)


def test_a_checkpoint_with_a_bfloat16_moment_is_restored_as_it_is_or_into_float32(
    tmp_path, programs, make_programs, model_config, fresh_state
):
    half = make_programs(moment_dtype="bfloat16")
    state = fresh_state(half)
    moment = transformer.cast(state.params, "bfloat16")
    state = state._replace(opt_state=optax.tree.set(state.opt_state, mu=moment))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state, facts(model_config), QUEUE)
    same = checkpoints.restore(half.abstract, facts(model_config)).state
    wider = checkpoints.restore(programs.abstract, facts(model_config)).state
    checkpoints.close()
    found, widened = (optax.tree.get(s.opt_state, "mu")["embedding"] for s in (same, wider))
    assert (found.dtype, widened.dtype) == ("bfloat16", "float32")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(same), jax.device_get(state))
    np.testing.assert_array_equal(widened, np.asarray(moment["embedding"]).astype(np.float32))


def test_state_may_be_donated_while_it_is_written(
    tmp_path, programs, fresh_state, model_config, params, make_trajectories, make_minibatch
):
    minibatch = make_minibatch(make_trajectories(4), 32, 32 * 8, shards=programs.shards)
    state = fresh_state(programs)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state, facts(model_config), QUEUE)
    step.update(programs, state, minibatch)
    restored = checkpoints.restore(programs.abstract, facts(model_config))
    checkpoints.close()
    for name, value in params.items():
        np.testing.assert_array_equal(restored.state.params[name], value)


def test_checkpoint_of_another_model_is_refused_by_field(saved, programs, model_config):
    directory, _ = saved
    other = dataclasses.replace(model_config, d_model=64, layers=9)
    checkpoints = Checkpoints(directory, keep=2)
    with pytest.raises(ValueError, match=r"of another model: d_model is 16 there and 64 here; layers is 1 there and 9"):
        checkpoints.restore(programs.abstract, facts(other))
    with pytest.raises(ValueError, match=r"of another run: group_size is 4 there and 8 here"):
        checkpoints.restore(programs.abstract, facts(model_config, group_size=8))
    checkpoints.close()


@pytest.mark.parametrize(("there", "here"), [(0, 8), (8, 0)])
def test_rows_that_fill_the_vocabulary_up_come_and_go(tmp_path, make_programs, model_config, there, here):
    """As they do where another number of devices splits it."""
    filled = [dataclasses.replace(model_config, padded_vocab=n and model_config.vocab_size + n) for n in (there, here)]
    before, after = (make_programs(model=model) for model in filled)
    saved = random_state(filled[0], before.abstract, before.optimizer, seed=0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(saved, facts(filled[0]), QUEUE)
    restored = checkpoints.restore(after.abstract, facts(filled[1])).state
    checkpoints.close()
    changed = 0
    for got, leaf, expected in zip(*map(jax.tree.leaves, (restored, after.abstract, saved)), strict=True):
        assert got.shape == leaf.shape and got.sharding == leaf.sharding
        both = tuple(slice(min(sizes)) for sizes in zip(got.shape, expected.shape, strict=True))
        np.testing.assert_array_equal(got[both], expected[both])
        assert np.count_nonzero(got) == np.count_nonzero(got[both])  # zeros beside
        changed += got.shape != expected.shape
    assert changed >= 3  # embedding and both moments


def test_only_the_newest_are_kept(tmp_path, programs, fresh_state, model_config):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest is None
    state = fresh_state(programs)
    for version in (1, 2, 3):
        checkpoints.save(state, facts(model_config, version), QUEUE)
    assert checkpoints.newest == 3
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_what_a_killed_process_left_half_written_is_ignored_and_removed(saved, programs, model_config):
    directory, _ = saved
    torn = directory / "4.orbax-checkpoint-tmp"
    torn.mkdir()
    (torn / "facts").touch()
    checkpoints = Checkpoints(directory, keep=2)
    assert checkpoints.newest == 3
    assert checkpoints.restore(programs.abstract, facts(model_config)).version == 3
    checkpoints.close()
    assert not torn.exists()
