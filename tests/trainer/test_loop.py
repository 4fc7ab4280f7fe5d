import dataclasses
import itertools
import threading

import numpy as np
import pytest

from areal_jax import compilation
from areal_jax.config import ProfileConfig, build
from areal_jax.distributed import Processes
from areal_jax.trainer import loop, state
from areal_jax.trainer.journal import TIMES
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.weights import Publisher

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GROUP = 4
LONGEST = 16
NEVER = threading.Event()


def make_config(tmp_path, **trainer):
    return build(
        {
            "run": {"dir": str(tmp_path)},
            "rollout": {"group_size": GROUP, "max_new_tokens": 12, "max_staleness": 3},
            "data": {"max_prompt_tokens": 4},
            "trainer": {
                "steps": 4,
                "prompts_per_step": 2,
                "token_budget": 8 * LONGEST,
                "optimizer": {"lr": 1e-2},
                "objective": {"minibatches": 2},
                "checkpoint": {"every": 1},
                **trainer,
            },
        }
    )


class Lines(list):
    write = list.append

    def close(self):
        pass


class FakePublisher:
    """Announces at once; `arrive` is called with each version: what the world does when it hears of it."""

    def __init__(self, queue, arrive=lambda version: None):
        self.queue, self.arrive, self.published = queue, arrive, {}

    def publish(self, export, version):
        self.published[version] = {name: np.asarray(value) for name, value in export().items()}
        self.queue.announce(version)
        self.arrive(version)

    def close(self):
        pass


class Run:
    """One process of a run: a queue of its own, and what was trained on."""

    def __init__(self, config, model_config, params, *, stop=NEVER):
        self.config, self.model_config, self.params, self.stop = config, model_config, params, stop
        self.queue = TrajectoryQueue(
            batch_size=config.batch_size, group_size=GROUP, max_staleness=3, overdue=config.rollout.overdue
        )
        self.lines, self.trained, self.opened_at = Lines(), [], None
        get = self.queue.get

        def recording_get(version, **options):
            batch = get(version, **options)
            self.trained += [(version, sorted({t.uid for t in batch}))] if batch else []
            return batch

        self.queue.get = recording_get

    def read_params(self, places):
        assert self.params is not None, "a run that goes on from a checkpoint reads no params"
        return state.copies(self.params, places)

    def open_log(self, version):
        self.opened_at = version
        return self.lines

    def train(self, arrive=lambda version: None):
        return self.train_with(FakePublisher(self.queue, arrive))

    def train_with(self, publisher):
        self.publisher = publisher
        return loop.train(
            self.config,
            model_config=self.model_config,
            read_params=self.read_params,
            queue=self.queue,
            publisher=self.publisher,
            open_log=self.open_log,
            stop=self.stop,
            processes=Processes(),
        )


