"""What a part of a run that ended badly is reported to have said, and which parts there are."""

import subprocess
import sys

import pytest

from areal_jax.config import build
from areal_jax.launch import processes
from areal_jax.launch.processes import Child


def test_the_error_of_an_earlier_start_is_not_told_again(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text("error: the first mistake, é\n")
    begin = log.stat().st_size
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    child = Child("trainer", process, log, begin)
    with log.open("a") as file:
        file.write("killed\n")
    assert child.complaint().startswith("the trainer process ended with status 3: killed\n")
    with log.open("a") as file:
        file.write("error: the second mistake\nbye\n")
    assert "status 3: the second mistake\n" in child.complaint()


def test_every_process_of_the_trainer_is_started_and_meets_the_others_at_one_free_port():
    settings = {"processes": 3, "coordinator": "127.0.0.1:0"}
    config = processes.with_ports(build({"trainer": {"distributed": settings}}))
    port = config.trainer.distributed.coordinator.removeprefix("127.0.0.1:")
    used = {port, config.trainer.address.rpartition(":")[2], config.generation.addresses[0].rpartition(":")[2]}
    assert len(used) == 3 and "0" not in used
    parts = dict(processes._parts(config))
    assert list(parts) == ["rollout", "trainer", "trainer-1", "trainer-2", "generator-0"]
    assert parts["trainer"] == ["--role=trainer"] and parts["trainer-2"] == ["--role=trainer", "--process=2"]


def test_processes_that_a_cluster_starts_are_not_started_here():
    config = build({"trainer": {"distributed": {"processes": 3, "coordinator": "auto"}}})
    with pytest.raises(ValueError, match=r"coordinator=auto .* each with --role=trainer; 127.0.0.1:0 starts all"):
        processes.with_ports(config)


def test_one_trainer_needs_no_meeting_point():
    config = build({})
    assert processes.with_ports(config).trainer.distributed == config.trainer.distributed
    assert [name for name, _ in processes._parts(config)] == ["rollout", "trainer", "generator-0"]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "was killed (SIGKILL), by hand or for want of memory; the same command goes on"),
        ("sys.exit(130)", "was asked to stop before its end; the same command goes on"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_a_part_that_ends_before_the_run_does_ends_the_run_and_says_how(tmp_path, end, told):
    (tmp_path / "log").touch()
    running = [
        subprocess.Popen([sys.executable, "-c", code])
        for code in (f"import os, sys; {end}", "import time; time.sleep(60)")
    ]
    children = [
        Child(name, process, tmp_path / "log") for name, process in zip(("trainer", "rollout"), running, strict=True)
    ]
    with pytest.raises(processes.RunFailed) as caught:
        processes._wait(children, lambda: False, lambda: None)
    assert str(caught.value).startswith(f"the trainer process {told}")
    running[1].kill()
    running[1].wait()
