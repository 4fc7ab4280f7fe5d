"""What a run of supervised fine-tuning says of itself: lines while it goes on, summary.json and summary.png afterwards.

In: the files of the run. Out: text on a console, and the two files. Called by `launch.supervised`, and for such a run
by the commands `python -m areal_jax.launch.display DIR` and `python -m areal_jax.launch.summary DIR`. Waits for nobody.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from areal_jax.launch import run_files, summary
from areal_jax.launch.run_files import Line, Run, column, setting, total
from areal_jax.launch.summary import Summary

TOLD_S = 1.0  # between two lines of progress
STEPS = 20  # that the pace is measured over


def facts(directory: pathlib.Path) -> Line:
    """What was known before the first update; nothing before it is written."""
    path = directory / "examples.json"
    return json.loads(path.read_text()) if path.exists() else {}


class Progress:
    """One plain line per held-out loss, and about once a second one on the newest update."""

    def __init__(self, directory: pathlib.Path, console: Console, *, clock: Callable[[], float] = time.time) -> None:
        self._run, self._console, self._clock = Run(directory), console, clock
        self._told_at = 0.0
        self._step = self._evaluations = 0

    def begin(self) -> None:
        """What a run that goes on has behind it is not told again."""
        self._run.update()
        self._step = max((line["version"] for line in self._run.steps), default=0)
        self._evaluations = len(self._run.evaluations)

    def update_now_and_then(self) -> None:
        if self._clock() - self._told_at >= TOLD_S:
            self.update()

    def update(self) -> None:
        """Reads what is new and tells it."""
        self._told_at = self._clock()
        self._run.update()
        planned = facts(self._run.directory).get("planned_updates", 0)
        for line in self._run.evaluations[self._evaluations :]:
            self._print(f"held-out {line['phase']}: loss {line['loss']:.4f} at version {line['version']}")
        self._evaluations = len(self._run.evaluations)
        if self._run.steps and self._run.steps[-1]["version"] != self._step:
            self._step = self._run.steps[-1]["version"]
            self._print(step_line(self._run, planned, self._clock()))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def step_line(run: Run, planned: int, now: float) -> str:
    """The newest update as one line of text; pace and speed are those of the last ones."""
    recent = run.steps[-STEPS:]
    line = recent[-1]
    pace, spent = float(np.median(column(recent, "step_s"))), total(recent, "step_s")
    left = max(0.0, (planned - line["version"]) * pace + line["time"] - now)
    held_out = f"{run.evaluations[-1]['loss']:.4f}" if run.evaluations else "–"
    parts = [
        f"step {line['version']}/{planned}",
        f"loss {_number(line['loss'], '.4f')}",
        f"held-out {held_out}",
        f"grad norm {_number(line['grad_norm'], '.2f')}",
        f"{total(recent, 'tokens/trained') / spent:,.0f} tok/s trained",
        f"padding {line['packing/padding']:.0%}",
        f"{line['step_s']:.2f} s",
        f"left {run_files.clock(left)}",
    ]
    return "  ".join(parts)


def watch(directory: pathlib.Path) -> None:
    """Follows a run from another terminal, until Ctrl-C."""
    progress = Progress(directory, Console())
    while True:
        progress.update()
        time.sleep(TOLD_S)


def write(directory: pathlib.Path) -> Summary:
    """Writes summary.json and summary.png into a run's directory and returns the former."""
    from areal_jax.launch import picture  # matplotlib takes a second to import

    run = Run(directory).update()
    found = summarize(run)
    temporary = directory / "summary.json.tmp"
    temporary.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, directory / "summary.json")
    title = str(setting(run.config, "run.name", directory.name))
    picture.draw_supervised(run, directory / "summary.png", title=title, headline=headline(found))
    return found


def summarize(run: Run) -> Summary:
    """The run in numbers. What is not known yet is None; losses are in nats per response token."""
    steps, known = run.steps, facts(run.directory)
    version, planned = steps[-1]["version"] if steps else 0, known.get("planned_updates", 0)
    curve = [[line["version"], line["loss"]] for line in run.evaluations]
    return {
        "version": version,
        "planned_steps": planned,
        "finished": version >= planned > 0,
        "wall_s": round(summary.wall_seconds(run), 3),
        "starts": max(len(run.starts), 1),
        "examples": known.get("examples", {}),
        "too_long": known.get("too_long", {}),
        "planned_epochs": known.get("epochs"),
        "trained_tokens": int(total(steps, "tokens/trained")),
        "held_out_loss": {
            "before": next((line["loss"] for line in run.evaluations if line["phase"] == "before"), None),
            "after": next((line["loss"] for line in run.evaluations[::-1] if line["phase"] == "after"), None),
            "curve": curve,
        },
        "loss": {"first": _mean(steps[:10], "loss"), "last": _mean(steps[-10:], "loss")},
        "padding": _mean(steps, "packing/padding"),
        "tokens_per_second": summary.speed(run)["trained"],
        "updates_skipped": steps[-1]["updates/skipped"] if steps else 0,
        "recompilations_after_warmup": summary.recompilations(run),
    }


def headline(found: Summary) -> str:
    """The run in one line."""
    parts = [f"{found['version']} of {found['planned_steps']} updates in {run_files.clock(found['wall_s'])}"]
    if found["held_out_loss"]["curve"]:
        parts.insert(0, f"held-out loss {_losses(found['held_out_loss'])}")
    parts.append(f"{found['trained_tokens']:,} response tokens trained")
    return "  ·  ".join(parts)


def show(directory: pathlib.Path, found: Summary, console: Console) -> None:
    """Prints the page: the numbers that matter, and where the rest is."""
    too_long = {split: count for split, count in found["too_long"].items() if count}
    rows = {
        "held-out loss": f"[bold]{_losses(found['held_out_loss'])}[/]",
        "loss": f"{_number(found['loss']['first'], '.4f')} → {_number(found['loss']['last'], '.4f')}, ten updates each",
        "updates": f"{found['version']} of {found['planned_steps']} in {run_files.clock(found['wall_s'])}, "
        f"{found['trained_tokens']:,} response tokens trained, {found['updates_skipped']} updates skipped",
        "examples": ", ".join(f"{count:,} {split}" for split, count in found["examples"].items()),
        "left out": ", ".join(f"{count} too long ({split})" for split, count in too_long.items()) or "nothing",
        "speed": f"{_number(found['tokens_per_second'], ',.0f')} response tokens per second, "
        f"padding {_number(found['padding'], '.0%')}",
        "recompiled": f"{found['recompilations_after_warmup']} programs after the first update",
    }
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(f"[cyan]{name}[/]", text)
    console.print(Panel(table, title=f"[bold]{directory}[/]", title_align="left", border_style="cyan"))
    for what, name in [("picture", "summary.png"), ("numbers", "summary.json"), ("what every file is", "README.txt")]:
        console.print(f"[cyan]{what}[/]: {directory / name}", soft_wrap=True, highlight=False)


def _losses(held_out: Summary) -> str:
    """`0.8123 → 0.1034`, or how it was before when it has not been measured since."""
    if not held_out["curve"]:
        return "not measured (sft.eval_data is empty)"
    if len(held_out["curve"]) < 2:
        return f"{_number(held_out['before'], '.4f')}; not measured since"
    return f"{_number(held_out['before'], '.4f')} → {_number(held_out['curve'][-1][1], '.4f')}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _mean(steps: list[Line], name: str) -> float | None:
    values = column(steps, name)
    return None if np.isnan(values).all() else float(np.nanmean(values))