@pytest.fixture(scope="module")
def groups(make_trajectories):
    """Groups 0 to 7; the tokens of group 2 k and 2 k + 1 are of version max(0, k - 1): staleness 1."""
    trajectories = make_trajectories(8 * GROUP, group_size=GROUP)
    aged = [dataclasses.replace(t, versions=np.full_like(t.versions, max(0, t.uid // 2 - 1))) for t in trajectories]
    return [aged[i : i + GROUP] for i in range(0, len(aged), GROUP)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, model_config, params, groups):
    """Four steps with all groups there from the start."""
    config = dataclasses.replace(make_config(tmp_path_factory.mktemp("run")), profile=ProfileConfig(steps="2:3"))
    run = Run(config, model_config, params)
    for group in groups:
        run.queue.put(group)
    compiled = []
    assert run.train(lambda version: compiled.append(compilation.count())) == 4
    return run, compiled


def test_every_batch_makes_a_version_that_is_published(uninterrupted, params):
    run, _ = uninterrupted
    assert run.trained == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6, 7])]
    assert list(run.publisher.published) == [0, 1, 2, 3, 4]
    for name, value in params.items():
        np.testing.assert_array_equal(run.publisher.published[0][name], value)
    kernels = [weights["layers.0.attention.query.kernel"] for weights in run.publisher.published.values()]
    assert all((before != after).any() for before, after in itertools.pairwise(kernels))
    assert run.queue.wait_announcement(4, 0).finished


def test_a_step_does_not_wait_for_the_publish_of_the_version_before(
    tmp_path, model_config, params, groups, monkeypatch
):
    """Version 1 is sent until the updates of step 2 are done; were they waited for, neither would end."""
    run = Run(make_config(tmp_path, steps=2), model_config, params)
    for group in groups:
        run.queue.put(group)
    steps, second_is_done, in_time = [], threading.Event(), []

    def update_all(*given, **options):
        steps.append(loop_update_all(*given, **options))
        if len(steps) == 2:
            second_is_done.set()
        return steps[-1]

    def send(params, version):
        if version == 1:
            in_time.append(second_is_done.wait(60))
        return {}

    loop_update_all = loop.update_all
    monkeypatch.setattr(loop, "update_all", update_all)
    assert run.train_with(Publisher(send, run.queue.announce)) == 2
    assert in_time == [True]


def test_every_step_leaves_a_line(uninterrupted):
    run, _ = uninterrupted
    assert run.opened_at == 0
    assert [line["version"] for line in run.lines] == [1, 2, 3, 4]
    assert [line["staleness/max"] for line in run.lines] == [0, 1, 1, 1]
    assert [line["queue/waiting"] for line in run.lines] == [24, 16, 8, 0]
    assert "logp_gap/p50" in run.lines[0] and "logp_gap/p50" not in run.lines[1]
    for line in run.lines:
        assert np.isfinite([line["loss"], line["grad_norm"], line["entropy"], line["step_s"]]).all()
        assert line["update_s"] > 0 and line["prox_s"] > 0 and line["tokens/trained"] > 0
        assert 0 < sum(line[name] for name in TIMES) <= line["step_s"]
        assert line["model_tflops/update"] > 3 * line["model_tflops/prox"] > 0  # the first minibatch needs no pass


def test_chosen_steps_leave_a_trace_that_names_their_parts(uninterrupted):
    run, _ = uninterrupted
    (trace,) = (run.config.run_dir / "profile" / "trainer").glob("plugins/profile/*/*.xplane.pb")
    text = trace.read_bytes()
    assert all(name.encode() in text for name in ("idle_s", "pack_s", "prox_s", "update_s", "publish_wait_s", "step"))


def test_nothing_compiles_after_the_first_announcement(uninterrupted):
    run, compiled = uninterrupted
    assert len(set(compiled)) == 1
    assert {line["compilations"] for line in run.lines} == set(compiled)


@pytest.mark.parametrize(("mesh", "atol"), [({}, 0.0), ({"data": 2, "fsdp": 2, "tensor": 2}, 1e-5)])
def test_resumed_run_trains_every_prompt_exactly_once(
    tmp_path, uninterrupted, model_config, params, groups, mesh, atol
):
    """To the same bits, and on other devices to the same weights."""
    config = make_config(tmp_path)
    first = Run(config, model_config, params)
    for group in groups[:4]:  # two batches generated ahead
        first.queue.put(group)

    def crash(version):
        if version == 2:  # after the second update, before anything of it is saved
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        first.train(crash)
    second = Run(make_config(tmp_path, mesh=mesh), model_config, None)
    progress = []

    def arrive(version):
        if version == 1:
            progress.append(second.queue.progress())
            assert not any(second.queue.put(group) for group in groups[:4])
            assert all(second.queue.put(group) for group in groups[4:])

    assert second.train(arrive) == 4
    assert second.opened_at == 1 and list(second.publisher.published) == [1, 2, 3, 4]
    assert first.trained[:1] + second.trained == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6, 7])]
    # Generated so far = version x batch + what waits: 1 x 8 + 8.
    assert progress[0].counted == 2 * config.batch_size
    whole, _ = uninterrupted
    for name, value in whole.publisher.published[4].items():
        np.testing.assert_allclose(second.publisher.published[4][name], value, rtol=0, atol=atol)


def test_facts_tell_apart_what_would_make_other_prompts_of_the_same_uids(tmp_path, model_config):
    config = make_config(tmp_path)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, options={"order": "file"}))
    assert loop.facts(config, model_config, 0) != loop.facts(other, model_config, 0)


def test_finished_run_started_again_only_says_so(tmp_path, model_config, params, groups):
    config = make_config(tmp_path, steps=1, checkpoint={"every": 0})
    for _ in range(2):
        run = Run(config, model_config, params)
        for group in groups[:2]:
            run.queue.put(group)
        assert run.train() == 1
        assert run.queue.wait_announcement(1, 0).finished
    assert run.trained == [] and list(run.publisher.published) == [1] and run.lines == []


def test_stopped_run_leaves_a_checkpoint_and_is_not_finished(
    tmp_path, model_config, params, groups, reserved, state_bytes
):
    stop = threading.Event()
    run = Run(make_config(tmp_path, checkpoint={"every": 0}), model_config, params, stop=stop)
    for group in groups:
        run.queue.put(group)
    assert run.train(lambda version: stop.set() if version == 2 else None) == 2
    assert [line["version"] for line in run.lines] == [1, 2]
    assert not run.queue.wait_announcement(2, 0).finished
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert reserved == [state_bytes]


def test_a_run_whose_gradients_are_not_finite_ends_with_the_minibatch_in_a_file(tmp_path, model_config, params, groups):
    run = Run(make_config(tmp_path, skipped_in_a_row=2), model_config, params)
    for group in groups[:2]:
        run.queue.put([dataclasses.replace(t, behav_logprobs=np.full_like(t.behav_logprobs, np.nan)) for t in group])
    with pytest.raises(FloatingPointError, match=r"2 updates in a row.*step from version 0; .*skipped/0\.npz"):
        run.train()
    with np.load(tmp_path / "skipped" / "0.npz") as saved:
        assert np.isnan(saved["0/behav_logprobs"][saved["0/loss_mask"] > 0]).all()
        assert np.isfinite(saved["0/logprobs"]).all()  # so it was not the weights
    for name, value in params.items():
        np.testing.assert_array_equal(run.publisher.published[1][name], value)


