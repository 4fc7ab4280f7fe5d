"""summary.json, summary.png and the page at the end, from the files of a run alone."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from areal_jax.launch import picture, run_files, summary, timeline
from areal_jax.launch.run_files import Run
from tests.launch.synthetic_run import BEGIN, config, evaluation, step, write_lines, write_run


def small_run(directory, *, overdue="mask"):
    """Three steps with round numbers: 10 s of start-up, then 4 s and 2 s."""
    settings = config(steps=3, max_staleness=1)
    settings["rollout"]["overdue"] = overdue
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    write_lines(directory / "starts.jsonl", [{"time": BEGIN, "command": ["python"]}])
    gaps = [
        {"logp_gap/p50": 1.0, "logp_gap/p99": 2.0, "logp_gap/max": 9.0, "logp_gap/tokens": 10},
        {"logp_gap/p50": 4.0, "logp_gap/p99": 6.0, "logp_gap/max": 7.0, "logp_gap/tokens": 30},
        {"logp_gap/p50": None, "logp_gap/p99": None, "logp_gap/max": None, "logp_gap/tokens": None},
    ]
    histograms = [[50, 0, 0], [10, 20, 10], [0, 30, 0]]
    compiled = [7, 7, 9]
    times = [(10.0, 10.0, 9.0), (14.0, 4.0, 1.0), (16.0, 2.0, 2.0)]  # end, step_s, idle_s
    write_lines(
        directory / "metrics.jsonl",
        [
            step(
                version + 1, BEGIN + end, step_s=seconds, idle_s=idle,
                **gaps[version],
                **{
                    "staleness/histogram": histograms[version], "tokens/trained": sum(histograms[version][:2]),
                    "tokens/masked": histograms[version][2], "compilations": compiled[version],
                    "dropped": {"overdue": 0, "too_long": version}, "trajectories/multi_version": version,
                },
            )
            for version, (end, seconds, idle) in enumerate(times)
        ],
    )  # fmt: skip
    scores = [("before", 0, 6, 0.25), ("during", 2, 15, 0.5), ("after", 3, 20, 0.75)]
    write_lines(
        directory / "evaluations.jsonl", [evaluation(phase, v, BEGIN + at, score) for phase, v, at, score in scores]
    )
    generation = {"interval_s": 2.0, "swap_stall_s": 0.5, "swaps": 1, "recomputed_tokens": 5, "compilations": 4}
    write_lines(
        directory / "generation-0.jsonl",
        [
            {**generation, "time": BEGIN + 10.0, "busy_s": 0.0, "tokens": 1000},  # start-up, not in the idle share
            {**generation, "time": BEGIN + 12.0, "busy_s": 1.0, "tokens": 100},
            {**generation, "time": BEGIN + 14.0, "busy_s": 1.5, "tokens": 300},
        ],
    )
    return directory


def test_every_field_that_a_machine_reads_by_hand(tmp_path):
    found = summary.summarize(Run(small_run(tmp_path)).update())
    assert found["version"] == 3 and found["finished"]
    assert found["wall_s"] == 20.0  # the last line is the evaluation's
    assert found["trained_tokens"] == 110  # 50 + 30 + 30
    assert found["masked_tokens"] == 10
    assert found["held_out"] == {"before": 0.25, "after": 0.75, "curve": [[0, 0.25], [2, 0.5], [3, 0.75]]}
    assert found["staleness"] == {
        "mean": pytest.approx(50 / 110),  # 60 tokens of staleness 0 and 50 of 1; the 10 of staleness 2 were masked
        "max": 1,
        "histogram": [60, 50],
        "arrived": [60, 50, 10],
    }
    assert found["swaps_mid_sequence"] == 3  # 0 + 1 + 2
    # p50: (1 * 10 + 4 * 30) / 40; p99: (2 * 10 + 6 * 30) / 40; a step without such tokens does not count
    assert found["logp_gap"] == {"p50": 3.25, "p99": 5.0, "max": 9.0, "tokens": 40}
    # from the first step's end on: trainer 1 + 2 of 6 s; generator 1 - (1 + 1.5 + 2 * 0.5) / 4
    assert found["idle"] == {"trainer": 0.5, "generator": 0.125, "generators": [0.125]}
    assert found["tokens_per_second"] == {"trained": 10.0, "generated": 100.0}  # 60 / 6 s and 400 / 4 s
    assert found["recompilations_after_warmup"] == 2  # 9 - 7
    assert found["dropped"] == {"overdue": 0, "too_long": 2}
    assert found["generated_tokens"] == 1400


@pytest.mark.parametrize("overdue", ["train", "drop"])
def test_staleness_counts_every_token_that_no_mask_took_out(tmp_path, overdue):
    found = summary.summarize(Run(small_run(tmp_path, overdue=overdue)).update())
    assert found["staleness"]["histogram"] == [60, 50, 10] and found["staleness"]["max"] == 2


def test_rollouts_give_reward_over_finished_and_share_right_of_all():
    lines = [{"started": 10, "finished": 8, "right": 6, "failed": {"reward": 2}}]  # 6 right, 2 wrong, 2 failed
    found = summary.rollouts(lines)
    assert found["right_of_finished"] == 0.75 and found["right_of_settled"] == 0.6
    assert found["failed"] == {"reward": 2}


def test_rollouts_of_a_run_that_was_started_twice_add_up():
    lines = [
        {"started": 4, "finished": 2, "right": 1, "failed": {}},
        {"started": 9, "finished": 8, "right": 6, "failed": {"reward": 1}},
        {"started": 3, "finished": 0, "right": 0, "failed": {}},  # the controller counts from 0 again
        {"started": 5, "finished": 4, "right": 2, "failed": {"reward": 1, "too_long": 1}},
    ]
    found = summary.rollouts(lines)
    assert (found["started"], found["finished"], found["right"]) == (14, 12, 8)
    assert found["failed"] == {"reward": 2, "too_long": 1}


def test_wall_time_leaves_out_the_time_between_two_starts(tmp_path):
    write_lines(tmp_path / "starts.jsonl", [{"time": BEGIN}, {"time": BEGIN + 1000}])
    steps = [step(1, BEGIN + 10), step(2, BEGIN + 20, compilations=12), step(3, BEGIN + 1030, compilations=20)]
    steps += [step(4, BEGIN + 1031, compilations=20), step(5, BEGIN + 1033, compilations=21)]
    write_lines(tmp_path / "metrics.jsonl", steps)
    found = summary.summarize(Run(tmp_path).update())
    assert found["wall_s"] == 53.0 and found["starts"] == 2  # 20 + 33
    assert found["recompilations_after_warmup"] == 1  # the second start's warm-up is none


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_was_killed_early_still_has_a_summary_and_a_picture(tmp_path, steps):
    if steps:
        write_run(tmp_path, steps=steps, planned=100)
    found = summary.write(tmp_path)
    assert found["version"] == steps and not found["finished"] and found["held_out"]["after"] is None
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    assert (tmp_path / "summary.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def test_the_picture_is_drawn_in_all_of_its_panels(tmp_path):
    write_run(tmp_path, steps=60, generators=2)
    summary.write(tmp_path)
    pixels = np.asarray(Image.open(tmp_path / "summary.png").convert("RGB")).astype(int)
    for colour in [picture.REWARD, picture.HELD_OUT, picture.LATE, *picture.COLOURS.values()]:
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(axis=-1) < 3).sum() > 20, colour


def test_the_page_at_the_end_shows_a_completion_before_and_after(tmp_path):
    write_run(tmp_path, steps=30)
    console = Console(file=io.StringIO(), width=110, color_system=None)
    summary.show(tmp_path, summary.write(tmp_path), console)
    text = console.file.getvalue()
    assert "44% →" in text and "30 of 30 in" in text and "summary.png" in text
    assert "17 - 5 + 30 - 12 =   (answer 30)" in text
    before, after = (next(line for line in text.splitlines() if f"│ {when} " in line) for when in ("before", "after"))
    assert "wrong" in before and "12 42 31 ; 31" in before
    assert "right" in after and "12 42 30 ; 30" in after


def test_markup_in_a_completion_is_printed_as_it_is():
    line = {"uid": 0, "prompt": "[b]", "answer": "", "right": False, "completion": "[/red] [x]"}
    lines = [{**line, "phase": "before"}, {**line, "phase": "after"}]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    for before, after in summary.completion_pairs(lines):
        console.print(summary._pair(before, after))
    assert "[/red] [x]" in console.file.getvalue() and "[b]" in console.file.getvalue()


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nYou are.<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\nOh.<|im_end|>"
        "\n<|im_start|>user\nWhat is\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nWhat is\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\nWhat is\n2+2?<end_of_turn>\n<start_of_turn>model\n",
        "What is\n2+2?",
    ],
)
def test_the_title_of_a_sample_is_what_the_user_says_last(prompt):
    assert summary._question(prompt) == "What is 2+2?"


def test_a_prompt_without_marks_is_shown_as_it_is():
    assert summary._question("the\nuser\nsays |x| < 2") == "the user says |x| < 2"


def test_shares_are_overlaps_of_segments_with_bins():
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    # 0.5..3 covers half of the first bin, all of the second, half of the third
    np.testing.assert_allclose(timeline.shares([(0.5, 3.0)], edges), [0.5, 1.0, 0.5])


def test_the_parts_of_a_step_fill_it_and_nothing_else():
    line = step(1, 10.0, step_s=4.0, idle_s=1.0, prox_s=0.5, update_s=1.5, publish_wait_s=0.0, checkpoint_s=0.5)
    shares = timeline.trainer_shares([line], np.arange(5.0, 12.0))
    np.testing.assert_allclose(sum(shares.values()), [0, 1, 1, 1, 1, 0])  # from 6 to 10
    np.testing.assert_allclose(shares[timeline.IDLE], [0, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(shares[timeline.REST], [0, 0, 0, 0, 0.5, 0])  # 4 - 1 - 0.5 - 1.5 - 0.5


def test_opening_a_run_explains_its_files_and_counts_its_starts(tmp_path):
    run_files.open_run(tmp_path / "new" / "run", ["python", "-m", "areal_jax.main"])
    run_files.open_run(tmp_path / "new" / "run", ["python", "-m", "areal_jax.main"])
    directory = tmp_path / "new" / "run"
    assert len(run_files.read_lines(directory / "starts.jsonl")) == 2
    files = "summary.png metrics.jsonl evaluations.jsonl rollout.jsonl completions.jsonl evaluations/ logs/ skipped/"
    files += " timeline.json publishes.jsonl profile/"
    for name in files.split():
        assert name in (directory / "README.txt").read_text()
