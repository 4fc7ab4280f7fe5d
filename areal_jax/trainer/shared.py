"""What the training loops work with where they run in several processes: process 0 leads, the others follow.

All run the same loop. Process 0 takes a batch, packs it, and gives every other process the rows of that one's own
devices, with the few numbers that all need: how many rows there are in all, and how many tokens the loss is divided by.
The queue, the publications and the files are those of process 0. Called by the loops and by `launch`; the followers
wait for process 0.
"""

import functools
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from areal_jax.distributed import Processes
from areal_jax.metrics import JsonlWriter
from areal_jax.trainer.checkpoint import from_npz, to_npz
from areal_jax.trainer.journal import TIMES
from areal_jax.trainer.step import Minibatch, Programs
from areal_jax.types import ROW_ARRAYS, Arrays, TrainBatch, Trajectory

T = TypeVar("T")
Ask = Callable[[], Sequence[T] | None]
Pack = Callable[[], list[Minibatch]]


class Shares(Protocol):
    """How a process comes to what it trains on: `next` and `take`, for each batch."""

    def next(self, ask: Ask[T]) -> Sequence[T] | None:
        """The batch that `ask` gives process 0, or None at the end. The others do not ask, and get an empty one."""
        ...

    def take(self, pack: Pack) -> list[Minibatch]:
        """What `pack` makes of the batch in process 0: whole there, in the others the rows of their own devices."""
        ...


def shares(processes: Processes, programs: Programs) -> Shares:
    if processes.count == 1:
        return Alone()
    return Following(processes) if processes.index else Leading(processes, programs)


class Alone:
    """A process alone keeps everything."""

    def next(self, ask: Ask[T]) -> Sequence[T] | None:
        return ask()

    def take(self, pack: Pack) -> list[Minibatch]:
        return pack()


class Leading:
    """Process 0, which packs for all and hands out."""

    def __init__(self, processes: Processes, programs: Programs):
        self._processes, self._programs = processes, programs

    def next(self, ask: Ask[T]) -> Sequence[T] | None:
        batch = ask()
        if batch is None:
            for other in range(1, self._processes.count):
                self._processes.send(other, b"")
        return batch

    def take(self, pack: Pack) -> list[Minibatch]:
        minibatches = pack()
        for other in range(1, self._processes.count):
            rows_of = functools.partial(self._programs.rows_of, other)
            self._processes.send(other, encode(minibatches, rows_of))
        return minibatches


class Following:
    """Any other process."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self._coming = 0

    def next(self, ask: Ask[T]) -> Sequence[T] | None:
        self._coming = self._processes.coming()
        return () if self._coming else None

    def take(self, pack: Pack) -> list[Minibatch]:
        return decode(self._processes.receive(self._coming))


def encode(minibatches: Sequence[Minibatch], rows_of: Callable[[int], np.ndarray]) -> bytes:
    """Minibatches with those rows of each microbatch that `rows_of` names, given how many there are."""
    columns: dict[str, np.ndarray] = {}
    for i, minibatch in enumerate(minibatches):
        columns[f"{i}/tokens of the loss"] = np.array([minibatch.loss_tokens, minibatch.gradless_tokens])
        columns[f"{i}/rows"] = np.array([batch.rows for batch in minibatch.batches], np.int64)
        for j, batch in enumerate(minibatch.batches):
            mine = rows_of(batch.rows)
            columns |= {f"{i}/{j}/{name}": getattr(batch, name)[mine] for name in ROW_ARRAYS}
    return to_npz(columns).tobytes()


def decode(data: bytes) -> list[Minibatch]:
    """Inverse of `encode`."""
    columns = from_npz(np.frombuffer(data, np.uint8))

    def minibatch(i: int) -> Minibatch:
        loss_tokens, gradless_tokens = map(int, columns[f"{i}/tokens of the loss"])
        batches = [
            TrainBatch(int(rows), **{name: columns[f"{i}/{j}/{name}"] for name in ROW_ARRAYS})
            for j, rows in enumerate(columns[f"{i}/rows"])
        ]
        return Minibatch(batches, loss_tokens, gradless_tokens)

    return [minibatch(i) for i in range(sum(name.endswith("/rows") for name in columns))]


class NoQueue:
    """The queue of a process that is not the first, which asks for no batch. To a checkpoint it adds nothing."""

    def __init__(self) -> None:
        self.waiting = 0
        self.dropped: dict[str, int] = {}

    def get(self, version: int, *, timeout_s: float, stop: threading.Event) -> list[Trajectory] | None:
        raise RuntimeError("process 0 has the queue")

    def announce(self, version: int, *, finished: bool) -> None:
        pass

    def snapshot(self, version: int) -> Mapping[str, np.ndarray]:
        return {}

    def restore(self, snapshot: Arrays) -> None:
        pass


class NoPublisher:
    """The publisher of a process that is not the first."""

    def publish(self, export: Callable[[], Mapping[str, Any]], version: int) -> None:
        export()  # all processes do, and process 0 sends it

    def close(self) -> None:
        pass


class OwnTimes:
    """The step log of process `index` that is not the first, trainer-INDEX.jsonl: what its own clock says of a step."""

    def __init__(self, run_dir: pathlib.Path, index: int, *, version: int):
        """Opens the file of a run that stands at `version`; lines of later steps, which were lost, are dropped."""
        self._lines = JsonlWriter(run_dir / f"trainer-{index}.jsonl")
        self._lines.truncate_after(version)

    def write(self, record: Mapping[str, Any]) -> None:
        self._lines.write({name: record[name] for name in ("version", "time", "step_s", *TIMES, "compilations")})

    def close(self) -> None:
        self._lines.close()
