"""A run as local processes: a trainer, generation servers, a rollout controller, joined by gRPC on loopback.

In: a checked config. Out: the run's directory, and the exit status. Called by `main`; waits for the children, shows how
far they are, and stops them in order: first who asks (controller), then who consumes (trainer, which writes a last
checkpoint), then who serves (generation). A child that dies takes the run down, and no process is left behind: children
end themselves when this process is gone. Supervised fine-tuning in several processes has trainers only.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from areal_jax import addresses, weights
from areal_jax import config as config_lib
from areal_jax.config import AUTO, Config
from areal_jax.launch import run_files
from areal_jax.launch.child import PARENT, token
from areal_jax.launch.display import Display

CONFIG_FILE = pathlib.Path(config_lib.__file__).resolve()
POLL_S = 0.5  # between two looks at the children and at the run's files
STOP_S = 30.0  # for a child to end after SIGTERM
TRAINER_STOP_S = 3600.0  # for the trainer, which ends its step first: minutes for a large model; then a last checkpoint
ORPHANS_S = 40.0  # for the children of a killed run to end, which they do by themselves


class RunFailed(Exception):
    """A child process ended that should not have."""


@dataclasses.dataclass(frozen=True)
class Child:
    """A part of the run in a process of its own.

    It prints into `log`, from the byte `log_begin` on: what is before that, an earlier start has printed. Without a log
    it prints where this process does.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: pathlib.Path | None
    log_begin: int = 0

    @property
    def trains(self) -> bool:
        return self.name.startswith("trainer")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL when that is ignored for too long."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(TRAINER_STOP_S if self.trains else STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def complaint(self) -> str:
        if self.log is None:
            return f"the {self.name} process {_ended(self.process.returncode)}; what it said is above"
        printed = self.log.read_bytes()[self.log_begin :]
        lines = printed.decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        text = errors[-1].removeprefix("error: ") if errors else "\n".join(lines[-15:])
        return f"the {self.name} process {_ended(self.process.returncode)}: {text}\n(its whole output: {self.log})"


def _ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed (SIGKILL), by hand or for want of memory; the same command goes on. The last it said"
    if status == 130:
        return "was asked to stop before its end; the same command goes on. The last it said"
    return f"ended with status {status}"


def run(config: Config, *, command: Sequence[str]) -> int:
    """Runs all parts to the end: 0 when training finished, 130 when it was interrupted. Raises RunFailed."""
    directory = config.run_dir
    with exclusive(directory), _without_orphans(directory) as held, _interruptible() as interrupted:
        config = with_ports(config)
        run_files.open_run(directory, command)
        (directory / "config.json").write_text(config_lib.to_json(config))
        words = [f"--config={CONFIG_FILE}:{directory / 'config.json'}"]
        children = [
            _start(name, [*words, *arguments], directory / "logs" / f"{name}.log", held)
            for name, arguments in _parts(config)
        ]
        try:
            with Display(directory) as display:
                _wait(children, interrupted, display.update)
            if interrupted():
                print(
                    "stopping: the trainer ends its step and writes a checkpoint; Ctrl-C again stops at once, and goes "
                    "back to the checkpoint before",
                    flush=True,
                )
        finally:
            for child in children:
                child.stop()
            weights.remove_directory(weights.run_directory(config.weights.directory, config.run_dir))  # after a kill
    return 130 if interrupted() else 0


def _parts(config: Config) -> list[tuple[str, list[str]]]:
    """Name and arguments of each part, in the order in which they are stopped."""
    generators = [
        (f"generator-{i}", ["--role=generator", f"--index={i}"]) for i in range(len(config.generation.addresses))
    ]
    return [("rollout", ["--role=rollout"]), *_trainers(config), *generators]


def _trainers(config: Config) -> list[tuple[str, list[str]]]:
    """The same of the trainer's processes, of which the first is just "trainer": so main's log and display know it."""
    others = range(1, config.trainer.distributed.processes)
    return [("trainer", ["--role=trainer"]), *((f"trainer-{i}", ["--role=trainer", f"--process={i}"]) for i in others)]


