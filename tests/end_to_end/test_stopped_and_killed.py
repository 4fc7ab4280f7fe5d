"""One run, stopped by Ctrl-C, robbed of its trainer, of its generator and of main itself, and always started again."""

import dataclasses
import signal
import time

import pytest

from tests.end_to_end import job

STEPS = 200  # never reached but by the last start
LAST = 12  # steps that the last start is to make
HELD_S = 5.0  # twice what a start takes to its first child
SETTINGS = {"trainer.steps": STEPS, "eval.every": 0, "trainer.checkpoint.every": 4}


@dataclasses.dataclass
class Start:
    """A start of the run and its end."""

    first: int  # version at which it began to train
    status: int
    out: str
    err: str
    seconds: float  # from the signal to the end of main and all others
    version: int  # the newest in metrics.jsonl afterwards
    checkpoint: int


def signalled(run_dir, role, number):
    """Starts the run, lets it make three more steps and sends the signal to main or one child: (main, first, ids)."""
    first = job.checkpoints(run_dir)[-1] if job.version(run_dir) else 0
    seen = job.version(run_dir)  # lines after the checkpoint are dropped first, then written again
    process = job.start(run_dir, SETTINGS)
    job.wait_until(lambda: process.poll() is not None or job.version(run_dir) >= seen + 3, 60, "three steps")
    pids = job.processes(run_dir)
    job.kill(process.pid if role == "main" else job.processes(run_dir, role)[0], number)
    return process, first, pids


def interrupt(run_dir, role, number):
    """`signalled`, and what came of it when all processes have ended."""
    process, first, pids = signalled(run_dir, role, number)
    began = time.monotonic()
    status, out, err = job.end(process, 60)
    job.wait_until(lambda: job.alive(pids) == [], 40, "every process ends")
    seconds = time.monotonic() - began
    return Start(first, status, out, err, seconds, job.version(run_dir), job.checkpoints(run_dir)[-1])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture(scope="module")
def starts(run_dir):
    """What happened, in this order, in one directory."""
    return {
        "Ctrl-C": interrupt(run_dir, "main", signal.SIGINT),
        "trainer": interrupt(run_dir, "trainer", signal.SIGKILL),
        "generator": interrupt(run_dir, "generator", signal.SIGKILL),
    }


@pytest.fixture(scope="module")
def orphans(run_dir, starts):
    """Main is killed and the same command started at once, while the old trainer is held for a while.

    Gives the trainers that the new start had by then, the seconds that the orphans lived afterwards, the steps of the
    last start, and its exit status and stderr.
    """
    main, _, pids = signalled(run_dir, "main", signal.SIGKILL)
    (trainer,) = job.processes(run_dir, "trainer")
    job.kill(trainer, signal.SIGSTOP)
    job.end(main, 10)
    steps = job.version(run_dir) + LAST
    again = job.start(run_dir, {**SETTINGS, "trainer.steps": steps})
    time.sleep(HELD_S)
    too_early = set(job.processes(run_dir, "trainer")) - {trainer}
    job.kill(trainer, signal.SIGCONT)
    began = time.monotonic()
    job.wait_until(lambda: job.alive(pids) == [], 40, "every orphan ends")
    seconds = time.monotonic() - began
    status, _, err = job.end(again)
    return too_early, seconds, steps, status, err


def test_ctrl_c_ends_with_130_and_a_checkpoint_of_the_last_version(starts, run_dir):
    start = starts["Ctrl-C"]
    assert (start.status, start.err) == (130, "")
    assert start.version == start.checkpoint >= 3
    assert "stopping: the trainer ends its step" in start.out
    assert f"the same command goes on from version {start.checkpoint}" in start.out
    assert start.seconds < 15


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_killed_child_ends_the_run_with_its_name_and_last_words(starts, role):
    start = starts[role]
    name = {"trainer": "trainer", "generator": "generator-0"}[role]
    assert start.status == 1
    assert start.err.startswith(f"error: the {name} process was killed (SIGKILL), by hand or for want of memory; ")
    assert {"trainer": "waiting for trajectories", "generator": "listens on"}[role] in start.err
    assert start.seconds < 15


def test_killed_main_takes_everybody_with_it(orphans):
    _, seconds, *_ = orphans
    assert seconds < 25


def test_a_start_waits_until_the_children_of_a_killed_one_have_ended(orphans):
    too_early, *_ = orphans
    assert too_early == set()


def test_each_start_goes_on_from_the_newest_checkpoint(starts):
    before, *_ = starts.values()
    assert before.first == 0
    for start in list(starts.values())[1:]:
        assert start.first == before.checkpoint > 0
        assert start.version > start.first
        before = start


def test_the_same_command_finishes_in_the_end(orphans, run_dir):
    _, _, steps, status, err = orphans
    assert (status, err) == (0, "")
    assert [line["version"] for line in job.lines(run_dir, "metrics")] == list(range(1, steps + 1))
    job.assert_nothing_left(run_dir)
    summary = job.read_summary(run_dir)
    assert summary["starts"] == 5
    assert summary["recompilations_after_warmup"] == 0


def test_every_prompt_trained_once_over_all_starts(orphans, run_dir):
    steps = orphans[2]
    job.check_exactly_once(run_dir, steps)


def test_the_gate_was_never_wider_after_a_start(orphans, run_dir):
    for line in job.lines(run_dir, "metrics"):
        assert line["queue/waiting"] <= job.ETA * job.BATCH
        assert sum(line["staleness/histogram"][job.ETA + 1 :]) == line["tokens/masked"] == 0
    for version in job.checkpoints(run_dir):
        came = len(job.finished_prompts(job.saved_queue(run_dir, version))) * job.GROUP
        assert came <= (version + 1 + job.ETA) * job.BATCH


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_main_stopped_while_its_children_compile_does_not_wait_for_them(tmp_path, monkeypatch, number):
    run_dir = tmp_path / "run"
    monkeypatch.setitem(job.ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))  # empty
    process = job.start(run_dir, {"generation.length_buckets": "(28, 56, 84, 112)"})
    log = run_dir / "logs" / "generator-0.log"
    job.wait_until(lambda: log.exists() and "compiled 0 of 4" in log.read_text(), 30, "compilation")
    pids = job.processes(run_dir)
    job.kill(process.pid, number)
    status, _, err = job.end(process, 10)
    assert (status, err) == ((130, "") if number == signal.SIGINT else (-9, ""))
    job.wait_until(lambda: job.alive(pids) == [], 5, "every process ends")
    assert "compiled 1 of 4" not in log.read_text()
    job.assert_nothing_left(run_dir)