def test_empty_queue_is_an_error_that_says_what_is_missing(tmp_path, model_config, params, groups):
    run = Run(make_config(tmp_path, batch_timeout_s=0.05), model_config, params)
    for group in groups[:3]:
        run.queue.put(group)
    with pytest.raises(TimeoutError, match="no batch for version 1: 4 of the 8"):
        run.train()
    assert [line["version"] for line in run.lines] == [1]


@pytest.mark.parametrize("overdue", ["mask", "train"])
def test_overdue_tokens_are_masked_or_trained(tmp_path, overdue, groups):
    config = make_config(tmp_path)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, overdue=overdue))
    batch = [*groups[0], *groups[7]]  # versions 0 and 2 at version 4: staleness 4 and 2, where 3 is allowed
    layout = loop.make_layout((), max_length=LONGEST, token_budget=8 * LONGEST)
    packed = [b for m in loop.make_minibatches(config, batch, 4, layout) for b in m.batches]
    old = sum(int(b.loss_mask[b.versions == 0].sum()) for b in packed)
    assert old == (0 if overdue == "mask" else sum(len(t.tokens) for t in groups[0]))
    assert sum(int(b.loss_mask[b.versions == 2].sum()) for b in packed) == sum(len(t.tokens) for t in groups[7])


def equal_rewards(group, reward=-5.0):
    return [dataclasses.replace(t, reward=reward) for t in group]


def mixed_rewards(group):
    return [dataclasses.replace(t, reward=5.0 * (-1) ** i) for i, t in enumerate(group)]


def test_trajectories_without_advantage_are_not_computed_and_change_nothing(
    tmp_path, groups, make_programs, fresh_state
):
    config = make_config(tmp_path, objective={"minibatches": 1, "normalize_advantages": "group"})
    batch = [*mixed_rewards(groups[0]), *equal_rewards(groups[1])]
    layout = loop.make_layout((), max_length=LONGEST, token_budget=8 * LONGEST)
    (minibatch,) = loop.make_minibatches(config, batch, 0, layout)
    assert minibatch.gradless_tokens == sum(len(t.tokens) for t in groups[1])
    packed = sum(int((b.versions >= 0).sum()) for b in minibatch.batches)
    assert packed == sum(len(t.tokens) for t in groups[0])

    advantages = np.array([1.0, -1.0, 1.0, -1.0, 0, 0, 0, 0], np.float32)
    everything = loop.Minibatch.of(loop.pack(batch, advantages, layout, version=0, max_staleness=3))
    programs = make_programs()
    moved = [loop.update(programs, fresh_state(programs), m) for m in (minibatch, everything)]
    norms = [float(outcome.facts["grad_norm"]) for _, outcome in moved]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0
    for name in moved[0][0].params:
        np.testing.assert_allclose(moved[0][0].params[name], moved[1][0].params[name], atol=1e-5, err_msg=name)


def test_a_step_in_which_no_group_has_variance_trains_nothing_and_goes_on(tmp_path, model_config, params, groups):
    config = make_config(tmp_path, steps=2, objective={"minibatches": 2, "normalize_advantages": "group"})
    run = Run(config, model_config, params)
    for group in (*map(equal_rewards, groups[:2]), *map(mixed_rewards, groups[2:4])):
        run.queue.put(group)
    assert run.train() == 2
    still, moving = run.lines
    assert still["tokens/gradless"] == still["tokens/trained"] > 0 and still["grad_norm"] == 0
    assert moving["tokens/gradless"] == 0 and moving["grad_norm"] > 0
    assert still["compilations"] == moving["compilations"]


def test_naive_objective_runs_without_a_proximal_pass(tmp_path, model_config, params, groups):
    config = make_config(tmp_path, steps=1, objective={"prox": "naive", "minibatches": 2})
    run = Run(config, model_config, params)
    for group in groups[:2]:
        run.queue.put(group)
    run.train()
    assert run.lines[0]["behav_weight/mean"] == 1.0 and run.lines[0]["ratio/mean"] != 1.0


def test_budget_that_does_not_hold_a_row_per_device_is_refused(tmp_path, model_config, params):
    run = Run(make_config(tmp_path, token_budget=7 * LONGEST), model_config, params)
    with pytest.raises(ValueError, match=r"token_budget=112 .* each of the 8 shards .* at least 128"):
        run.train()


def test_fifty_steps_without_learning_stay_where_they_are(tmp_path, model_config, params, groups):
    config = make_config(tmp_path, steps=50, optimizer={"lr": 0.0}, checkpoint={"every": 0})
    run = Run(config, model_config, params)
    uids = iter(range(1000))

    def arrive(version):
        for group in groups[:2]:
            uid = next(uids)
            run.queue.put([dataclasses.replace(t, uid=uid, versions=np.full_like(t.versions, version)) for t in group])

    run.train(arrive)
    assert len({line["logp_gap/p99"] for line in run.lines}) == 1
    assert len({line["behav_weight/max"] for line in run.lines}) == 1
    assert len({line["compilations"] for line in run.lines}) == 1
    assert {line["ratio/mean"] for line in run.lines} == {1.0}
