"""The trajectory queue for a controller in the same process (`launch="threads"`): its calls, as coroutines.

In: a `TrajectoryQueue`. Out: the controller's `QueueClient`. Called by the controller. Waits for the queue: the short
calls run on the event loop, the wait for an announcement in a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from areal_jax.types import Announcement, Progress, Trajectory

POLL_S = 0.5  # the longest that a thread is still waiting after its controller has ended


class TrajectoryQueue(Protocol):
    """What the controller needs of `areal_jax.trajectory_queue.TrajectoryQueue`."""

    def put(self, group: Sequence[Trajectory]) -> bool: ...
    def discard(self, uid: int, count: int, cause: str) -> None: ...
    def progress(self) -> Progress: ...
    def wait_announcement(self, after: int, timeout_s: float, *, lost: int | None = None) -> Announcement: ...


class LocalQueue:
    """A `QueueClient` without a network."""

    def __init__(self, queue: TrajectoryQueue) -> None:
        self._queue = queue

    async def put(self, group: Sequence[Trajectory]) -> bool:
        return self._queue.put(group)

    async def discard(self, uid: int, count: int, cause: str) -> None:
        self._queue.discard(uid, count, cause)

    async def progress(self) -> Progress:
        return self._queue.progress()

    async def announcements(self) -> AsyncIterator[Announcement]:
        """The current announcement, then every change; the last one says that training is finished."""
        last: Announcement | None = None
        while last is None or not last.finished:
            after, lost = (-1, None) if last is None else (last.version, last.lost)
            newest = await asyncio.to_thread(self._queue.wait_announcement, after, POLL_S, lost=lost)
            if newest != last:
                yield newest
            last = newest
