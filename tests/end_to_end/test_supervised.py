"""Supervised fine-tuning by the real command, on a file of thirty examples, one of which is too long."""

import json
import random

import numpy as np
import pytest

from areal_jax import config as config_lib
from areal_jax import export
from areal_jax.launch import plan, supervised, supervised_page
from areal_jax.launch.run_files import Run
from areal_jax.models.safetensors_files import load_model
from areal_jax.rollout import arithmetic
from areal_jax.trainer.checkpoint import SavedParams
from configs import sft
from tests.end_to_end import job

MODEL = "configs/arithmetic_model"
COUNT, LIMIT = 30, 40


def write_examples(path, *, held_out):
    rng = random.Random(7)
    problems = [arithmetic.sample_problem(rng, held_out=held_out, most_steps=5) for _ in range(COUNT)]
    if not held_out:
        problems[11] = arithmetic.sample_problem(rng, held_out=False, skew=0.0)  # of 26 steps
    lines = [json.dumps({"question": p.text, "solution": arithmetic.written_out(p.totals)}) for p in problems]
    path.write_text("\n".join(lines) + "\n")


def settings(directory):
    """Three epochs; `own` has no model, and nothing of the other examples."""
    return {
        "run.dir": str(directory / "run"),
        "model.path": MODEL,
        "sft.data": str(directory / "train.jsonl"),
        "sft.eval_data": str(directory / "test.jsonl"),
        "sft.prompt": "question",
        "sft.response": "solution",
        "sft.max_length": LIMIT,
        "sft.batch_size": 10,
        "sft.epochs": 3,
        "trainer.token_budget": 512,
        "trainer.row_buckets": (64,),
        "trainer.optimizer.lr": 1e-3,
        "metrics.tensorboard": False,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(directory of the run, stdout, stderr)."""
    directory = tmp_path_factory.mktemp("sft")
    write_examples(directory / "train.jsonl", held_out=False)
    write_examples(directory / "test.jsonl", held_out=True)
    words = [f"--config.{key}={value}" for key, value in settings(directory).items()]
    status, out, err = job.end(job.start_command(["--config=configs/sft.py:own", *words]))
    assert status == 0, err
    return directory / "run", out, err


@pytest.fixture(scope="module")
def config(finished):
    values = sft.get_config("own")
    values.update_from_flattened_dict(settings(finished[0].parent))
    return config_lib.build(values)


def test_it_learns_and_says_how_far_it_is(finished):
    run_dir, out, _ = finished
    assert "held-out before: loss" in out and "held-out after: loss" in out
    last = next(line for line in out.splitlines()[::-1] if line.startswith("step "))
    assert last.startswith("step 9/9  loss 0.") and "tok/s trained" in last and last.endswith("left 0:00")
    summary = job.read_summary(run_dir)
    assert summary["finished"] and (summary["version"], summary["planned_steps"]) == (9, 9)  # 3 * 29 / 10
    assert summary["held_out_loss"]["after"] < 0.5 * summary["held_out_loss"]["before"]
    assert summary["recompilations_after_warmup"] == 0 and summary["planned_epochs"] == 3.0
    assert summary["trained_tokens"] == sum(line["tokens/trained"] for line in job.lines(run_dir, "metrics"))
    assert (run_dir / "summary.png").stat().st_size > 10_000


def test_an_example_that_is_too_long_is_told_by_its_line(finished):
    run_dir, _, err = finished
    (line,) = job.lines(run_dir, "skipped")
    assert (line["split"], line["place"], line["limit"]) == ("train", "line 12", LIMIT) and line["tokens"] > LIMIT
    assert "1 examples have more tokens than sft.max_length=40 and are left out: line 12" in err
    assert job.read_summary(run_dir)["too_long"] == {"train": 1, "held_out": 0}


def test_its_checkpoint_is_exported_as_any_other(finished, tmp_path):
    text = export.export(finished[0], tmp_path / "out")
    assert "version 9" in text
    trained, begun = (load_model(path)[1]["embedding"] for path in (tmp_path / "out", job.ROOT / MODEL))
    assert trained.shape == begun.shape and (trained != begun).any()


def test_a_finished_run_is_shown_and_not_trained_again(finished, config, capsys):
    before = (finished[0] / "metrics.jsonl").read_bytes()
    assert supervised.run(config, command=[]) == 0
    assert capsys.readouterr().out.startswith(f"{config.run_dir} has its 9 updates")
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_the_time_left_follows_the_pace(finished):
    run = Run(finished[0]).update()
    for line in run.steps:
        line["step_s"] = 2.0
    text = supervised_page.step_line(run, planned=40, now=run.steps[-1]["time"] + 1.0)
    assert text.startswith("step 9/40  loss 0.") and text.endswith("left 1:01")  # 31 updates of 2 s, less 1 s


def test_a_dry_run_shows_an_example_and_no_generation(config):
    report = plan.supervised_report(config)
    assert "generation" not in report and "optimizer moments" in report and "publish" not in report
    text = supervised.preview(config)
    assert "sft.data: 29 examples of " in text and "1 over sft.max_length=40 are left out" in text
    assert "    | start " in text and "    > a: " in text and "9 updates of 10 examples: 3.00 epochs" in text


SEVERAL = ["--config.trainer.distributed.processes=2", "--config.trainer.distributed.coordinator=127.0.0.1:0"]


@pytest.mark.parametrize(("role", "words"), [("trainer", []), ("rollout", SEVERAL)])
def test_a_role_that_does_not_fit_is_refused(role, words):
    status, _, err = job.end(job.start_command(["--config=configs/sft.py", f"--role={role}", *words]))
    assert status == 2 and err.startswith(f"error: --role={role} is a part of reinforcement learning, and supervised")


def test_two_processes_that_one_command_starts_imitate_as_one_does(finished, tmp_path):
    """They read the same examples, and end with the same loss, held-out loss and parameters."""
    several = {
        **settings(finished[0].parent),
        "run.dir": str(tmp_path / "run"),
        "trainer.distributed.processes": 2,
        "trainer.distributed.coordinator": "127.0.0.1:0",
    }
    words = ["--config=configs/sft.py:own", *(f"--config.{k}={v}" for k, v in several.items())]
    status, out, err = job.end(job.start_command(words))
    assert status == 0, err
    assert out.count("held-out after") == 1 and "process 0 of 2 of the trainer meets the others" in err
    assert "process 1 of 2 of the trainer meets the others" in (tmp_path / "run/logs/trainer-1.log").read_text()
    for file, names in (("metrics", ("loss", "grad_norm", "tokens/trained")), ("evaluations", ("loss", "tokens"))):
        lines, expected = job.lines(tmp_path / "run", file), job.lines(finished[0], file)
        assert [line["version"] for line in lines] == [line["version"] for line in expected]
        for line, other in zip(lines, expected, strict=True):
            rel = 1e-6 if line["version"] <= 1 else 1e-4
            assert [line[name] for name in names] == pytest.approx([other[name] for name in names], rel=rel, abs=1e-6)
    assert [line["version"] for line in job.lines(tmp_path / "run", "trainer-1")] == list(range(1, 10))
    ours, theirs = (SavedParams(run_dir / "checkpoints" / "9") for run_dir in (tmp_path / "run", finished[0]))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)
    assert job.read_summary(tmp_path / "run")["finished"]
