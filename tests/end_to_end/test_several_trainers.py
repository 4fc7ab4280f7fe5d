"""A run whose trainer is two processes, which the real command starts, stops and starts again."""

import json
import signal

import pytest

from tests.end_to_end import job
from tests.end_to_end.test_whole_runs import check_metrics

STEPS, STOPPED = 14, 2  # it takes some steps until all processes know that they are to stop
SETTINGS = {
    "trainer.distributed.processes": 2,
    "trainer.distributed.coordinator": "127.0.0.1:0",
    "trainer.steps": STEPS,
    "trainer.checkpoint.every": 4,
    "eval.every": 0,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that is asked to stop half way, and started again; how it ended each time, and what ran."""
    run_dir = tmp_path_factory.mktemp("several") / "run"
    process = job.start(run_dir, SETTINGS)
    job.wait_until(lambda: job.version(run_dir) >= STOPPED, 90, f"step {STOPPED}")
    pids = job.processes(run_dir)
    job.kill(process.pid, signal.SIGINT)
    stopped = job.end(process)
    left = job.checkpoints(run_dir)[-1]
    return run_dir, stopped, left, pids, job.run(run_dir, SETTINGS)


def test_a_trainer_of_two_processes_stops_in_order_and_goes_on_to_the_end(runs):
    run_dir, (stopped, out, err), left, pids, (status, _, err_again) = runs
    assert (stopped, err, status, err_again) == (130, "", 0, "")
    assert STOPPED <= left < STEPS and f"the newest checkpoint is of version {left}" in out
    assert len(pids) >= 6, "main, two trainers, generator, controller and a reward worker were seen"
    job.assert_nothing_left(run_dir, pids)
    check_metrics(job.lines(run_dir, "metrics"), STEPS)
    job.check_exactly_once(run_dir, STEPS)
    assert [line["version"] for line in job.lines(run_dir, "trainer-1")] == list(range(1, STEPS + 1))
    assert job.read_summary(run_dir)["recompilations_after_warmup"] == 0


def test_the_timeline_has_the_steps_of_both_processes_at_the_same_time(runs):
    events = json.loads((runs[0] / "timeline.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    both = [tracks["training steps"], tracks["training steps, trainer-1"]]
    trainer = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "trainer")
    updates = [
        [e for e in events if (e["ph"], e["pid"], e["tid"], e["name"]) == ("X", trainer, tid, "update")] for tid in both
    ]
    assert [len(each) for each in updates] == [STEPS, STEPS]
    for first, second in zip(*updates, strict=True):
        ends = [each["ts"] + each["dur"] for each in (first, second)]
        # Microseconds: who is through looks at the clock as soon as it gets a core.
        assert abs(ends[0] - ends[1]) < 0.5e6
