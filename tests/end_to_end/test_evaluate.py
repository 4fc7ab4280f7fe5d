"""`python -m areal_jax.evaluate` and evaluation inside training, with the real model, engine, reward pool and files."""

import collections
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import job

PROMPTS, SAMPLES = 12, 4
SETTINGS = {
    "data.train": "",  # nothing is trained
    "eval.prompts": PROMPTS,
    "eval.samples": SAMPLES,
    "generation.slots": 8,
    "generation.length_buckets": "(112,)",
}
REWARDS = """
import time
from areal_jax.rewards.math_answer import stated_answer_matches

def broken(*, completion, answer, prompt):
    raise RuntimeError("no verifier today")

def slow(**texts):
    time.sleep(0.1)
    return stated_answer_matches(**texts)
"""


def start(out: pathlib.Path, settings: Mapping[str, Any] = {}) -> subprocess.Popen[str]:
    values = {**SETTINGS, **settings}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "areal_jax.evaluate", "--config=configs/math.py", f"--out={out}", *overrides]
    path = os.pathsep.join([str(out.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**job.ENVIRONMENT, "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=job.ROOT, env=environment, start_new_session=True, **pipes)


def run(out: pathlib.Path, settings: Mapping[str, Any] = {}) -> tuple[int, str, str]:
    return job.end(start(out, settings))


def figures(out: pathlib.Path) -> dict[str, Any]:
    return json.loads((out / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluation") / "out"
    return out, run(out)


def test_it_ends_well_and_says_how_far_it_is_and_what_came_out(finished):
    out, (status, printed, progress) = finished
    assert status == 0, progress
    assert f"{PROMPTS} of {PROMPTS} problems" in progress and "0:00 left" in progress
    assert f"avg@{SAMPLES}" in printed and "pass@k" in printed and "maj@k" in printed
    assert f"{100 * figures(out)['accuracy']:.1f} %" in printed
    assert str(out / "completions.jsonl") in printed
    assert {path.name for path in out.iterdir()} == {".lock", "config.json", "completions.jsonl", "evaluation.json"}


def test_the_figures_are_those_of_the_completions(finished):
    out, _ = finished
    found, records = figures(out), job.lines(out, "completions")
    check_figures(found, records)
    assert [record["uid"] for record in records] == list(range(PROMPTS))
    assert (found["prompts"], found["samples"], found["too_long"]) == (PROMPTS, SAMPLES, 0)
    assert (found["version_min"], found["version_max"]) == (-1, -1), "weights that no trainer here has published"
    assert 0 < found["accuracy"] < 1 and found["tokens"] == sum(tokens(records))
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"], rel=0.01)


def check_figures(found, records):
    """By slower ways than the program's."""
    right = [[sample["text"].split()[-2:] == ["answer:", r["answer"]] for sample in r["samples"]] for r in records]
    assert right == [[sample["right"] for sample in record["samples"]] for record in records]
    n = len(right[0])
    assert found["accuracy"] == found[f"avg@{n}"] == pytest.approx(np.mean(right))
    for k in (1, 2, n):
        subsets = [[any(subset) for subset in itertools.combinations(row, k)] for row in right]
        assert found[f"pass@{k}"] == pytest.approx(np.mean(subsets))
    assert found[f"maj@{n}"] == pytest.approx(np.mean([vote(record["samples"]) for record in records]))
    assert found["length_mean"] == pytest.approx(np.mean(tokens(records)))
    assert found["length_max"] == max(tokens(records))
    reasons = [sample["finish_reason"] for record in records for sample in record["samples"]]
    assert found["truncated"] == reasons.count("length") / len(reasons)


def vote(samples):
    counts = collections.Counter(sample["final_answer"] for sample in samples if sample["final_answer"])
    if not counts:
        return np.mean([sample["right"] for sample in samples])
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    shares = [np.mean([s["right"] for s in samples if s["final_answer"] == answer]) for answer in best]
    return np.mean(shares)


def tokens(records):
    return [sample["tokens"] for record in records for sample in record["samples"]]


def test_the_same_seed_gives_the_same_completions_whatever_the_batch(finished, tmp_path):
    out, _ = finished
    assert run(tmp_path / "out", {"generation.slots": 3, "generation.decode_steps": 3})[0] == 0
    assert job.lines(tmp_path / "out", "completions") == job.lines(out, "completions")


def test_another_seed_gives_others(finished, tmp_path):
    out, _ = finished
    assert run(tmp_path / "out", {"run.seed": 2})[0] == 0
    ours, theirs = job.lines(tmp_path / "out", "completions"), job.lines(out, "completions")
    assert [record["prompt"] for record in ours] == [record["prompt"] for record in theirs]
    assert [record["samples"] for record in ours] != [record["samples"] for record in theirs]


def test_a_finished_evaluation_is_not_written_over(finished):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.iterdir()}
    status, _, err = run(out)
    assert status == 2
    assert f"error: --out={out} holds a finished evaluation; give another --out" in err
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_ctrl_c_keeps_what_was_judged_and_the_same_command_goes_on(finished, tmp_path):
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    out, settings = tmp_path / "out", {"reward.function": "some_rewards:slow"}
    process = start(out, settings)
    job.wait_until(lambda: len(job.lines(out, "completions")) >= 3, 60, "three problems")
    process.send_signal(signal.SIGINT)
    status, _, err = job.end(process)
    assert "stopping ..." in err and "stopped: " in err, err
    assert err.index("stopping ...") < err.index("stopped: ")
    kept = job.lines(out, "completions")
    assert status == 130
    assert f"stopped: {len(kept)} of {PROMPTS} problems judged; the same command goes on" in err
    assert "Traceback" not in err
    assert 3 <= len(kept) < PROMPTS and not (out / "evaluation.json").exists()

    assert run(out, settings | {"eval.samples": 2})[0] == 2, "other settings do not go on from it"
    status, _, err = run(out, settings)
    assert status == 0
    assert f"{len(kept)} of {PROMPTS} problems were judged by an earlier start" in err
    assert job.lines(out, "completions") == job.lines(finished[0], "completions")
    assert figures(out)["accuracy"] == figures(finished[0])["accuracy"]
    assert figures(out)["judged_by_earlier_starts"] == len(kept)
    assert figures(out)["tokens"] == sum(tokens(job.lines(out, "completions"))) - sum(tokens(kept)), "not asked again"


def test_a_reward_that_raises_is_no_score(tmp_path):
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    out = tmp_path / "out"
    status, printed, err = run(out, {"reward.function": "some_rewards:broken"})
    assert status == 1
    error = next(line for line in err.splitlines() if line.startswith("error: "))
    assert re.match(r"error: the evaluation has no score: prompt \d+ failed \(reward_error\)", error)
    assert "'some_rewards:broken' raised RuntimeError: no verifier today" in error
    assert "avg@" not in printed and not (out / "evaluation.json").exists() and not (out / "completions.jsonl").exists()


def test_a_completion_may_be_longer_than_in_training(tmp_path):
    settings = {"rollout.max_new_tokens": 2, "eval.prompts": 2, "eval.max_new_tokens": 56}
    assert run(tmp_path / "out", settings)[0] == 0
    assert figures(tmp_path / "out")["max_new_tokens"] == 56
    assert figures(tmp_path / "out")["length_max"] > 2


def test_all_problems_of_a_file_are_asked(finished, tmp_path):
    problems = job.lines(finished[0], "completions")
    lines = [json.dumps({"problem": problem["prompt"], "answer": problem["answer"]}) for problem in problems]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    settings = {"eval.prompts": 0, "eval.samples": 1, "eval.temperature": 0.0}
    assert run(tmp_path / "out", {**settings, "eval.data": tmp_path / "problems.jsonl"})[0] == 0
    asked = job.lines(tmp_path / "out", "completions")
    assert sorted(record["prompt"] for record in asked) == sorted(problem["prompt"] for problem in problems)
    assert figures(tmp_path / "out")["avg@1"] == sum(record["right"] for record in asked) / PROMPTS


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"eval.prompts": 0}, "eval.prompts=0 means all prompts of eval.data, which goes on without end"),
        ({"eval.temperature": 0.0}, "config.eval.temperature=0 takes the most likely token"),
        ({"eval.max_new_tokens": 57}, "config.generation.length_buckets=(112,) end below the longest sequence, 113"),
        ({"eval.data": ""}, "config.eval.data is not set"),
        ({"data.max_prompt_tokens": 1}, "data.max_prompt_tokens=1 leaves out all 12 held-out prompts; their lengths"),
        ({"eval.sample": 3}, "config.eval.sample does not exist; the nearest key is config.eval.samples"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(tmp_path, settings, text):
    status, _, err = run(tmp_path / "out", settings)
    assert status == 2
    assert f"error: {text}" in err
    assert "Traceback" not in err
    assert "compiled" not in err


# Inside training.


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A run of which every evaluation takes 32 samples: many more than the one slot of four that is its share.

    Its completions may be longer than those of training: prompts of 10 tokens and 56 more are more than 56 + 8.
    """
    run_dir = tmp_path_factory.mktemp("training") / "run"
    settings = {"eval.prompts": 4, "eval.samples": 32, "eval.every": 4, "trainer.steps": 36}
    settings |= {"rollout.max_new_tokens": 8, "eval.max_new_tokens": 56}
    return run_dir, job.run(run_dir, settings, timeout_s=240)


def test_evaluation_in_training_leaves_the_slots_to_rollouts_and_does_not_stop_training(training):
    run_dir, (status, _, err) = training
    assert status == 0, err
    during = [line for line in job.lines(run_dir, "evaluations") if line["phase"] == "during"]
    assert during and all(line["samples"] == 32 for line in during)
    line = max(during, key=lambda line: line["seconds"])
    began = line["time"] - line["seconds"]
    steps = [step for step in job.lines(run_dir, "metrics") if began < step["time"] < line["time"]]
    assert len(steps) >= 2, "training went on"
    finished = [each["finished"] for each in job.lines(run_dir, "rollout") if began < each["time"] < line["time"]]
    assert finished[-1] - finished[0] >= 2 * job.BATCH, "so did rollouts"
    assert line["version"] <= line["version_min"] < line["version_max"], "new weights came in the middle of it"


def test_every_evaluation_in_training_leaves_its_completions(training):
    run_dir, _ = training
    lines = job.lines(run_dir, "evaluations")
    names = {f"{line['version']:06d}-{line['phase']}.jsonl": line for line in lines}
    assert {path.name for path in (run_dir / "evaluations").iterdir()} == set(names)
    for name, line in names.items():
        check_figures(line, job.lines(run_dir / "evaluations", name.removesuffix(".jsonl")))


def test_training_and_the_command_measure_the_same_on_the_same_weights(training, finished):
    before = job.lines(training[0] / "evaluations", "000000-before")
    alone = job.lines(finished[0], "completions")
    for ours, theirs in zip(before, alone, strict=False):
        assert ours["prompt"] == theirs["prompt"]
        assert [s["text"] for s in ours["samples"][:SAMPLES]] == [s["text"] for s in theirs["samples"]]
    assert {s["version_min"] for record in before for s in record["samples"]} == {0}


def test_a_reward_that_raises_ends_training_at_its_first_evaluation(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    monkeypatch.setitem(job.ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    run_dir = tmp_path / "run"
    status, _, err = job.run(run_dir, {"reward.function": "some_rewards:broken"})
    assert status == 1
    assert re.search(r"the evaluation has no score: prompt \d+ failed \(reward_error\)", err)
    assert "RuntimeError: no verifier today" in err and "Traceback" not in err
    assert job.lines(run_dir, "evaluations") == []
    job.assert_nothing_left(run_dir)
