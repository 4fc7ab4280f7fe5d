"""Several processes that train as one: each a real process with devices of its own (trainer_process.py)."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
from jax._src.distributed import global_state

from areal_jax.distributed import Processes, joined
from areal_jax.metrics import METRICS
from areal_jax.trainer import shared
from areal_jax.types import TRAJECTORY_FIELDS

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = 4
MACHINE = {"time", "step_s", "compilations"}  # what a line says of the machine and not of the training


class End(NamedTuple):
    """How a process ended."""

    status: int
    error: str
    seconds: float


def run(directory, count, event="none"):
    """All processes of a trainer, to their end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        # Compiled as fast as can be: only process 0 finds its programs in the cache on disk.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count} --xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
    }
    script = str(pathlib.Path(__file__).with_name("trainer_process.py"))
    began = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, script, str(directory), coordinator, str(count), str(index), event],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    errors = {}

    def read(process):
        errors[process.pid] = process.communicate(timeout=240)[1], time.monotonic() - began

    readers = [threading.Thread(target=read, args=(process,)) for process in running]
    for reader in readers:
        reader.start()
    try:
        for reader in readers:
            reader.join()
    finally:
        for process in running:
            process.kill()
    return [End(process.returncode, *errors[process.pid]) for process in running]


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def saved(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


def check_same_training(directory, expected, versions):
    """Every number of every line, to 1e-5 of it and in the first step 1e-6, and every parameter in the end."""
    assert [line["version"] for line in lines(directory)] == versions
    for line, other in zip(lines(directory), lines(expected), strict=False):
        compared = {name for name in METRICS if name in other and name not in MACHINE and not name.endswith("_s")}
        assert compared >= {"loss", "grad_norm", "entropy", "ratio/clipped", "logp_gap/max", "prompts"}
        rel = 1e-6 if line["version"] == 1 else 1e-5
        for name in compared:
            assert line[name] == pytest.approx(other[name], rel=rel, abs=1e-6), (line["version"], name)
    last = f"{versions[-1]}.npz"
    with np.load(directory / last) as params, np.load(expected / last) as others:
        assert set(params) == set(others)
        for name in others:
            np.testing.assert_allclose(params[name], others[name], atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of a run in one process."""
    directory = tmp_path_factory.mktemp("alone")
    (end,) = run(directory, 1)
    assert end.status == 0, end.error
    return directory


@pytest.fixture(scope="module")
def struck(tmp_path_factory):
    """A run in two processes, one of which is killed and, when they are started again, asked to stop.

    Its directory, how they ended each time, and the checkpoints left after the first time.
    """
    directory = tmp_path_factory.mktemp("struck")
    killed = run(directory, 2, "kill:2")
    left = saved(directory)
    return directory, killed, left, run(directory, 2, "stop:4")


def test_two_processes_train_as_one_does(alone, struck):
    directory, _, _, ends = struck
    assert [end.status for end in ends] == [0, 0], [end.error for end in ends]
    check_same_training(directory, alone, [1, 2, 3, 4])


def test_nothing_compiles_after_the_first_step_has_begun(alone, struck):
    of_the_second_start = lines(struck[0])[1:]
    for steps in (lines(alone), of_the_second_start):
        assert len({line["compilations"] for line in steps}) == 1


def test_a_process_that_is_killed_takes_the_others_with_it(struck):
    _, (first, killed), left, _ = struck
    assert (first.status, killed.status) == (1, -9)
    assert "process 0 of the trainer fails" in first.error and "another process ended first" in first.error
    assert first.seconds - killed.seconds < 40.0  # not by heartbeats that stay away, for 60 s
    assert left == [1]


def test_a_process_that_is_asked_to_stop_ends_all_of_them_in_order(struck):
    directory, _, _, ends = struck
    assert [end.status for end in ends] == [0, 0], [end.error for end in ends]
    assert max(saved(directory)) == 4


def test_a_barrier_names_those_who_do_not_come_and_they_hear_why_all_ends(tmp_path):
    first, late = run(tmp_path, 2, "late")
    assert (first.status, late.status) == (1, 1)
    waited = "TimeoutError: trainer process 0 waited 1 s at the barrier 'every program is compiled' for processes [1]"
    assert waited in first.error
    assert f"error: process 0 of the trainer failed: {waited} of 2" in late.error


def test_a_process_that_meets_nobody_says_so_and_ends(unused_port):
    code = (
        "import threading; from areal_jax.distributed import joined\n"
        f"with joined('127.0.0.1:{unused_port}', index=1, count=3, timeout_s=1.0, stop=threading.Event()): pass"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == 1
    assert (
        f"error: trainer process 1 did not meet all 3 processes at 127.0.0.1:{unused_port} within 1 s" in ended.stderr
    )


@pytest.mark.slow
def test_four_processes_train_as_one_does(tmp_path, alone):
    ends = run(tmp_path, 4)
    assert [end.status for end in ends] == [0, 0, 0, 0], [end.error for end in ends]
    check_same_training(tmp_path, alone, [1, 2, 3, 4, 5])


@pytest.mark.slow
def test_two_processes_train_adapters_as_one_does_and_publish_them_merged(tmp_path, alone):
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        ends = run(tmp_path / str(count), count, "adapters")
        assert [end.status for end in ends] == [0] * count, [end.error for end in ends]
    check_same_training(tmp_path / "2", tmp_path / "1", [1, 2, 3, 4, 5])
    with np.load(tmp_path / "2" / "5.npz") as adapted, np.load(alone / "0.npz") as base:
        moved = {name for name in base if not np.array_equal(adapted[name], base[name])}
        assert set(adapted) == set(base)
    assert moved == {name for name in base if name.startswith("layers.") and "kernel" in name}


def test_a_process_alone_joins_nobody_and_hands_everything_through():
    queue = object()
    with joined("", index=0, count=1, timeout_s=1.0, stop=threading.Event()) as processes:
        processes.barrier("nobody else comes here")
        processes.agree("the config", "steps: 3")
        assert processes.from_first(b"batch") == b"batch"
        assert shared.leading_queue(queue, processes) is queue
    assert global_state.client is None


class Wire(Processes):
    """Two processes of which either is this one: what process 0 sends, the other one gets."""

    def __init__(self):
        super().__init__(0, 2)
        self.data = b""

    def from_first(self, data):
        self.data = data or self.data
        return self.data


@pytest.mark.parametrize("batches", [1, 0])
def test_a_follower_gets_the_batch_that_process_0_trains_on_bit_by_bit(batches, make_trajectories):
    class Queue:
        def get(self, version, *, timeout_s, stop):
            return [dataclasses.replace(t, reward=0.1) for t in make_trajectories(3)] if batches else None

    wire, options = Wire(), {"timeout_s": 1.0, "stop": threading.Event()}
    leading = shared.leading_queue(Queue(), wire).get(0, **options)
    following = shared.FollowingQueue(wire).get(0, **options)
    if not batches:
        assert leading is following is None and wire.data == b""
        return
    assert [t.reward for t in leading] == [t.reward for t in following] == [float(np.float32(0.1))] * 3
    for ours, theirs in zip(leading, following, strict=True):
        assert (ours.uid, ours.sample, ours.truncated) == (theirs.uid, theirs.sample, theirs.truncated)
        for name in TRAJECTORY_FIELDS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_processes_with_different_configs_are_told_the_lines_that_differ(monkeypatch):
    processes = Processes()
    processes.index = 1
    monkeypatch.setattr(processes, "from_first", lambda data: b'{\n  "lr": 0.1,\n  "steps": 3\n}')
    with pytest.raises(ValueError, match=r'the config of trainer process 1 is not .*: "steps": 3 there and "steps": 4'):
        processes.agree("the config", '{\n  "lr": 0.1,\n  "steps": 4\n}')


@pytest.mark.parametrize(
    ("coordinator", "index", "told"),
    [("127.0.0.1:5", 2, "--process=2 must be 0 to 1"), ("127.0.0.1:0", 1, "must be host:port of process 0")],
)
def test_a_process_that_cannot_be_one_of_them_is_refused(coordinator, index, told):
    with (
        pytest.raises(ValueError, match=told),
        joined(coordinator, index=index, count=2, timeout_s=1.0, stop=threading.Event()),
    ):
        pass
