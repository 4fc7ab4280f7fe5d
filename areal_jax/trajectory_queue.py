"""Where finished groups wait for the trainer, and where the trainer's version is announced from.

In: whole groups of trajectories (`put`) and prompts that will never come (`discard`), from the rollout controller; the
version, from the publisher (`announce`). Out: batches for the trainer, oldest first (`get`); announcements for the
controller's staleness gate; what a restarted controller must know (`progress`); one consistent cut for checkpoints.

A prompt id is at every moment not started, in flight, waiting here, or finished: `put` takes an id once, whatever is
sent again. Thread-safe; `get` waits for groups, `wait_announcement` for the publisher. No clock but deadlines.
"""

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from areal_jax.types import (
    Announcement,
    Arrays,
    Progress,
    Trajectory,
    trajectories_from_arrays,
    trajectories_to_arrays,
)

STOP_POLL_S = 0.1  # how late `get` may notice its stop event


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    oldest_version: int
    arrival: int
    trajectories: tuple[Trajectory, ...]


class TrajectoryQueue:
    """Groups of trajectories, each trained on once, oldest token first (then in order of arrival).

    `overdue="drop"` removes, when a batch is asked for, every group that holds a token staler than `max_staleness`. The
    other two are for whoever packs the batch: "mask" gives such tokens loss mask 0, "train" leaves them.
    """

    def __init__(
        self, *, batch_size: int, group_size: int, max_staleness: int, overdue: Literal["mask", "drop", "train"]
    ):
        if batch_size < 1 or group_size < 1 or batch_size % group_size:
            raise ValueError(
                f"batch_size={batch_size} must be a positive multiple of group_size={group_size}, for groups are never "
                f"split; try {max(1, batch_size // max(1, group_size)) * group_size}"
            )
        self._batch_size, self._group_size = batch_size, group_size
        self._max_staleness, self._overdue = max_staleness, overdue
        self._changed = threading.Condition()  # guards all that follows
        self._groups: list[_Group] = []
        self._arrivals = 0
        self._low, self._done = 0, set[int]()
        self._trained = 0  # trajectories handed out
        # The newest batches with the versions that asked for them: one in its step, one fetched ahead.
        self._handed: collections.deque[tuple[int, list[Trajectory]]] = collections.deque(maxlen=2)
        self._dropped: collections.Counter[str] = collections.Counter()
        self._announced = Announcement(version=0, lost=0, finished=False)
        self._opened = False

    def put(self, group: Sequence[Trajectory]) -> bool:
        """Adds a whole group; False when its uid was here before (a repeat after a lost reply, or a restart).

        Raises ValueError for a partial group, for trajectories of several prompts and for arrays that do not match.
        """
        _check_group(group, self._group_size)
        with self._changed:
            if not self._finish(group[0].uid):
                return False
            self._append(group)
            self._changed.notify_all()
            return True

    def discard(self, uid: int, count: int, cause: str) -> None:
        """Finishes a prompt whose `count` trajectories will never come: failed, too long, zero variance, ..."""
        with self._changed:
            if self._finish(uid):
                self._lose(count, cause)

    def get(self, version: int, *, timeout_s: float, stop: threading.Event | None = None) -> list[Trajectory] | None:
        """The batch for the step from `version` to the next; None when `stop` is set.

        Raises TimeoutError when for `timeout_s` the number of waiting trajectories reached no new high.
        """
        high, deadline = -1, 0.0
        with self._changed:
            while True:
                self._drop_overdue(version)
                if stop is not None and stop.is_set():
                    return None
                if self._waiting >= self._batch_size:
                    return self._hand_out(version)
                if self._waiting > high:
                    high, deadline = self._waiting, time.monotonic() + timeout_s
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(self._why_none(version, timeout_s))
                self._changed.wait(left if stop is None else min(left, STOP_POLL_S))

    def announce(self, version: int, *, finished: bool = False) -> None:
        """Opens the gate up to `version`; called last of all, after every server holds these weights."""
        with self._changed:
            assert version >= self._announced.version, f"version fell from {self._announced.version} to {version}"
            self._announced = dataclasses.replace(self._announced, version=version, finished=finished)
            self._opened = True
            self._changed.notify_all()

    def wait_opened(self, timeout_s: float) -> bool:
        """Waits for the first announcement, before which no controller may begin; False after `timeout_s`.

        Until then a checkpoint may still be put back here, and no server holds the weights that `version` names.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._opened, timeout_s)

    def wait_announcement(self, after: int, timeout_s: float, *, lost: int | None = None) -> Announcement:
        """Waits until the version is above `after`, more than `lost` are lost (default: than now), or all is finished.

        Returns the current announcement, after `timeout_s` also an unchanged one.
        """
        with self._changed:
            known = self._announced.lost if lost is None else lost
            self._changed.wait_for(
                lambda: self._announced.version > after or self._announced.lost != known or self._announced.finished,
                timeout_s,
            )
            return self._announced

    def progress(self) -> Progress:
        with self._changed:
            announced, counted = self._announced, self._trained + self._waiting
            return Progress(announced.version, self._low, tuple(sorted(self._done)), counted, announced.lost)

    @property
    def waiting(self) -> int:
        """Trajectories that wait for the trainer."""
        with self._changed:
            return self._waiting

    @property
    def dropped(self) -> dict[str, int]:
        """Trajectories lost so far, by cause."""
        with self._changed:
            return dict(self._dropped)

    def snapshot(self, version: int | None = None) -> dict[str, np.ndarray]:
        """One consistent cut, for a checkpoint of the train state after `version` steps.

        A batch that was handed out but is not in that state yet (its step has not ended) is put down as waiting.
        Without `version` every batch handed out counts as trained. What is empty is left out (Orbax refuses it).
        """
        with self._changed:
            returned = [t for asked, batch in self._handed if version is not None and asked >= version for t in batch]
            waiting = [*returned, *(t for group in self._groups for t in group.trajectories)]
            counters = (
                self._announced.version if version is None else version,
                self._low,
                self._trained - len(returned),
                self._announced.lost,
            )
            done, dropped = sorted(self._done), dict(self._dropped)
        arrays = {
            **trajectories_to_arrays(waiting),
            "counters": np.array(counters, np.int64),
            "done": np.array(done, np.int64),
            "dropped": np.frombuffer(json.dumps(dropped).encode(), np.uint8),
        }
        return {name: array for name, array in arrays.items() if array.size}

    def restore(self, snapshot: Arrays) -> None:
        """Goes on from a snapshot; ValueError when its groups are of another size.

        Called before the first `announce`, which opens the queue (`wait_opened`) with this same version.
        """
        waiting = trajectories_from_arrays({**trajectories_to_arrays([]), **snapshot})
        groups = [waiting[i : i + self._group_size] for i in range(0, len(waiting), self._group_size)]
        for group in groups:
            _check_group(group, self._group_size)
        version, low, trained, lost = (int(n) for n in snapshot["counters"])
        with self._changed:
            self._groups = []
            self._handed.clear()
            for group in groups:
                self._append(group)
            self._low, self._done = low, {int(uid) for uid in snapshot.get("done", ())}
            self._trained = trained
            self._dropped = collections.Counter(json.loads(snapshot["dropped"].tobytes()))
            self._announced = Announcement(version=version, lost=lost, finished=False)
            self._changed.notify_all()

    # With the lock held.

    @property
    def _waiting(self) -> int:
        return len(self._groups) * self._group_size

    def _finish(self, uid: int) -> bool:
        """Marks a uid as finished; False when it was."""
        if uid < self._low or uid in self._done:
            return False
        self._done.add(uid)
        while self._low in self._done:
            self._done.remove(self._low)
            self._low += 1
        return True

    def _append(self, group: Sequence[Trajectory]) -> None:
        self._groups.append(_Group(min(t.oldest_version for t in group), self._arrivals, tuple(group)))
        self._arrivals += 1

    def _lose(self, count: int, cause: str) -> None:
        self._dropped[cause] += count
        self._announced = dataclasses.replace(self._announced, lost=self._announced.lost + count)
        self._changed.notify_all()

    def _drop_overdue(self, version: int) -> None:
        if self._overdue != "drop":
            return
        kept = [group for group in self._groups if version - group.oldest_version <= self._max_staleness]
        overdue, self._groups = len(self._groups) - len(kept), kept
        if overdue:
            self._lose(overdue * self._group_size, "overdue")

    def _hand_out(self, version: int) -> list[Trajectory]:
        self._groups.sort(key=lambda group: (group.oldest_version, group.arrival))
        count = self._batch_size // self._group_size
        batch = [t for group in self._groups[:count] for t in group.trajectories]
        del self._groups[:count]
        self._trained += len(batch)
        self._handed.append((version, batch))
        return batch

    def _why_none(self, version: int, timeout_s: float) -> str:
        dropped = ", ".join(f"{cause} {count}" for cause, count in sorted(self._dropped.items())) or "nothing"
        return (
            f"no batch for version {version}: {self._waiting} of the {self._batch_size} trajectories it takes wait, "
            f"and for {timeout_s:g} s there were no more of them; dropped so far, by cause: {dropped}. When groups are "
            "dropped faster than they come, change the data or that filter; when generation is slow, raise "
            "trainer.batch_timeout_s"
        )


def _check_group(group: Sequence[Trajectory], group_size: int) -> None:
    uids = sorted({t.uid for t in group})
    if len(uids) != 1:
        raise ValueError(
            f"a group holds the trajectories of one prompt, these are of {uids}; put each prompt by itself"
        )
    samples = sorted(t.sample for t in group)
    if samples != list(range(group_size)):
        raise ValueError(
            f"the group of prompt {uids[0]} holds samples {samples} and must hold 0 to {group_size - 1} "
            f"(rollout.group_size={group_size}), each once; a group that lost a member is discarded whole"
        )
    for t in group:
        lengths = (len(t.tokens), len(t.behav_logprobs), len(t.versions))
        if len(set(lengths)) != 1 or not lengths[0]:
            raise ValueError(
                f"sample {t.sample} of prompt {t.uid} has {lengths[0]} tokens, {lengths[1]} behav_logprobs and "
                f"{lengths[2]} versions; it needs at least one token, and one of each per token"
            )
