import math
import threading
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.types import Announcement, Progress, Trajectory
from areal_jax.weights import Publisher


def trajectory(uid, sample, versions=(0,)):
    return Trajectory(
        uid=uid,
        sample=sample,
        prompt_tokens=np.array([uid], np.int32),
        tokens=np.arange(len(versions), dtype=np.int32),
        behav_logprobs=np.full(len(versions), -0.5, np.float32),
        versions=np.array(versions, np.int32),
        reward=float(sample),
        truncated=False,
    )


def group(uid, *, size=2, versions=(0,)):
    """Samples of one prompt; the last one's tokens have the given versions, the others' the newest of them."""
    return [*(trajectory(uid, s, versions[-1:]) for s in range(size - 1)), trajectory(uid, size - 1, versions)]


def make_queue(*, batch_size=4, group_size=2, max_staleness=1, overdue="mask"):
    return TrajectoryQueue(batch_size=batch_size, group_size=group_size, max_staleness=max_staleness, overdue=overdue)


def uids(batch):
    return [t.uid for t in batch]


def in_thread(function, *args, **kwargs):
    """Starts it; returns a function that waits for its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function(*args, **kwargs)), daemon=True)
    thread.start()

    def wait():
        thread.join(10)
        assert result, "it still waits"
        return result[0]

    return wait


def test_batch_is_whole_groups_oldest_token_first_then_in_order_of_arrival():
    queue = make_queue(batch_size=4)
    for uid, versions in ((5, (3,)), (6, (2,)), (7, (1, 3)), (8, (2,))):
        queue.put(group(uid, versions=versions))
    # Oldest tokens: 5 -> 3, 6 -> 2, 7 -> 1 (in one member only), 8 -> 2. So 7, then 6 before 8 (it came first), then 5.
    assert uids(queue.get(3, timeout_s=1)) == [7, 7, 6, 6]
    assert uids(queue.get(4, timeout_s=1)) == [8, 8, 5, 5]
    assert queue.waiting == 0


def test_a_uid_is_taken_once_whatever_became_of_it():
    queue = make_queue(batch_size=2)
    assert queue.put(group(0))
    assert not queue.put(group(0))  # waiting
    queue.get(0, timeout_s=1)
    assert not queue.put(group(0))  # trained
    queue.discard(1, 2, "failed")
    assert not queue.put(group(1))  # discarded
    queue.discard(1, 2, "failed")  # the repeat of a call whose reply was lost
    assert queue.dropped == {"failed": 2}
    assert queue.waiting == 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (group(3)[:1], r"prompt 3 holds samples \[0\] and must hold 0 to 1"),
        ([trajectory(3, 0), trajectory(3, 0)], r"samples \[0, 0\]"),
        ([trajectory(3, 0), trajectory(4, 1)], r"one prompt, these are of \[3, 4\]"),
        ([], r"these are of \[\]"),
        ([trajectory(3, 0), trajectory(3, 1, ())], "at least one token"),
    ],
)
def test_a_partial_or_mixed_group_is_refused_and_leaves_no_trace(broken, says):
    queue = make_queue()
    with pytest.raises(ValueError, match=says):
        queue.put(broken)
    assert queue.progress() == Progress(version=0, low=0, done=(), counted=0, lost=0)
    assert queue.put(group(3))


def test_a_batch_that_is_no_multiple_of_the_group_is_refused():
    with pytest.raises(ValueError, match="batch_size=6 must be a positive multiple of group_size=4.*try 4"):
        make_queue(batch_size=6, group_size=4)


def test_get_waits_for_the_last_group():
    queue = make_queue(batch_size=4)
    batch = in_thread(queue.get, 0, timeout_s=10)
    queue.put(group(0))
    time.sleep(0.05)
    queue.put(group(1))
    assert uids(batch()) == [0, 0, 1, 1]


def test_get_returns_none_when_told_to_stop():
    queue, stop = make_queue(), threading.Event()
    batch = in_thread(queue.get, 0, timeout_s=10, stop=stop)
    stop.set()
    assert batch() is None


def test_timeout_says_how_many_wait_and_what_was_dropped():
    queue = make_queue(batch_size=4)
    queue.put(group(0))
    queue.discard(1, 2, "zero_variance")
    queue.discard(2, 3, "failed")
    with pytest.raises(TimeoutError, match="version 7: 2 of the 4 .* failed 3, zero_variance 2.*batch_timeout_s"):
        queue.get(7, timeout_s=0.05)


def test_arrivals_extend_the_timeout_but_groups_that_are_dropped_again_do_not():
    queue = make_queue(batch_size=8)
    batch = in_thread(queue.get, 0, timeout_s=0.6)
    for uid in range(4):
        time.sleep(0.3)  # 1.2 s in all
        queue.put(group(uid))
    assert len(batch()) == 8

    queue = make_queue(batch_size=4, max_staleness=0, overdue="drop")
    over = threading.Event()

    def put_overdue():
        uid = 0
        while not over.wait(0.02):
            queue.put(group(uid, versions=(0,)))
            uid += 1

    threading.Thread(target=put_overdue, daemon=True).start()
    with pytest.raises(TimeoutError, match="overdue"):
        queue.get(5, timeout_s=0.3)
    over.set()


def test_drop_removes_every_group_with_an_overdue_token_and_counts_it_lost():
    queue = make_queue(batch_size=2, max_staleness=1, overdue="drop")
    queue.put(group(0, versions=(2, 4)))  # staleness 2 at version 4
    queue.put(group(1, versions=(3, 4)))  # staleness 1
    assert uids(queue.get(4, timeout_s=1)) == [1, 1]
    assert queue.dropped == {"overdue": 2}
    assert queue.progress() == Progress(version=0, low=2, done=(), counted=2, lost=2)


@pytest.mark.parametrize("overdue", ["mask", "train"])
def test_mask_and_train_leave_overdue_groups_to_the_trainer(overdue):
    queue = make_queue(batch_size=2, max_staleness=0, overdue=overdue)
    queue.put(group(0, versions=(0,)))
    assert uids(queue.get(9, timeout_s=1)) == [0, 0]
    assert queue.dropped == {}


def test_announcements_wake_for_a_version_for_lost_trajectories_and_for_the_end():
    queue = make_queue()
    assert queue.wait_announcement(0, 0.01) == Announcement(version=0, lost=0, finished=False)  # timeout
    seen = in_thread(queue.wait_announcement, 0, 10)
    queue.announce(2)
    assert seen() == Announcement(version=2, lost=0, finished=False)
    queue.discard(0, 2, "failed")
    # One that knows of nothing lost hears at once; one that knows waits for more.
    assert queue.wait_announcement(2, 10, lost=0).lost == 2
    seen = in_thread(queue.wait_announcement, 2, 10, lost=2)
    queue.discard(1, 3, "failed")
    assert seen() == Announcement(version=2, lost=5, finished=False)
    seen = in_thread(queue.wait_announcement, 2, 10)
    queue.announce(2, finished=True)
    assert seen().finished


def test_the_first_announcement_opens_the_queue():
    queue = make_queue()
    assert not queue.wait_opened(0.01)
    opened = in_thread(queue.wait_opened, 10)
    queue.announce(0)
    assert opened()
    assert queue.wait_opened(0)


def test_a_falling_version_is_our_error():
    queue = make_queue()
    queue.announce(3)
    with pytest.raises(AssertionError):
        queue.announce(2)


def test_resume_trains_every_uid_exactly_once():
    """Prompts 0 to 7, two per step, four generated ahead; killed after the first step; uid 4 was in flight."""
    before = make_queue(batch_size=2, group_size=1, max_staleness=4)
    for uid in (0, 1, 2, 3, 5):
        before.put(group(uid, size=1))
    trained = uids(before.get(0, timeout_s=1))
    before.announce(1)
    snapshot = before.snapshot(version=1)

    after = make_queue(batch_size=2, group_size=1, max_staleness=4)
    after.restore(snapshot)
    progress = after.progress()
    # 2 trained + 3 waiting; 4 comes again, and then 6, 7.
    assert progress == Progress(version=1, low=4, done=(5,), counted=5, lost=0)
    assert progress.counted == 1 * 2 + after.waiting  # version x batch + waiting: the gate opens no wider
    assert not after.put(group(2, size=1))  # a controller that lived on may send it again
    for uid in (uid for uid in range(progress.low, 8) if uid not in progress.done):
        assert after.put(group(uid, size=1))
    for version in (1, 2, 3):
        trained += uids(after.get(version, timeout_s=1))
    assert sorted(trained) == list(range(8))
    assert after.progress() == Progress(version=1, low=8, done=(), counted=8, lost=0)


def test_a_batch_whose_step_had_not_ended_waits_again_after_a_restart():
    queue = make_queue(batch_size=2, group_size=1)
    for uid in range(5):
        queue.put(group(uid, size=1))
    for version in range(2):
        queue.get(version, timeout_s=1)  # step 0 has ended, step 1 is under way
    again = make_queue(batch_size=2, group_size=1)
    again.restore(queue.snapshot(version=1))
    assert again.progress() == Progress(version=1, low=5, done=(), counted=5, lost=0)
    assert uids(again.get(1, timeout_s=1)) == [2, 3]
    again.restore(queue.snapshot(version=0))  # neither had
    assert [uids(again.get(version, timeout_s=1)) for version in range(2)] == [[0, 1], [2, 3]]
    again.restore(queue.snapshot())
    assert again.waiting == 1


def test_snapshot_holds_everything_and_no_empty_array():
    queue = make_queue(batch_size=2)
    empty = queue.snapshot()
    assert all(array.size for array in empty.values())  # Orbax refuses others
    fresh = make_queue(batch_size=2)
    fresh.restore(empty)
    assert fresh.progress() == Progress(version=0, low=0, done=(), counted=0, lost=0)

    queue.put(group(1, versions=(2, 3)))
    queue.put(group(4, versions=(1, 1, 1)))
    queue.discard(0, 2, "failed")
    queue.announce(3)
    fresh.restore(queue.snapshot())
    assert fresh.progress() == queue.progress() == Progress(version=3, low=2, done=(4,), counted=4, lost=2)
    assert fresh.dropped == {"failed": 2}
    for mine, theirs in zip(fresh.get(3, timeout_s=1), queue.get(3, timeout_s=1), strict=True):
        assert (mine.uid, mine.sample, mine.reward, mine.truncated) == (
            theirs.uid,
            theirs.sample,
            theirs.reward,
            theirs.truncated,
        )
        for name in ("prompt_tokens", "tokens", "behav_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype


def test_a_snapshot_of_another_group_size_is_refused():
    queue = make_queue(batch_size=4, group_size=2)
    queue.put(group(0))
    with pytest.raises(ValueError, match="rollout.group_size=4"):
        make_queue(batch_size=4, group_size=4).restore(queue.snapshot())


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 12), st.integers(0, 3)),
            st.tuples(st.just("discard"), st.integers(0, 12)),
            st.tuples(st.just("train")),
            st.tuples(st.just("restart")),
        ),
        max_size=40,
    ),
    overdue=st.sampled_from(["mask", "drop", "train"]),
)
def test_whatever_happens_each_uid_ends_once_and_no_dropped_token_trains(events, overdue):
    eta, size = 1, 2
    queue = make_queue(batch_size=4, group_size=size, max_staleness=eta, overdue=overdue)
    version, finished, trained, discarded = 0, set(), [], 0
    for kind, *values in events:
        if kind == "put":
            uid, age = values
            assert queue.put(group(uid, versions=(max(0, version - age), version))) == (uid not in finished)
            finished.add(uid)
        elif kind == "discard":
            discarded += size * (values[0] not in finished)
            queue.discard(values[0], size, "failed")
            finished.add(values[0])
        elif kind == "restart":
            snapshot = queue.snapshot(version)
            queue = make_queue(batch_size=4, group_size=size, max_staleness=eta, overdue=overdue)
            queue.restore(snapshot)
        elif queue.waiting >= 4:
            try:
                batch = queue.get(version, timeout_s=0)
            except TimeoutError:  # too little was left after dropping
                continue
            if overdue == "drop":
                assert all(version - t.oldest_version <= eta for t in batch)
            trained += uids(batch)
            version += 1
            queue.announce(version)
    progress = queue.progress()
    assert len(trained) == size * len(set(trained))
    assert progress.counted == len(trained) + queue.waiting
    assert progress.counted + progress.lost == size * len(finished)
    assert queue.dropped.get("failed", 0) == discarded
    assert progress.lost == sum(queue.dropped.values())
    assert {*range(progress.low), *progress.done} == finished


def test_staleness_0_with_a_slow_weight_update_never_starts_early_and_never_starves():
    """eta = 0: a batch in flight is made under exactly the version that trains on it, however late that arrives."""
    batch_size, size, eta, steps = 4, 2, 0, 3
    queue = make_queue(batch_size=batch_size, group_size=size, max_staleness=eta, overdue="drop")
    held = [0]  # the version that the server holds
    most = []  # trajectories started beyond those trained

    def send(params, version):
        time.sleep(0.2)
        held[0] = version

    def control():
        announced, started = queue.wait_announcement(-1, 1), 0
        while not announced.finished:
            while math.floor((started - announced.lost + size - 1) / batch_size) <= announced.version + eta:
                most.append(started + size - announced.version * batch_size)
                queue.put(group(started // size, versions=(held[0],)))
                started += size
            announced = queue.wait_announcement(announced.version, 1, lost=announced.lost)
        return started

    started = in_thread(control)
    publisher = Publisher(send, queue.announce)
    for version in range(steps):
        batch = queue.get(version, timeout_s=5)
        assert {int(v) for t in batch for v in t.versions} == {version}
        publisher.publish(dict, version + 1)
    publisher.close()
    queue.get(steps, timeout_s=5)  # what the last version opened the gate for
    queue.announce(steps, finished=True)
    assert started() == (steps + 1) * batch_size
    assert queue.dropped == {}
    assert max(most) == batch_size  # one batch in flight: not none, and never more