def run_trainers(config: Config, arguments: Sequence[str]) -> int:
    """The trainers of supervised fine-tuning, by the arguments of its command: 0 at its end, 130 when interrupted.

    Process 0 has this terminal, and the run's directory; the others print into logs there. Raises RunFailed.
    """
    meeting = f"--config.trainer.distributed.coordinator={with_ports(config).trainer.distributed.coordinator}"
    logs = config.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with _interruptible() as interrupted:
        children = [
            _start(name, [*arguments, meeting, *words], logs / f"{name}.log" if i else None)
            for i, (name, words) in enumerate(_trainers(config))
        ]
        try:
            _wait(children, interrupted, lambda: None)
        finally:
            for child in children:
                child.stop()
    return children[0].process.returncode


def _start(name: str, arguments: Sequence[str], log: pathlib.Path | None, *held: int) -> Child:
    path = os.pathsep.join(filter(None, [str(CONFIG_FILE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("ab") if log else contextlib.nullcontext() as output:
        log_begin = output.tell() if output else 0
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_jax.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env=environment,
            pass_fds=held,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in order
        )
    return Child(name, process, log, log_begin)


def _wait(children: Sequence[Child], interrupted: Callable[[], bool], update: Callable[[], None]) -> None:
    """Returns when controller and trainers are done, or on an interrupt. Raises RunFailed when a child dies."""
    finite = [child for child in children if child.name == "rollout" or child.trains]
    while not interrupted() and any(child.process.poll() is None for child in finite):
        for child in children:
            status = child.process.poll()
            if status is not None and (status != 0 or child not in finite):
                time.sleep(POLL_S)  # others may have died of the same cause, and know it better
                raise RunFailed(child.complaint())
        update()
        time.sleep(POLL_S)
    failed = [child for child in finite if child.process.poll() not in (None, 0)]
    if failed and not interrupted():
        raise RunFailed(failed[0].complaint())


@contextlib.contextmanager
def exclusive(
    directory: pathlib.Path, *, setting: str = "run.dir", remedy: str = "--config.run.dir or --config.run.name"
) -> Iterator[None]:
    """Holds a run's directory, which `setting` names. Raises ValueError when another run does."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        if not _locked(lock):
            raise ValueError(
                f"{setting}={directory} belongs to a run that is going on; wait for it, or give this one another "
                f"{remedy}"
            )
        yield


@contextlib.contextmanager
def _without_orphans(directory: pathlib.Path) -> Iterator[int]:
    """Waits until the children of a run that was killed have ended: until then, its trainer may write a checkpoint.

    Yields the descriptor of a lock that is held as long as any child that inherits it lives. Raises ValueError when one
    does not end.
    """
    with (directory / ".children.lock").open("w") as lock:
        deadline = time.monotonic() + ORPHANS_S
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise ValueError(
                    f"a process of an earlier run in run.dir={directory} is still there after {ORPHANS_S:g} s; "
                    "end it (its command line names that directory), or choose another --config.run.dir"
                )
            time.sleep(POLL_S)
        yield lock.fileno()


def _locked(file: IO[str]) -> bool:
    """Takes the lock on a file; False when another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within it SIGINT and SIGTERM only note that the run is to end; says whether one came."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        for handled in previous:  # a second Ctrl-C ends at once
            signal.signal(handled, previous[handled])

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def with_ports(config: Config) -> Config:
    """The config with a free port for each address that leaves it open. Raises OSError for a port in use."""
    distributed = config.trainer.distributed
    if distributed.processes > 1 and distributed.coordinator == AUTO:
        raise ValueError(
            "config.trainer.distributed.coordinator=auto is for processes that a cluster starts, each with "
            "--role=trainer; 127.0.0.1:0 starts all of them here"
        )
    for address in (config.trainer.address, *config.generation.addresses, *config.generation.http_addresses):
        addresses.check_guarded(address, token())  # before any process is started
    met = [distributed.coordinator] if distributed.processes > 1 else []
    trainer, *others = addresses.with_free_ports([config.trainer.address, *met, *config.generation.addresses])
    generation = others[len(met) :]
    if met:
        distributed = dataclasses.replace(distributed, coordinator=others[0])
    return dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, address=trainer, distributed=distributed),
        generation=dataclasses.replace(config.generation, addresses=tuple(generation)),
    )
