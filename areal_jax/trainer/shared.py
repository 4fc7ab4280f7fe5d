"""What the training loop works with where it runs in several processes: process 0 leads, the others follow.

All run the same loop on the same batches, each with the rows of its own devices. The queue, the publications and the
files are those of process 0: it hands on every batch, or the end. Called by `launch.roles`; the followers wait for
process 0.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.distributed import Processes
from areal_jax.trainer.checkpoint import from_npz, to_npz
from areal_jax.trainer.loop import Queue
from areal_jax.types import Arrays, Trajectory, trajectories_from_arrays, trajectories_to_arrays


def leading_queue(queue: Queue, processes: Processes) -> Queue:
    """The queue of process 0, for its own loop and all the others; a process alone keeps the queue as it is."""
    return queue if processes.count == 1 else LeadingQueue(queue, processes)


class LeadingQueue:
    """The trajectory queue of process 0, whose batches go to every process."""

    def __init__(self, queue: Queue, processes: Processes):
        self._queue, self._processes = queue, processes

    def get(self, version: int, *, timeout_s: float, stop: threading.Event) -> list[Trajectory] | None:
        batch = self._queue.get(version, timeout_s=timeout_s, stop=stop)
        # As the others read it, rewards in float32: from another bit they could come to another number of microbatches.
        return _decode(self._processes.from_first(_encode(batch)))

    def announce(self, version: int, *, finished: bool = False) -> None:
        self._queue.announce(version, finished=finished)

    def snapshot(self, version: int) -> Mapping[str, np.ndarray]:
        return self._queue.snapshot(version)

    def restore(self, snapshot: Arrays) -> None:
        self._queue.restore(snapshot)

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def dropped(self) -> dict[str, int]:
        return self._queue.dropped


class FollowingQueue:
    """In the other processes: the batches of process 0. Of a checkpoint's queue they keep nothing, and add nothing."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self.waiting = 0
        self.dropped: dict[str, int] = {}

    def get(self, version: int, *, timeout_s: float, stop: threading.Event) -> list[Trajectory] | None:
        """The same as in process 0, which decides about `stop` and about the time."""
        return _decode(self._processes.from_first(b""))

    def announce(self, version: int, *, finished: bool) -> None:
        pass

    def snapshot(self, version: int) -> Mapping[str, np.ndarray]:
        return {}

    def restore(self, snapshot: Arrays) -> None:
        pass


class Silent:
    """A publisher and a step log of which nothing comes."""

    def publish(self, params: Mapping[str, Any], version: int) -> None:
        pass

    def write(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def _encode(batch: Sequence[Trajectory] | None) -> bytes:
    """b"" for the end."""
    return b"" if batch is None else to_npz(trajectories_to_arrays(batch)).tobytes()


def _decode(data: bytes) -> list[Trajectory] | None:
    return trajectories_from_arrays(from_npz(np.frombuffer(data, np.uint8))) if data else None
