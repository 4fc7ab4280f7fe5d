"""The live display: figures from a run's files, a panel on a terminal, plain lines elsewhere."""

import io

import numpy as np
import pytest
from rich.console import Console

from areal_jax.launch import display, run_files
from areal_jax.launch.run_files import Run, Tail
from tests.launch.synthetic_run import BEGIN, evaluation, step, write_lines, write_log, write_run


def text_of(renderable, width=100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def run_of(directory, steps, planned=10):
    (directory / "config.json").write_text(f'{{"trainer": {{"steps": {planned}}}}}')
    write_lines(directory / "starts.jsonl", [{"time": BEGIN, "command": []}])
    write_lines(directory / "metrics.jsonl", steps)
    return Run(directory).update()


def test_figures_of_two_steps_by_hand(tmp_path):
    steps = [
        step(1, BEGIN + 10, step_s=4.0, idle_s=3.0, accuracy=0.4, **{"tokens/trained": 90, "tokens/masked": 10}),
        step(2, BEGIN + 12, step_s=2.0, idle_s=0.0, accuracy=0.6, **{"tokens/trained": 60, "tokens/masked": 40}),
    ]
    generation = {"time": BEGIN + 12, "interval_s": 2.0, "busy_s": 1.0, "swap_stall_s": 0.5, "tokens": 300}
    write_lines(tmp_path / "generation-0.jsonl", [generation])
    write_lines(tmp_path / "generation-1.jsonl", [{**generation, "tokens": 100, "busy_s": 1.5}])
    rollout = [{"time": BEGIN + t, "finished": f, "right": r} for t, f, r in [(-9, 0, 0), (0, 100, 10), (12, 200, 60)]]
    write_lines(tmp_path / "rollout.jsonl", rollout)
    shown = display.figures(run_of(tmp_path, steps), now=BEGIN + 13)
    assert (shown.step, shown.planned, shown.elapsed_s) == (2, 10, 13.0)
    assert shown.left_s == 23.0  # 8 steps of (4 + 2) / 2 = 3 s, of which 1 s has gone since the last
    assert shown.reward == pytest.approx(0.0)
    assert shown.accuracy == 0.5  # 50 of 100 in the last 15 s, the filtered ones among them
    assert shown.trained_per_s == 25.0  # 150 tokens in 6 s
    assert shown.masked == 0.25  # 50 of 200
    assert shown.generated_per_s == 200.0  # 300 / 2 + 100 / 2
    assert shown.trainer_idle == 0.5  # 3 of 6 s
    assert shown.generator_idle == 0.125  # 1 - 1.5 / 2 and 1 - 2 / 2, halved
    assert shown.interrupted == 10


def test_a_generator_that_has_gone_quiet_no_longer_counts(tmp_path):
    line = {"time": BEGIN, "interval_s": 1.0, "busy_s": 1.0, "swap_stall_s": 0.0, "tokens": 300}
    write_lines(tmp_path / "generation-0.jsonl", [line])
    run = Run(tmp_path).update()
    assert display.figures(run, now=BEGIN + 1).generated_per_s == 300.0
    assert display.figures(run, now=BEGIN + 60).generated_per_s is None


def test_nothing_is_known_before_the_first_file(tmp_path):
    shown = display.figures(Run(tmp_path / "absent").update(), now=BEGIN)
    assert shown.step == 0 and shown.left_s is None and shown.reward is None
    assert "step 0 of ?" in text_of(display.panel(Run(tmp_path / "absent"), BEGIN))


def test_the_panel_shows_what_each_process_does_while_the_run_starts(tmp_path):
    write_log(tmp_path, "trainer", "loading the model", "compiling 12 programs")
    write_log(tmp_path, "generator-0", "compiling: decode 64")
    text = text_of(display.panel(run_of(tmp_path, []), BEGIN + 5))
    assert "compiling 12 programs" in text and "loading the model" not in text
    assert "generator-0" in text and "compiling: decode 64" in text
    assert "0:05 elapsed" in text


def test_the_panel_shows_every_figure_of_a_run(tmp_path):
    write_run(tmp_path, steps=40, planned=120)
    run = Run(tmp_path).update()
    text = text_of(display.panel(run, run.end + 1))
    for word in ("step 40 of 120", "elapsed", "left", "reward", "right", "held-out", "staleness", "masked", "tokens/s"):
        assert word in text
    for word in ("trained", "generated", "idle", "trainer", "generator", "p99", "interrupted", "cut off", "44.0% →"):
        assert word in text
    assert "▅" in text  # the curve of the reward


def test_a_warning_of_any_process_stays_in_sight(tmp_path):
    write_log(tmp_path, "rollout", "prompt 7 failed: too long", level="WARNING")
    write_log(tmp_path, "rollout", "step done")
    text = text_of(display.panel(run_of(tmp_path, [step(1, BEGIN + 1)]), BEGIN + 2))
    assert "rollout: prompt 7 failed: too long" in text and "step done" not in text


def test_what_an_earlier_start_printed_is_not_told_again(tmp_path):
    run_files.open_run(tmp_path, ["python"])
    write_log(tmp_path, "trainer", "error: the first mistake", level="ERROR")
    run_files.open_run(tmp_path, ["python"])
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with display.Display(tmp_path, console=console) as shown:
        shown.update()
        assert display.last_alarm(Run(tmp_path).update()) == ""
        write_log(tmp_path, "trainer", "compiling")
    assert console.file.getvalue().splitlines() == ["trainer: compiling"]


def test_without_a_terminal_each_step_is_one_plain_line_and_printed_once(tmp_path):
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with display.Display(tmp_path, console=console, clock=lambda: BEGIN + 20) as shown:
        write_log(tmp_path, "trainer", "compiling")
        shown.update()
        write_lines(tmp_path / "evaluations.jsonl", [evaluation("before", 0, BEGIN + 5, 0.4375)])
        run_of(tmp_path, [step(1, BEGIN + 10)])
        shown.update()
        shown.update()
        write_lines(tmp_path / "metrics.jsonl", [step(2, BEGIN + 11, accuracy=0.75)])
        rollout = [{"time": BEGIN + t, "finished": 4 * t, "right": 3 * t} for t in (10, 20)]
        write_lines(tmp_path / "rollout.jsonl", rollout)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["trainer: compiling", "held-out before: 43.8% at version 0"]
    assert [line.split("  ")[0] for line in lines[2:]] == ["step 1/10", "step 2/10"]
    assert "reward +2.50  right 75%  held-out 44%  staleness 1.0 (max 2)  390 tok/s trained" in lines[3]
    assert "idle trainer 25%" in lines[3] and "left" in lines[3]
    assert "\x1b" not in console.file.getvalue()


def test_on_a_terminal_one_panel_renews_itself_and_stays_at_the_end(tmp_path):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    write_run(tmp_path, steps=5)
    with display.Display(tmp_path, console=console, clock=lambda: BEGIN + 60) as shown:
        shown.update()
    assert console.file.getvalue().count("\x1b[2K") > 3  # lines of the first panel are overwritten by the second
    assert "step 5 of 5" in console.file.getvalue()


def test_a_line_that_is_half_written_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1}\n{"ver')
    tail = Tail(path)
    tail.update()
    assert tail.items == [{"version": 1}]
    with path.open("a") as file:
        file.write('sion": 2}\n')
    tail.update()
    tail.update()
    assert tail.items == [{"version": 1}, {"version": 2}]


def test_a_file_that_a_resumed_run_cut_is_read_anew(tmp_path):
    run = run_of(tmp_path, [step(version, BEGIN + version) for version in range(1, 6)])
    (tmp_path / "metrics.jsonl").write_text("")
    write_lines(tmp_path / "metrics.jsonl", [step(version, BEGIN + version) for version in (1, 2, 3)])
    assert [line["version"] for line in run.update().steps] == [1, 2, 3]


def test_sparkline_spreads_from_low_to_high():
    assert display.sparkline(np.array([0.0, 0.5, 1.0]), low=0.0, high=1.0) == "▁▅█"
    assert display.sparkline(np.array([0.0, 1.0, 1.0, 0.0]), low=0.0, high=1.0, width=2) == "▅▅"  # two means of 0.5
    assert display.sparkline(np.array([]), low=0.0, high=1.0) == ""
