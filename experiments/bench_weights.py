"""How fast a version of the weights reaches a generation server: against a memory copy and against a raw socket.

    python -m experiments.bench_weights --out=DIR [--model=smollm2|default|both] [--parts=...] [--seconds=60]

In: nothing; both models have random weights, in the shapes of SmolLM2-135M (538 MB) and of configs/math.py's model.
Out: a table, DIR/results.json (`vs_memcpy`, `vs_socket`, per model) and DIR/stages.png. float32. A trainer's publisher
in this process and a generation server in another one, on loopback: the code of a run (weights.py, transport/), with
nothing to generate. What is compared takes turns; figures are medians, of publishes that overwrite files of earlier
ones: the first few of a run make those, and are not counted. A part that ran before into the same DIR is kept. A model
takes about two minutes on two CPU cores.

    shared_memory  `vs_memcpy`: bytes per second from device arrays to the arrays that the server decodes with, through
                   the file in shared memory, over those of numpy's copy of the same arrays into memory that was there
                   before. `vs_new_arrays` is over a copy into new arrays, which a server needs for every version
    stream         `vs_socket`: bytes per second from the trainer's file to checked arrays of the server, through
                   `fetch_weights`, over those of a plain socket into new memory. The whole publish beside it

Stages: `copy` to the host, `write` (file and checksum) and `push` are what the publisher reports. Of the push, `read`
(map or fetch, and check) and `load` (onto the device) are timed by themselves in the server's process; `swap` is the
rest: two calls, and the boundary where weights change.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from absl import app, flags

from areal_jax import host_memory, weights
from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.scheduler import Scheduler
from areal_jax.models.huggingface import load_config
from areal_jax.models.transformer import TransformerConfig, param_shapes
from areal_jax.tokenizer import Tokenizer
from areal_jax.trainer.step import run_in_turn
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.transport import clients, servers
from experiments import runs
from experiments.bench_workload import DEFAULT_MODEL, SMOLLM2_135M, medians, take_turns

mpl.use("Agg")
import matplotlib.pyplot as plt

PARTS = ("shared_memory", "stream")
MODELS = ("smollm2", "default")
ROUNDS = 9
LOOPBACK = "127.0.0.1"
CACHE_LENGTH = 32  # of the server, which generates nothing
STAGES = ("copy", "write", "read", "load", "swap")
NOTHING_YET = weights.WeightFile("", 0, 0, 0)


def main(argv: Sequence[str]) -> None:
    del argv
    out, results = runs.begin(_OUT.value)
    for name in MODELS if _MODEL.value == "both" else (_MODEL.value,):
        model = SMOLLM2_135M if name == "smollm2" else load_config(DEFAULT_MODEL)
        with both_sides(model) as sides:
            for part in _PARTS.value:
                results.setdefault(name, {}).update(MEASURES[part](sides, _SECONDS.value))
                runs.write(out, results)
    plot(out / "stages.png", results)
    print(table(results))


# The server's process.


@dataclasses.dataclass(frozen=True)
class Order:
    """What the server's process shall time: a method of `Reader`, and its arguments."""

    what: str
    arguments: tuple[Any, ...]


def generator(connection: Connection, model: TransformerConfig) -> None:
    """A generation server; sends its address, then the seconds of each order, until there is none any more."""
    host_memory.keep_freed()
    engine = Engine(model, EngineOptions(slots=1, max_length=CACHE_LENGTH))
    scheduler = Scheduler(engine, engine.load(random_params(model, seed=1), 0))
    scheduler.start()
    server = servers.serve_generation(scheduler, address=f"{LOOPBACK}:0", tokenizer=Tokenizer.load(DEFAULT_MODEL))
    reader = Reader(engine)
    connection.send(server.address)
    while (order := connection.recv()) is not None:
        connection.send(getattr(reader, order.what)(*order.arguments))
    server.stop()
    scheduler.stop()


def random_params(model: TransformerConfig, *, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(leaf.shape, np.float32) for name, leaf in param_shapes(model).items()}


