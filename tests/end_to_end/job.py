"""A small real job for the tests: its command, what it leaves behind, and what is still running of it.

In: overrides of configs/math.py. Out: processes, and their run's files. Called by the tests of this folder.
"""

import contextlib
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from areal_jax import weights
from areal_jax.types import Trajectory, trajectories_from_arrays

ROOT = pathlib.Path(__file__).parents[2]
PROMPTS, GROUP = 8, 4
BATCH = PROMPTS * GROUP
ETA = 2
# Four slots for a batch of 32: the generator is the slower part, and every swap meets trajectories that are half done.
SETTINGS = {
    "trainer.steps": 14,
    "trainer.prompts_per_step": PROMPTS,
    "trainer.checkpoint.every": 3,
    "trainer.checkpoint.keep": 100,
    "rollout.group_size": GROUP,
    "rollout.max_staleness": ETA,
    "generation.slots": 4,
    "generation.decode_steps": 1,
    "generation.length_buckets": "(112,)",
    "eval.prompts": 8,
    "eval.every": 4,
    "metrics.tensorboard": False,
}
ENVIRONMENT = {**os.environ, "XLA_FLAGS": ""}  # one device, as on the user's machine
Line = dict[str, Any]


def command(run_dir: pathlib.Path, settings: Mapping[str, Any] = {}, *flags: str) -> list[str]:
    values = {"run.dir": run_dir, **SETTINGS, **settings}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return [sys.executable, "-m", "areal_jax.main", "--config=configs/math.py", *overrides, *flags]


def start(run_dir: pathlib.Path, settings: Mapping[str, Any] = {}, *flags: str) -> subprocess.Popen[str]:
    """The real command, from the root of the repository, in a process group of its own."""
    return start_command(command(run_dir, settings, *flags)[3:])


def start_command(arguments: list[str], module: str = "areal_jax.main") -> subprocess.Popen[str]:
    """The same with other arguments than those of a small job."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; a process that does not end fails the test, and is killed."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def run(run_dir: pathlib.Path, settings: Mapping[str, Any] = {}, timeout_s: float = 120.0) -> tuple[int, str, str]:
    return end(start(run_dir, settings), timeout_s)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


# What runs.


def processes(run_dir: pathlib.Path, role: str = "") -> list[int]:
    """Ids of living processes whose command line names the run's directory, and of all that descend from them."""
    table = dict(_processes())
    named = {
        pid for pid, (_, words) in table.items() if str(run_dir) in words and f"--role={role}" in words + "--role="
    }
    grown = True
    while grown and not role:
        children = {pid for pid, (parent, _) in table.items() if parent in named} - named
        named |= children
        grown = bool(children)
    return sorted(named - {os.getpid()})


def _processes() -> Iterator[tuple[int, tuple[int, str]]]:
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if state != "Z":
            yield int(directory.name), (int(parent), words)


def alive(pids: Collection[int]) -> list[int]:
    return [pid for pid, _ in _processes() if pid in pids]


def environment(pid: int) -> bytes:
    """What a process was started with."""
    return pathlib.Path(f"/proc/{pid}/environ").read_bytes()


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def weight_files(run_dir: pathlib.Path) -> pathlib.Path:
    return weights.run_directory("", run_dir)


def assert_nothing_left(run_dir: pathlib.Path, known: Collection[int] = ()) -> None:
    """No process and no shared memory; `known` are ids seen while it ran, whose command lines may say nothing."""
    assert processes(run_dir) == []
    assert alive(known) == []
    assert not weight_files(run_dir).exists()


# What it left.


def lines(run_dir: pathlib.Path, name: str) -> list[Line]:
    """The whole lines of NAME.jsonl so far."""
    path = run_dir / f"{name}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def version(run_dir: pathlib.Path) -> int:
    return max((line["version"] for line in lines(run_dir, "metrics")), default=0)


def checkpoints(run_dir: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("[0-9]*") if path.name.isdigit())


def saved_queue(run_dir: pathlib.Path, version: int) -> dict[str, np.ndarray]:
    """The trajectory queue's arrays in the checkpoint of a version."""
    path = run_dir / "checkpoints" / str(version) / "queue"
    restored = ocp.StandardCheckpointer().restore(path.absolute())
    with np.load(io.BytesIO(np.asarray(restored["npz"]).tobytes())) as arrays:
        return dict(arrays)


def waiting(queue: Mapping[str, np.ndarray]) -> list[Trajectory]:
    return trajectories_from_arrays(queue) if "uid" in queue else []


def finished_prompts(queue: Mapping[str, np.ndarray]) -> set[int]:
    """Every prompt that ever came to the queue, waiting ones too."""
    _, low, _, _ = queue["counters"]
    return set(range(low)) | {int(uid) for uid in queue.get("done", ())}


def read_summary(run_dir: pathlib.Path) -> Line:
    return json.loads((run_dir / "summary.json").read_text())


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def check_exactly_once(run_dir: pathlib.Path, steps: int) -> None:
    """Every prompt that came was trained on in one step or waits in the last checkpoint, and none vanished."""
    trained = [uid for line in lines(run_dir, "metrics") for uid in line["prompts"]]
    assert len(trained) == len(set(trained)) == steps * PROMPTS
    queue = saved_queue(run_dir, steps)
    kept = {trajectory.uid for trajectory in waiting(queue)}
    assert not kept & set(trained)
    assert kept | set(trained) == finished_prompts(queue), "none vanished"
    assert len(finished_prompts(queue)) * GROUP <= (steps + 1 + ETA) * BATCH, "the gate's bound"
