"""The directory of an evaluation, its progress and its page."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from areal_jax.config import Config, EvaluationConfig, to_json
from areal_jax.launch import processes, run_files
from areal_jax.launch.evaluation import close_directory, open_directory
from areal_jax.launch.evaluation_page import Progress, page
from areal_jax.rollout.evaluation import Evaluation
from areal_jax.types import Sampling

CONFIG = Config(eval=EvaluationConfig(samples=2))


def record(uid, right, tokens=(5, 10)):
    samples = [
        {
            "text": "π", "verdict": float(r), "right": bool(r), "final_answer": str(r), "tokens": t,
            "finish_reason": "stop", "version_min": -1, "version_max": -1,
        }
        for r, t in zip(right, tokens, strict=True)
    ]  # fmt: skip
    return {
        "uid": uid, "prompt": "?", "answer": "1", "task": "", "n": len(right), "right": sum(right), "samples": samples,
    }  # fmt: skip


RECORDS = [record(0, (1, 0)), record(1, (1, 1)), record(4, (0, 0))]
EVALUATION = Evaluation(RECORDS, [2, 3], Sampling(max_new_tokens=20, temperature=0.6, seed=5))
ORIGIN = {
    "model": "[a model]", "data": "d.jsonl", "seconds": 61.0, "tokens": 45, "tokens_per_second": 1234.0, "time": 0.0,
    "unanswered": {},
}  # fmt: skip


def test_a_new_directory_holds_the_settings(tmp_path):
    assert open_directory(tmp_path, CONFIG) == []
    assert (tmp_path / "config.json").read_text() == to_json(CONFIG)
    other = dataclasses.replace(CONFIG, eval=EvaluationConfig(samples=3))
    assert open_directory(tmp_path, other) == [], "nothing was judged yet"


def test_a_stopped_evaluation_goes_on_only_with_the_same_settings(tmp_path):
    open_directory(tmp_path, CONFIG)
    run_files.write_lines(tmp_path / "completions.jsonl", RECORDS)
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"uid": 7, "half a li')
    assert open_directory(tmp_path, CONFIG) == RECORDS
    other = dataclasses.replace(CONFIG, eval=EvaluationConfig(samples=3))
    with pytest.raises(ValueError, match="an evaluation with other settings that was stopped.*give another --out"):
        open_directory(tmp_path, other)
    assert (tmp_path / "config.json").read_text() == to_json(CONFIG)


def test_the_directory_of_a_run_is_refused_and_left_as_it_is(tmp_path):
    run_files.open_run(tmp_path, ["python"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a run"):
        open_directory(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_finished_one_is_refused(tmp_path):
    open_directory(tmp_path, CONFIG)
    close_directory(tmp_path, {"accuracy": 0.5}, EVALUATION)
    with pytest.raises(ValueError, match=f"--out={tmp_path} holds a finished evaluation; give another --out"):
        open_directory(tmp_path, CONFIG)
    assert run_files.read_lines(tmp_path / "completions.jsonl") == RECORDS
    assert "π" in (tmp_path / "completions.jsonl").read_text(encoding="utf-8"), "for a person to read"
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"accuracy": 0.5}
    assert not list(tmp_path.glob("*.tmp"))


def test_two_at_a_time_are_refused(tmp_path):
    with (
        processes.exclusive(tmp_path, setting="--out", remedy="--out"),
        pytest.raises(ValueError, match=rf"--out={tmp_path} belongs to a run that is going on.*another --out$"),
        processes.exclusive(tmp_path, setting="--out", remedy="--out"),
    ):
        pass


def progress(known=(), terminal=False):
    clock = iter(range(0, 1000, 3))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    return Progress(known, console, clock=lambda: next(clock)), console.file


def test_progress_is_a_line_every_few_seconds_and_at_the_end():
    shown, out = progress()
    with shown:
        shown.start(3)  # at 3 s
        shown.add(RECORDS[0])  # at 6 s: too early for a line
        shown.add(RECORDS[1])  # at 9 s, told at 12 s
        shown.add(RECORDS[2])  # at 15 s: the last one
    # 30 tokens in 9 s; one problem in 4.5 s, one is left
    # 45 tokens in 15 s
    assert out.getvalue().splitlines() == [
        "2 of 3 problems, 75.0 % right, 3 tokens/s, 0:09 elapsed, 0:04 left",
        "3 of 3 problems, 50.0 % right, 3 tokens/s, 0:15 elapsed, 0:00 left",
    ]


def test_what_an_earlier_start_judged_counts_for_neither_speed_nor_time():
    shown, out = progress(known=RECORDS[:2])
    with shown:
        shown.start(4)  # at 3 s
        shown.add(record(5, (0, 0)))  # at 6 s
        assert shown.line() == "3 of 4 problems, 50.0 % right, 2 tokens/s, 0:06 elapsed, 0:06 left"  # at 9 s
        assert shown.speed() == {
            "seconds": 9, "tokens": 15, "tokens_per_second": 1.7, "judged_by_earlier_starts": 2,
        }  # fmt: skip
    assert out.getvalue().startswith("2 of 4 problems were judged by an earlier start")
    assert shown.told() == "3 of 4 problems judged"


def test_on_a_terminal_it_is_a_bar_that_renews_itself():
    shown, out = progress(terminal=True)
    with shown:
        shown.start(3)
        shown.add(RECORDS[0])
    assert "━" in out.getvalue() and "1 of 3 problems" in out.getvalue()


def test_the_page_tells_a_truncated_distribution():
    console = Console(file=io.StringIO(), width=100)
    sampling = dataclasses.replace(EVALUATION.sampling, top_p=0.95, top_k=20)
    console.print(page({**ORIGIN, **dataclasses.replace(EVALUATION, sampling=sampling).figures()}, "DIR"))
    assert "temperature 0.6, top-p 0.95, top-k 20, at most 20 tokens" in console.file.getvalue()


def test_the_page_tells_every_figure():
    console = Console(file=io.StringIO(), width=100)
    console.print(page({**ORIGIN, **EVALUATION.figures()}, "DIR"))
    text = console.file.getvalue()
    rows = {line.strip("│ ").split("  ")[0]: " ".join(line.strip("│ ").split()) for line in text.splitlines()}
    assert "[a model]" in rows["model"], "markup is printed as it is"
    assert rows["data"].endswith("d.jsonl, 3 problems, 2 samples each")
    assert rows["sampled"] == "sampled temperature 0.6, at most 20 tokens"
    assert rows["avg@2"] == "avg@2 50.0 %", "three problems are too few for a standard error"
    assert rows["tokens"] == "tokens mean 7.5, p50 8, p99 10, longest 10"
    assert rows["of right"].startswith("of right 3 samples: mean 6.7")
    assert rows["too long"] == "too long 2 problems left out (uid 2, 3)"
    assert rows["took"] == "took 1:01, 1,234 tokens/s"
    assert (rows["k"], rows["pass@k"], rows["maj@k"]) == ("k 1 2", "pass@k 50.0 % 66.7 %", "maj@k 50.0 % 50.0 %")


def test_the_page_tells_the_standard_error_of_ten_problems():
    console = Console(file=io.StringIO(), width=100)
    for count in (9, 10):
        records = [record(uid, (uid % 2, uid % 2)) for uid in range(count)]
        console.print(page({**ORIGIN, **Evaluation(records, [], EVALUATION.sampling).figures()}, "DIR"))
    assert console.file.getvalue().count("±") == 1
    assert "50.0 % ± 16.7 % (standard error)" in console.file.getvalue()  # std sqrt(10 / 4 / 9), / sqrt(10): 1/6


def test_one_problem_is_no_problems():
    console = Console(file=io.StringIO(), width=100)
    one = Evaluation([record(0, (1,), (5,))], [3], EVALUATION.sampling)
    console.print(page({**ORIGIN, **one.figures()}, "DIR"))
    text = console.file.getvalue()
    assert "d.jsonl, 1 problem, 1 sample each" in text and "1 problem left out (uid 3)" in text
    assert "1 sample: mean 5.0" in text


def test_a_page_of_nothing_right_and_one_problem_has_no_holes():
    console = Console(file=io.StringIO(), width=100)
    console.print(page({**ORIGIN, **Evaluation(RECORDS[2:], [], EVALUATION.sampling).figures()}, "DIR"))
    assert "of right  0 samples: –" in console.file.getvalue() and "±" not in console.file.getvalue()
    assert "unanswered" not in console.file.getvalue()


def test_verdicts_that_a_verifier_left_unanswered_are_seen():
    console = Console(file=io.StringIO(), width=100)
    console.print(page({**ORIGIN, **EVALUATION.figures(), "unanswered": {"reward_timeout": 3}}, "DIR"))
    assert "unanswered  3 reward_timeout" in console.file.getvalue()