@dataclasses.dataclass
class Reader:
    """Parts of what a push makes a server do, by themselves; each gives seconds."""

    engine: Engine

    def read(self, path: str, checksum: int) -> float:
        return seconds_of(lambda: weights.read_weights(path, checksum))

    def load(self, path: str, checksum: int) -> float:
        version, params = weights.read_weights(path, checksum)
        return seconds_of(lambda: self.engine.load(params, version))

    def fetch(self, address: str, version: int, checksum: int) -> float:
        return seconds_of(lambda: clients.fetch_weights(address, version=version, checksum=checksum))

    def receive(self, port: int, size: int) -> float:
        """`size` bytes of a plain socket into new memory."""
        return seconds_of(lambda: receive(port, size))


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    result = call()
    seconds = time.monotonic() - began
    del result  # freeing it is no part of bringing it
    return seconds


def receive(port: int, size: int) -> np.ndarray:
    data = np.empty(size, np.uint8)
    view, end = data.data, 0
    with socket.create_connection((LOOPBACK, port)) as connected:
        while end < size:
            got = connected.recv_into(view[end:])
            assert got, f"the socket ended after {end} of {size} bytes"
            end += got
    return data


# Both sides.


@dataclasses.dataclass
class Sides:
    """A trainer's server, publisher and arrays here, and a generation server in a process of its own."""

    params: Mapping[str, jax.Array]
    directory: pathlib.Path
    trainer: servers.Server
    generator: str  # address
    connection: Connection
    version: int = 0
    file: weights.WeightFile = NOTHING_YET  # that was published last

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.params.values())

    @functools.cached_property
    def sources(self) -> dict[str, weights.Send]:
        """What sends a version, by transport."""
        return {
            name: weights.shared_memory_sender(self.directory, functools.partial(self._push, source))
            for name, source in (("shared_memory", ""), ("stream", self.trainer.address))
        }

    def _push(self, source: str, file: weights.WeightFile) -> None:
        self.file = file
        clients.push_weights([self.generator], file, source=source)

    def publish(self, transport: str) -> dict[str, float]:
        """Seconds by stage, "total" among them, of a publish up to its announcement."""
        publisher = weights.Publisher(self.sources[transport], lambda version: None)
        self.version += 1
        publisher.publish(lambda: self.params, self.version)
        publisher.close()
        return publisher.last

    def timed_there(self, what: str, *arguments: Any) -> float:
        """Seconds of one of the server's parts by itself."""
        self.connection.send(Order(what, arguments))
        return self.connection.recv()


