"""The in-process queue client passes every change on, and ends with the training."""

import asyncio

from areal_jax.rollout import local_queue
from areal_jax.rollout.local_queue import LocalQueue
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.types import Announcement


def test_announcements_are_the_current_one_then_every_change_then_the_end(monkeypatch):
    monkeypatch.setattr(local_queue, "POLL_S", 0.01)

    async def scenario():
        queue = TrajectoryQueue(batch_size=2, group_size=2, max_staleness=0, overdue="mask")
        queue.announce(3)
        client = LocalQueue(queue)
        seen = []

        async def listen():
            async for announcement in client.announcements():
                seen.append(announcement)

        listening = asyncio.create_task(listen())
        changes = [
            lambda: queue.announce(4),
            lambda: queue.discard(0, 2, "failed"),
            lambda: queue.announce(4, finished=True),
        ]
        for change in changes:
            await asyncio.sleep(0.1)
            change()
        async with asyncio.timeout(5):
            await listening
        return seen, await client.progress()

    seen, progress = asyncio.run(scenario())
    assert seen == [
        Announcement(3, 0, False),
        Announcement(4, 0, False),
        Announcement(4, 2, False),
        Announcement(4, 2, True),
    ]
    assert (progress.low, progress.lost) == (1, 2)
