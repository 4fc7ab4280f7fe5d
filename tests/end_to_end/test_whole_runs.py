"""Whole runs of the real command on the model of configs/math.py: three processes, threads, and parts by hand."""

import json
import math

import numpy as np
import pytest

from tests.end_to_end import job

SUMMARY = {  # the names of the issue that asked for the file
    "version",
    "trained_tokens",
    "wall_s",
    "held_out",
    "staleness",
    "swaps_mid_sequence",
    "logp_gap",
    "idle",
    "recompilations_after_warmup",
    "dropped",
    "masked_tokens",
}
STEPS = 24
THREAD_STEPS = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in three processes: its directory, exit status and output, what ran, a second start meanwhile, trainers."""
    run_dir = tmp_path_factory.mktemp("processes") / "run"
    process = job.start(run_dir, {"trainer.steps": STEPS, "generation.slots": 2})  # so that generation is seldom idle
    job.wait_until(lambda: job.version(run_dir) >= 1, 90, "first step")
    pids = job.processes(run_dir)
    started_anew = [
        role
        for role in ("trainer", "generator", "rollout")
        if b"glibc.malloc.tcache_count=0" in job.environment(job.processes(run_dir, role)[0])
    ]
    second = job.run(run_dir, timeout_s=30)
    alive = process.poll() is None
    return run_dir, job.end(process), pids, (*second, alive), started_anew


@pytest.fixture(scope="module", params=["recompute", "keep", "drain"])
def threads(request, tmp_path_factory):
    """A run in one process for each way of taking new weights."""
    run_dir = tmp_path_factory.mktemp("threads") / "run"
    settings = {"run.launch": "threads", "generation.on_update": request.param, "trainer.steps": THREAD_STEPS}
    return request.param, run_dir, job.run(run_dir, settings)


def test_processes_run_to_the_end_and_leave_nothing(whole):
    run_dir, (status, out, err), pids, _, _ = whole
    assert (status, err) == (0, "")
    assert len(pids) >= 5, "main, trainer, generator, controller and a reward worker were seen"
    assert f"step {STEPS}/{STEPS}" in out
    job.assert_nothing_left(run_dir, pids)


def test_a_second_run_in_the_same_directory_is_refused(whole):
    run_dir, _, _, (status, _, err, alive), _ = whole
    assert alive, "the first was still going on"
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert f"run.dir={run_dir} belongs to a run that is going on" in err


def test_what_trains_and_only_that_has_the_heap_of_one_that_trains(whole):
    assert whole[4] == ["trainer"]


def test_every_step_has_a_line_of_finite_numbers(whole):
    check_metrics(job.lines(whole[0], "metrics"), STEPS)


def test_every_version_has_a_line_with_the_seconds_of_each_stage_of_its_publish(whole):
    lines = job.lines(whole[0], "publishes")
    assert [line["version"] for line in lines] == list(range(STEPS + 1))
    for line in lines:
        assert 0 < line["copy_s"] + line["write_s"] + line["push_s"] <= line["total_s"]


def test_the_timeline_shows_every_part_of_the_run_on_one_clock(whole):
    events = json.loads((whole[0] / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert {"trainer", "rollout controller"} <= names and any(name.startswith("generation server") for name in names)
    spans = [event for event in events if event["ph"] == "X"]
    assert {"update", "judge", "generate"} <= {event["name"] for event in spans}
    begun, ended = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    assert {event["pid"] for event in spans} >= {e["pid"] for e in events if e["name"] == "process_name"}
    assert 0 < (ended - begun) / 1e6 < 120, "seconds; all of it lies in the time of the run"


def test_three_swaps_or_more_happen_in_mid_sequence(whole):
    swapped = [line["version"] for line in job.lines(whole[0], "metrics") if line["versions_per_trajectory/max"] > 1]
    assert len(swapped) >= 3, "one in two is usual; fewer where the trainer keeps generation waiting"
    assert sum(line["recomputed_tokens"] for line in job.lines(whole[0], "generation-0")) > 0


def test_versions_rise_along_the_trajectories_that_checkpoints_hold(whole):
    versions = job.checkpoints(whole[0])
    assert versions == [*range(3, STEPS, 3), STEPS]
    seen = 0
    for version in versions:
        for trajectory in job.waiting(job.saved_queue(whole[0], version)):
            assert (np.diff(trajectory.versions) >= 0).all()
            assert trajectory.versions.min() >= 0
            assert trajectory.versions.max() <= version + 1, "the next one may be published while files are written"
            assert len(trajectory.tokens) == len(trajectory.behav_logprobs) == len(trajectory.versions)
            assert np.isfinite(trajectory.behav_logprobs).all()
            assert (trajectory.behav_logprobs <= 0).all()
            seen += 1
    assert seen >= job.GROUP


def test_every_prompt_is_trained_on_once_or_waits(whole):
    job.check_exactly_once(whole[0], STEPS)


def test_the_summary_holds_what_was_asked_for(whole):
    check_summary(whole[0], STEPS)


def test_threads_do_the_same_in_one_process(threads):
    _, run_dir, (status, _, err) = threads
    assert (status, err) == (0, "")
    job.assert_nothing_left(run_dir)
    check_metrics(job.lines(run_dir, "metrics"), THREAD_STEPS)
    job.check_exactly_once(run_dir, THREAD_STEPS)
    check_summary(run_dir, THREAD_STEPS)


def test_each_way_of_taking_new_weights_does_what_it_says(threads):
    way, run_dir, _ = threads
    most = [line["versions_per_trajectory/max"] for line in job.lines(run_dir, "metrics")]
    recomputed = sum(line["recomputed_tokens"] for line in job.lines(run_dir, "generation-0"))
    swaps = sum(line["swaps"] for line in job.lines(run_dir, "generation-0"))
    assert swaps >= 5
    assert (max(most) > 1) == (way != "drain")
    assert (recomputed > 0) == (way == "recompute")
    gap = job.read_summary(run_dir)["logp_gap"]["max"]
    assert (gap > 1e-4) == (way == "keep"), "keys and values of old weights under new ones, and only they, show"


def test_eta_0_is_synchronous(tmp_path):
    settings = {"run.launch": "threads", "rollout.max_staleness": 0, "trainer.steps": 5}
    status, _, err = job.run(tmp_path / "run", settings)
    assert (status, err) == (0, "")
    lines = job.lines(tmp_path / "run", "metrics")
    assert [line["staleness/max"] for line in lines] == [0] * 5
    assert [line["versions_per_trajectory/max"] for line in lines] == [1] * 5
    assert [line["queue/waiting"] for line in lines] == [0] * 5
    assert [line["prompts"] for line in lines] == [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    assert job.lines(tmp_path / "run", "rollout")[-1]["started"] <= 6 * job.BATCH, "nothing ran ahead of the last step"
    events = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    assert "gate closed" in {event["name"] for event in events if event["ph"] == "X"}, "the controller waited for steps"


def test_without_learning_nothing_drifts_in_fifty_steps(tmp_path):
    """cases.md, zero learning rate: the gap stays at its numeric floor, memory is flat, nothing compiles."""
    run_dir = tmp_path / "run"
    settings = {
        "run.launch": "threads",
        "trainer.optimizer.lr": 0.0,
        "trainer.steps": 50,
        "trainer.checkpoint.every": 0,
        "generation.slots": 16,
        "eval.every": 0,
    }
    process = job.start(run_dir, settings)
    resident = []
    for version in (15, 45):
        job.wait_until(lambda version=version: job.version(run_dir) >= version, 90, f"version {version}")
        resident.append(job.resident_bytes(process.pid))
    status, _, err = job.end(process)
    assert (status, err) == (0, "")
    assert resident[1] - resident[0] < 2**26, "64 MB: what thirty steps may leave behind"
    lines = job.lines(run_dir, "metrics")
    assert len(lines) == 50
    assert max(line["staleness/max"] for line in lines) >= 1, "stale tokens were there"
    assert max(line["versions_per_trajectory/max"] for line in lines) >= 2, "swaps recomputed the cache"
    for line in lines:
        assert line["behav_weight/max"] == pytest.approx(1.0, abs=1e-4)
        assert line["behav_weight/mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
        assert line["lr"] == 0.0
    assert len({line["compilations"] for line in lines}) == 1
    assert job.read_summary(run_dir)["recompilations_after_warmup"] == 0


def test_parts_started_by_hand_find_each_other(tmp_path):
    run_dir, ports = tmp_path / "run", job.free_ports(2)
    settings = {
        "trainer.address": f"127.0.0.1:{ports[0]}",
        "generation.addresses": f"('127.0.0.1:{ports[1]}',)",
        "trainer.steps": 3,
    }
    parts = {role: job.start(run_dir, settings, f"--role={role}") for role in ("rollout", "trainer", "generator")}
    ended = {role: job.end(parts[role]) for role in ("rollout", "trainer")}
    parts["generator"].terminate()
    ended["generator"] = job.end(parts["generator"], 20)
    assert {role: status for role, (status, _, _) in ended.items()} == dict.fromkeys(parts, 0), ended
    assert [line["version"] for line in job.lines(run_dir, "metrics")] == [1, 2, 3]
    assert [line["phase"] for line in job.lines(run_dir, "evaluations")] == ["before", "after"]
    job.assert_nothing_left(run_dir)


# What holds of every run.


def check_metrics(lines, steps):
    """One line per version, finite, no trained token staler than eta, no trajectory beyond the gate."""
    assert [line["version"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert "not_finite" not in line
        assert all(math.isfinite(line[name]) for name in ("loss", "reward/mean", "grad_norm", "entropy"))
        assert -5 <= line["reward/mean"] <= 5
        assert line["grad_norm"] > 0
        by_staleness = line["staleness/histogram"]
        assert sum(by_staleness[: job.ETA + 1]) == line["tokens/trained"] > 0
        assert sum(by_staleness[job.ETA + 1 :]) == line["tokens/masked"]
        assert line["queue/waiting"] <= job.ETA * job.BATCH, "the gate lets at most eta batches run ahead"
    assert max(line["staleness/max"] for line in lines) >= 1, "it was asynchronous"


def check_summary(run_dir, steps):
    summary = job.read_summary(run_dir)
    lines = job.lines(run_dir, "metrics")
    assert summary.keys() >= SUMMARY
    assert summary["version"] == steps
    assert summary["trained_tokens"] == sum(line["tokens/trained"] for line in lines)
    assert summary["masked_tokens"] == sum(line["tokens/masked"] for line in lines)
    assert 1 < summary["wall_s"] < 120
    assert all(0 <= summary["held_out"][name] <= 1 for name in ("before", "after"))
    assert 0 <= summary["staleness"]["mean"] <= summary["staleness"]["max"] <= job.ETA
    assert sum(summary["staleness"]["histogram"]) == summary["trained_tokens"]
    assert summary["swaps_mid_sequence"] == sum(line["trajectories/multi_version"] for line in lines)
    assert 0 <= summary["logp_gap"]["p50"] <= summary["logp_gap"]["p99"] <= summary["logp_gap"]["max"] < 0.1
    assert all(0 <= summary["idle"][name] <= 1 for name in ("trainer", "generator"))
    assert summary["recompilations_after_warmup"] == 0
    assert summary["dropped"] == {}
    assert (run_dir / "summary.png").stat().st_size > 10_000
