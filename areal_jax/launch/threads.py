"""A run in one process: the same parts as threads on one JAX client, without gRPC; weights go by reference.

In: a checked config. Out: the run's directory. Called by `main` with `run.launch=threads`, by notebooks and by tests.

    engine thread       the scheduler's own
    controller thread   an event loop with the rollout controller; rewards stay in processes of their own
    reporting thread    generation-0.jsonl
    trainer thread      the training loop
    caller's thread     the display
"""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal_jax import compilation
from areal_jax import config as config_lib
from areal_jax.config import Config
from areal_jax.distributed import Processes
from areal_jax.generation.scheduler import Scheduler
from areal_jax.launch import generation_server, processes, roles, run_files
from areal_jax.launch.display import Display
from areal_jax.launch.model_config import model_config
from areal_jax.rollout.local_queue import LocalQueue
from areal_jax.trainer import loop
from areal_jax.transport.generation_service import completions
from areal_jax.types import Completion, GenerateRequest

POLL_S = 0.5  # between two looks at the parts and at the run's files


def run(config: Config, *, command: Sequence[str]) -> int:
    """Runs all parts to the end: 0 when training finished, 130 when it was interrupted. Raises what ended a part."""
    if len(config.generation.addresses) != 1:
        raise ValueError(
            "run.launch=threads has one generation engine, and generation.addresses names "
            f"{len(config.generation.addresses)}; use run.launch=processes, or one address"
        )
    compilation.enable_cache()
    directory = config.run_dir
    with processes.exclusive(directory), stop_on_signals(threading.Event()) as stop:
        run_files.open_run(directory, command)
        (directory / "config.json").write_text(config_lib.to_json(config))
        with _logging_into(directory / "logs" / "threads.log"), Display(directory) as display:
            _run_parts(config, stop, display)
        return 130 if stop.is_set() else 0


def _run_parts(config: Config, stop: threading.Event, display: Display) -> None:
    ending = threading.Event()  # of all parts: asked to, or one has failed
    loop.build(config, model_config(config))  # what does not fit is told before all compiles
    with generation_server.http_server(config, 0) as open_http:
        scheduler = generation_server.make_scheduler(config)
        open_http(scheduler)
        _run_around(scheduler, config, stop, ending, display)


def _run_around(
    scheduler: Scheduler, config: Config, stop: threading.Event, ending: threading.Event, display: Display
) -> None:
    queue = roles.make_queue(config)

    def send(params: Mapping[str, Any], version: int) -> dict[str, float]:
        return {"stall": scheduler.update_weights(params, version).result()}

    def control() -> None:
        while not queue.wait_opened(POLL_S):  # by the trainer, which first goes back to its checkpoint and compiles
            if ending.is_set():
                return
        asyncio.run(roles.control(config, LocalGenerate(scheduler), LocalQueue(queue), ending))

    def train() -> None:
        roles.train(config, queue, send, ending, Processes())

    parts = (control, train, lambda: generation_server.report_generation(scheduler, config.run_dir, 0, ending))
    with ThreadPoolExecutor(len(parts)) as threads:
        running = [threads.submit(part) for part in parts]
        try:
            while not stop.is_set() and not _ended(running):
                display.update()
                stop.wait(POLL_S)
        finally:
            ending.set()
            errors = [error for part in running if (error := part.exception()) is not None]
            scheduler.stop()
    if errors:
        raise errors[0]


def _ended(running: Sequence[Any]) -> bool:
    """Whether controller and trainer are done, or any part has failed."""
    return all(part.done() for part in running[:2]) or any(part.done() and part.exception() for part in running)


@contextlib.contextmanager
def _logging_into(path: pathlib.Path) -> Iterator[None]:
    """What the parts say goes where it goes in a run of processes; only warnings reach the display's terminal, too."""
    root = logging.getLogger()
    shown = [(handler, handler.level) for handler in root.handlers]
    file = logging.FileHandler(path)
    for handler, level in shown:
        file.setFormatter(handler.formatter)
        handler.setLevel(max(level, logging.WARNING))
    root.addHandler(file)
    try:
        yield
    finally:
        root.removeHandler(file)
        file.close()
        for handler, level in shown:
            handler.setLevel(level)


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[threading.Event]:
    """Within it SIGTERM and SIGINT set the event."""
    if threading.current_thread() is not threading.main_thread():  # a notebook's or a test's: no signals here
        yield stop
        return
    previous = {n: signal.signal(n, lambda *_: stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class LocalGenerate:
    """A `GenerateFn` on a scheduler of this process."""

    scheduler: Scheduler

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        return await completions(self.scheduler, request)
