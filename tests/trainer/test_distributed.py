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

import jax
import numpy as np
import optax
import pytest
from jax._src.distributed import global_state

from areal_jax import distributed
from areal_jax.distributed import Processes, joined
from areal_jax.metrics import METRICS
from areal_jax.trainer import shared
from areal_jax.trainer.journal import TIMES
from areal_jax.trainer.step import Minibatch
from areal_jax.types import ROW_ARRAYS

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = 4
LONGEST = 16  # of trainer_process.py
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


def lines(directory, name="metrics"):
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def saved(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


def check_same_training(directory, expected, versions):
    """Every number of every line, to 1e-5 of it and in the first step 1e-6, and every parameter in the end.

    The gradient of the first update to 1e-6, as a whole, and none of a parameter far from it.
    """
    with np.load(directory / "gradient.npz") as gradient, np.load(expected / "gradient.npz") as others:
        assert set(gradient) == set(others)
        off = {name: gradient[name] - value for name, value in others.items()}
        assert optax.tree.norm(off) < 1e-6 * optax.tree.norm(dict(others))
        assert all(np.abs(off[name]).max() <= 5e-6 * np.abs(value).max() for name, value in others.items())
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
    # Tokens without gradient and tokens too old count for all processes as they do for one.
    assert all(line["tokens/gradless"] > 0 for line in lines(alone)) and lines(alone)[-1]["tokens/masked"] > 0


def test_nothing_compiles_after_the_first_step_has_begun(alone, struck):
    of_the_second_start = lines(struck[0])[1:]
    follower = lines(struck[0], "trainer-1")[1:]
    for steps in (lines(alone), of_the_second_start, follower):
        assert len({line["compilations"] for line in steps}) == 1


def check_own_rows(directory, count, share):
    """Each process but the first had of each microbatch `share` of the rows, and so much of the bytes, too."""
    for index in range(1, count):
        batches = lines(directory, f"received-{index}")
        assert batches
        for batch in batches:
            assert batch["came"] == [[rows * share] * len(ROW_ARRAYS) for rows in batch["rows"]]
            whole = 4 * LONGEST * len(ROW_ARRAYS) * sum(batch["rows"])  # bytes, if all rows were as long as can be
            assert batch["bytes"] < share * whole + 300 * (4 + len(ROW_ARRAYS) * len(batch["rows"]))  # names, shapes


def test_a_process_gets_the_rows_of_its_own_devices_and_no_others(struck):
    check_own_rows(struck[0], 2, 1 / 2)


def test_each_process_leaves_a_line_of_its_own_times_for_each_step(struck):
    steps, own = lines(struck[0]), lines(struck[0], "trainer-1")
    assert [line["version"] for line in own] == [line["version"] for line in steps] == [1, 2, 3, 4]
    for line, first in zip(own, steps, strict=True):
        assert set(line) == {"version", "time", "step_s", *TIMES, "compilations"}
        assert 0 < line["idle_s"] and 0 < line["update_s"] and sum(line[name] for name in TIMES) <= line["step_s"]
        assert abs(line["time"] - first["time"]) < 5.0


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


def test_a_minibatch_without_a_finite_gradient_is_saved_before_all_processes_end(tmp_path):
    first, other = run(tmp_path, 2, "nan")
    assert (first.status, other.status) == (1, 1)
    assert "FloatingPointError: the gradient was not finite in 2 updates in a row" in first.error
    assert "error: process 0 of the trainer failed: FloatingPointError: the gradient was not finite" in other.error
    assert [path.name for path in (tmp_path / "skipped").iterdir()] == ["0.npz"]
    with np.load(tmp_path / "skipped" / "0.npz") as kept:
        assert np.isnan(kept["0/behav_logprobs"]).any() and np.isfinite(kept["0/logprobs"]).all()
    assert [line["updates/skipped"] for line in lines(tmp_path)] == [2]


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


def start_that_disagrees(index, port):
    """A process that wants other than process `1 - index` does; when that is told, process 0 waits for the next."""
    code = (
        "import threading; from areal_jax.distributed import joined\n"
        f"with joined('127.0.0.1:{port}', index={index}, count=2, timeout_s=60.0, stop=threading.Event()) as processes:"
        f"\n    processes.agree('the config', 'lr: {index}')\n    processes.of_first('and on')"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_of_processes_that_differ_every_one_says_in_what(unused_port):
    both = [start_that_disagrees(index, unused_port) for index in (0, 1)]
    first, other = (process.communicate(timeout=60)[1] for process in both)
    assert [process.returncode for process in both] == [1, 1]
    reason = "ValueError: the config of trainer process 1 is not that of process 0: lr: 0 there and lr: 1 here"
    assert reason in other
    assert first.splitlines()[-1].startswith(f"error: process 1 of the trainer failed: {reason}")


def start_under_slurm(place, port):
    """A process that Slurm would have started as number `place`; it joins the others, and says who it is."""
    code = (
        "import threading; from areal_jax.distributed import joined\n"
        "with joined('auto', index=None, count=2, timeout_s=60.0, stop=threading.Event()) as processes:\n"
        "    print(processes.index, processes.of_first(f'from {processes.index}'))"
    )
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "127.0.0.1", "NTASKS": "2", "PROCID": str(place), "LOCALID": str(place)}
    environment = {**os.environ, "JAX_COORDINATOR_PORT": str(port)}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_processes_that_a_cluster_started_know_from_it_who_they_are(unused_port):
    both = [start_under_slurm(place, unused_port) for place in (0, 1)]
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert [out.splitlines()[-1] for out, _ in ends] == ["0 from 0", "1 from 0"]


@pytest.mark.parametrize(
    ("started", "index", "told"),
    [
        (None, None, "coordinator=auto is for processes that Slurm, .* give host:port of process 0, and --process"),
        ("4", None, "processes=2, and the cluster says that this is process 1 of 4"),
        ("2", 0, "processes=2 and --process=0, and the cluster says that this is process 1 of 2"),
    ],
)
def test_a_cluster_that_says_otherwise_is_an_error(monkeypatch, started, index, told):
    if started:
        known = {"JOB_ID": "7", "STEP_NODELIST": "host", "NTASKS": started, "PROCID": "1", "LOCALID": "0"}
        for name, value in known.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
    with (
        pytest.raises(ValueError, match=told),
        joined("auto", index=index, count=2, timeout_s=1.0, stop=threading.Event()),
    ):
        pass


def test_a_number_that_is_not_that_of_the_accelerators_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    distributed._check_devices(1)
    with pytest.raises(ValueError, match="--process=0, and the accelerators of this host belong to process 1; give"):
        distributed._check_devices(0)


@pytest.mark.slow
def test_four_processes_train_as_one_does(tmp_path, alone):
    ends = run(tmp_path, 4)
    assert [end.status for end in ends] == [0, 0, 0, 0], [end.error for end in ends]
    check_same_training(tmp_path, alone, [1, 2, 3, 4, 5])
    check_own_rows(tmp_path, 4, 1 / 2)  # two processes split the heads and have the same rows
    for index in (1, 2, 3):
        assert len({line["compilations"] for line in lines(tmp_path, f"trainer-{index}")}) == 1


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


def test_the_times_of_steps_that_were_lost_are_dropped(tmp_path):
    record = {"time": 5.0, "step_s": 1.0, **dict.fromkeys(TIMES, 0.1), "compilations": 3, "loss": 2.0, "dropped": {}}
    for versions, at in (((1, 2, 3), 0), ((2,), 1)):
        log = shared.OwnTimes(tmp_path, 7, version=at)
        for version in versions:
            log.write({"version": version, **record})
        log.close()
    assert [line["version"] for line in lines(tmp_path, "trainer-7")] == [1, 2]
    assert not {"loss", "dropped"} & set(lines(tmp_path, "trainer-7")[0])


def test_a_process_alone_joins_nobody_and_keeps_what_it_has():
    minibatches, programs = [Minibatch.of([])], None
    with joined("", index=0, count=1, timeout_s=1.0, stop=threading.Event()) as processes:
        processes.barrier("nobody else comes here")
        processes.agree("the config", "steps: 3")
        mine = shared.shares(processes, programs)
        assert mine.next(lambda: minibatches) is minibatches and mine.next(lambda: None) is None
        assert mine.take(lambda: minibatches) is minibatches
    assert global_state.client is None


def test_a_process_that_is_not_the_first_trains_on_what_it_is_sent_whatever_it_was_asked():
    """A stop that only it has heard of must not make it leave while the others wait for it."""
    processes = Processes(index=1, count=2)
    sizes = iter([5, 0])
    processes.coming = lambda: next(sizes)
    following = shared.shares(processes, None)
    ask = lambda: pytest.fail("process 0 asks for all")  # noqa: E731
    assert following.next(ask) == () and following.next(ask) is None


def test_rows_are_handed_on_bit_by_bit_with_the_numbers_of_the_whole(make_trajectories, make_minibatch):
    whole = make_minibatch(make_trajectories(18), 32, 4 * 32)
    assert len(whole.batches) == 2 and whole.batches[0].rows == 4
    other = dataclasses.replace(whole, batches=whole.batches[:1], gradless_tokens=7)
    nothing = Minibatch.of([], gradless_tokens=3)
    mine = np.array([0, 3])
    got = shared.decode(shared.encode([whole, nothing, other], lambda rows: mine))
    for part, sent in zip(got, [whole, nothing, other], strict=True):
        assert (part.loss_tokens, part.gradless_tokens) == (sent.loss_tokens, sent.gradless_tokens)
        for batch, given in zip(part.batches, sent.batches, strict=True):
            assert batch.rows == 4
            for name in ROW_ARRAYS:
                np.testing.assert_array_equal(getattr(batch, name), getattr(given, name)[mine])
                assert getattr(batch, name).dtype == getattr(given, name).dtype


def test_processes_with_different_configs_are_told_the_lines_that_differ(monkeypatch):
    processes = Processes()
    processes.index = 1
    monkeypatch.setattr(processes, "coming", lambda: 1)
    monkeypatch.setattr(processes, "receive", lambda size: b'{\n  "lr": 0.1,\n  "steps": 3\n}')
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