@contextlib.contextmanager
def both_sides(model: TransformerConfig) -> Iterator[Sides]:
    """Both of them around random weights; the server's process ends with the block."""
    params = {name: jax.device_put(array) for name, array in random_params(model, seed=0).items()}
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=generator, args=(there, model), daemon=True)
    process.start()
    there.close()  # so that `here` ends when the process does
    queue = TrajectoryQueue(batch_size=1, group_size=1, max_staleness=0, overdue="mask")
    with contextlib.ExitStack() as stack:
        directory = weights.run_directory("", stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(weights.remove_directory, directory)
        trainer = servers.serve_trainer(queue, address=f"{LOOPBACK}:0", weights_directory=str(directory))
        stack.callback(trainer.stop)
        stack.callback(process.join)
        address = here.recv()
        stack.callback(here.send, None)
        yield Sides(params, directory, trainer, address, here)


# The parts: each gives entries of results.json.


def measure_shared_memory(sides: Sides, seconds: float) -> dict[str, Any]:
    copies = Copies([np.asarray(array) for array in sides.params.values()])
    found, stages = published(
        sides,
        "shared_memory",
        {
            "memcpy": copies.into_old_arrays,
            "new arrays": copies.into_new_arrays,
            "read": lambda: sides.timed_there("read", sides.file.path, sides.file.checksum),
            "load": lambda: sides.timed_there("load", sides.file.path, sides.file.checksum),
        },
        seconds,
    )
    return {
        "vs_memcpy": found["memcpy"] / stages["total"],
        "vs_new_arrays": found["new arrays"] / stages["total"],
        "shared_memory": described(sides, found, stages),
    }


def measure_stream(sides: Sides, seconds: float) -> dict[str, Any]:
    sides.publish("stream")  # a plain socket sends as many bytes as the file of a version has
    with sending(np.fromfile(sides.file.path, np.uint8)) as port:
        found, stages = published(
            sides,
            "stream",
            {
                "socket": lambda: sides.timed_there("receive", port, sides.file.size),
                "read": lambda: sides.timed_there(
                    "fetch", sides.trainer.address, sides.file.version, sides.file.checksum
                ),
                "load": lambda: sides.timed_there("load", sides.file.path, sides.file.checksum),
            },
            seconds,
        )
    return {
        "vs_socket": found["socket"] / found["read"],
        "publish_vs_socket": found["socket"] / stages["total"],
        "stream": described(sides, found, stages),
    }


def published(
    sides: Sides, transport: str, calls: dict[str, Callable[[], float]], seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of each call, and of the stages of a publish, all in turns."""
    for _ in range(2 * weights.KEPT):  # the first make new files, the next map them: both once in a run
        sides.publish(transport)
    reported: list[dict[str, float]] = []

    def publish() -> float:
        reported.append(sides.publish(transport))
        return reported[-1]["total"]

    found = medians(take_turns({"publish": publish, **calls}, seconds, rounds=ROUNDS))
    return found, medians({stage: [each[stage] for each in reported] for stage in reported[0]})


def described(sides: Sides, found: dict[str, float], stages: dict[str, float]) -> dict[str, Any]:
    """All seconds, and bytes per second of what moves all of them."""
    own = {"read": found["read"], "load": found["load"]}
    swap = max(0.0, stages["push"] - sum(own.values()))
    moving = {name: s for name, s in found.items() if name != "load"}
    return {
        "bytes": sides.nbytes,
        "publish_seconds": stages["total"],
        "stages": {"copy": stages["copy"], "write": stages["write"], **own, "swap": swap},
        "GB_per_s": {name: sides.nbytes / s / 1e9 for name, s in moving.items()},
    }


@dataclasses.dataclass
class Copies:
    """numpy's copies of these arrays; each gives seconds."""

    arrays: Sequence[np.ndarray]

    @functools.cached_property
    def _old(self) -> list[np.ndarray]:
        return [array.copy() for array in self.arrays]

    def into_old_arrays(self) -> float:
        pairs = list(zip(self._old, self.arrays, strict=True))

        def copy() -> None:
            for target, array in pairs:
                np.copyto(target, array)

        return seconds_of(copy)

    def into_new_arrays(self) -> float:
        return seconds_of(lambda: [array.copy() for array in self.arrays])


@contextlib.contextmanager
def sending(data: np.ndarray) -> Iterator[int]:
    """A plain socket that sends these bytes to whoever connects; yields its port."""
    with socket.create_server((LOOPBACK, 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the socket was closed: nobody asks any more
                while True:
                    connected, _ = listening.accept()
                    with connected:
                        connected.sendall(data.data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            thread.join()


MEASURES: dict[str, Callable[[Sides, float], dict[str, Any]]] = {
    "shared_memory": measure_shared_memory,
    "stream": measure_stream,
}


# What is shown.


def table(results: dict[str, Any]) -> str:
    """All that was measured, one line each."""
    return "\n".join(line for name, found in results.items() for line in [f"\n{name}", *rows(found)])


def rows(found: dict[str, Any]) -> list[str]:
    lines = []
    for part in [part for part in PARTS if part in found]:
        ratios = RATIOS[part]
        lines.append(f"  {part}: " + ", ".join(f"{name} {found[name]:.2f}" for name in ratios))
        rates = ", ".join(f"{name} {rate:.2f}" for name, rate in found[part]["GB_per_s"].items())
        lines.append(f"    {found[part]['bytes'] / 1e6:,.1f} MB, GB/s: {rates}")
        stages = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in found[part]["stages"].items())
        lines.append(f"    ms of {1e3 * found[part]['publish_seconds']:.1f}: {stages}")
    return lines


RATIOS = {"shared_memory": ("vs_memcpy", "vs_new_arrays"), "stream": ("vs_socket", "publish_vs_socket")}


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Shares of the stages of a publish."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    bars = [(f"{name}\n{part}", found[part]) for name, found in results.items() for part in PARTS if part in found]
    bottom = np.zeros(len(bars))
    for stage in STAGES:
        heights = np.array([of["stages"][stage] / of["publish_seconds"] for _, of in bars])
        axes.bar([name for name, _ in bars], heights, bottom=bottom, label=stage)
        bottom += heights
    axes.set(ylabel="share of a publish")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    host_memory.start_training(in_turn=True)  # as a trainer
    run_in_turn()
    _OUT = runs.OUT
    _MODEL = flags.DEFINE_enum("model", "both", (*MODELS, "both"), "Which model.")
    _PARTS = runs.define_parts(PARTS)
    _SECONDS = flags.DEFINE_float("seconds", 60.0, "Seconds of measuring per part and model, at least two turns.")
    app.run(main)
