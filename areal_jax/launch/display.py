"""The live display of a run in a terminal, or one plain line per step where there is no terminal.

In: the files of a run, read as they grow. Out: text on a console. Called by: `main` while it watches the processes, and
by hand in another terminal, `python -m areal_jax.launch.display DIR`. Waits for nobody; the caller sets the pace:

    with Display(run_dir) as display:
        while running():
            display.update()
            time.sleep(0.2)
"""

import dataclasses
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_jax.launch import run_files, supervised_page
from areal_jax.launch.run_files import Line, Run, column, total

STEPS = 20  # that the averages are over
SECONDS = 15.0  # that a generation server's averages are over
REWARD_RANGE = [("incorrect", 0.0), ("correct", 1.0)]  # settings, and what stands in for them
BLOCKS = "▁▂▃▄▅▆▇█"
STAMP = re.compile(
    r"^([\d-]{10} )?\d\d:\d\d:\d\d\S* +([A-Z]+ +)?(areal_jax[\w.]*: )?"
)  # the format of `main`'s logging
ALARM = re.compile(r"\b(WARNING|ERROR|CRITICAL|\w*(Error|Exception)\b:)")


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the display shows. A figure that is not known yet is None."""

    step: int
    planned: int
    elapsed_s: float
    left_s: float | None  # until the last planned step, at the pace of the last ones
    reward: float | None
    accuracy: float | None  # share right of all rollouts that finished, before any filter
    staleness_mean: float | None
    staleness_max: int | None
    masked: float | None  # share of completion tokens
    trained_per_s: float | None
    generated_per_s: float | None
    trainer_idle: float | None
    generator_idle: float | None
    length_mean: float | None
    length_p99: float | None
    truncated: float | None
    interrupted: int  # trajectories with more than one version, so far


def figures(run: Run, now: float) -> Figures:
    """The run at the time `now` (seconds since 1970)."""
    steps = run.steps[-STEPS:]
    last: Line = steps[-1] if steps else {}
    spent = total(steps, "step_s")
    tokens = total(steps, "tokens/trained") + total(steps, "tokens/masked")
    recent = [[line for line in lines if now - line["time"] <= SECONDS] for lines in run.generators.values()]
    made = [total(lines, "tokens") / total(lines, "interval_s") for lines in recent if lines]
    idle = [share for share in map(run_files.generator_idle, recent) if share is not None]
    pace = float(np.median(column(steps, "step_s"))) if steps else 0.0
    return Figures(
        step=last.get("version", 0),
        planned=run.planned_steps,
        elapsed_s=max(0.0, now - run.begin) if run.begin else 0.0,
        left_s=max(0.0, (run.planned_steps - last["version"]) * pace + last["time"] - now) if steps else None,
        reward=_mean(steps, "reward/mean"),
        accuracy=_right_of_finished(run, now),
        staleness_mean=_mean(steps, "staleness/mean"),
        staleness_max=int(np.nanmax(column(steps, "staleness/max"))) if steps else None,
        masked=total(steps, "tokens/masked") / tokens if tokens else None,
        trained_per_s=total(steps, "tokens/trained") / spent if spent else None,
        generated_per_s=sum(made) if made else None,
        trainer_idle=run_files.trainer_idle(steps),
        generator_idle=sum(idle) / len(idle) if idle else None,
        length_mean=last.get("response/length_mean"),
        length_p99=last.get("response/length_p99"),
        truncated=last.get("response/truncated"),
        interrupted=int(total(run.steps, "trajectories/multi_version")),
    )


def _right_of_finished(run: Run, now: float) -> float | None:
    """Over the last seconds; None while nothing finished."""
    recent = [line for line in run.rollout if now - line["time"] <= SECONDS]
    finished, right = (recent[-1][name] - recent[0][name] if recent else 0 for name in ("finished", "right"))
    return right / finished if finished > 0 else None


def phases(run: Run) -> dict[str, str]:
    """What each process said last, by role, without time, level and module: its phase while the run starts up."""
    return {role: STAMP.sub("", lines[-1]).strip() for role, lines in run.logs.items() if lines}


def last_alarm(run: Run) -> str:
    """The last warning or error among what the processes printed lately, with its role; empty when there is none."""
    alarms = [(line, role) for role, lines in run.logs.items() for line in lines[-50:] if ALARM.search(line)]
    line, role = max(alarms, default=("", ""))  # lines begin with their time
    return f"{role}: {STAMP.sub('', line)}" if line else ""


def sparkline(values: np.ndarray, *, low: float, high: float, width: int = 32) -> str:
    """Means of `width` equal parts of the values [N] as a row of blocks, from `low` (lowest) to `high`."""
    if not len(values):
        return ""
    parts = np.array_split(values, min(width, len(values)))
    share = (np.array([np.nanmean(part) for part in parts]) - low) / max(high - low, 1e-9)
    return "".join(BLOCKS[int(level)] for level in np.clip(share * len(BLOCKS), 0, len(BLOCKS) - 1))


class Display:
    """Shows a run until it is left. On a terminal one panel that renews itself, elsewhere plain lines."""

    def __init__(
        self, directory: pathlib.Path | str, *, console: Console | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._run = Run(directory)
        self._console = console or Console()
        self._clock = clock
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._run.update()  # what a run that goes on has behind it is not told again
        self._printed_steps = max((line["version"] for line in self._run.steps), default=0)
        self._printed_evaluations = len(self._run.evaluations)
        self._printed_phases: dict[str, str] = {}

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Reads what is new and shows it."""
        self._run.update()
        if self._live is None:
            self._print_lines()
        else:
            self._live.update(panel(self._run, self._clock()), refresh=True)

    def _print_lines(self) -> None:
        for role, phase in phases(self._run).items() if not self._run.steps else ():
            if self._printed_phases.get(role) != phase:
                self._printed_phases[role] = phase
                self._print(f"{role}: {phase}")
        for line in self._run.evaluations[self._printed_evaluations :]:
            self._print(f"held-out {line['phase']}: {line['accuracy']:.1%} at version {line['version']}")
        self._printed_evaluations = len(self._run.evaluations)
        last = self._run.steps[-1]["version"] if self._run.steps else 0
        self._printed_steps = min(self._printed_steps, last)  # less than before: back to a checkpoint
        new = [line for line in self._run.steps if line["version"] > self._printed_steps]
        for line in new:
            self._print(step_line(self._run, line, self._clock()))
        self._printed_steps = max([self._printed_steps, *(line["version"] for line in new)])

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def step_line(run: Run, line: Line, now: float) -> str:
    """One training step as one line of text."""
    now_figures = figures(run, now)
    held_out = run.evaluations[-1]["accuracy"] if run.evaluations else None
    parts = [
        f"step {line['version']}/{run.planned_steps}",
        f"reward {line['reward/mean']:+.2f}",
        f"right {_percent(now_figures.accuracy)}",
        f"held-out {_percent(held_out)}",
        f"staleness {line['staleness/mean']:.1f} (max {line['staleness/max']})",
        f"{line['tokens/trained'] / line['step_s']:,.0f} tok/s trained",
        f"{_count(now_figures.generated_per_s)} generated",
        f"idle trainer {_percent(line['idle_s'] / line['step_s'])} generator {_percent(now_figures.generator_idle)}",
        f"{line['step_s']:.2f} s",
        f"left {_clock(now_figures.left_s)}",
    ]
    return "  ".join(parts)


def panel(run: Run, now: float) -> RenderableType:
    """The whole display as one panel: a progress bar over a table, over what the processes say."""
    shown = figures(run, now)
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(width=16)
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    bar.add_row(
        Text(f"step {shown.step} of {shown.planned or '?'}", style="bold"),
        ProgressBar(total=max(shown.planned, 1), completed=shown.step, complete_style="cyan", finished_style="green"),
        Text(f"{_clock(shown.elapsed_s)} elapsed, {_clock(shown.left_s)} left"),
    )
    title = Text.assemble(("areal_jax", "bold cyan"), f"  {run.directory}")
    rows = [bar, Text(), _table(run, shown)] if run.steps or run.evaluations else [bar]
    below = _voices(run, starting=not run.steps)
    return Panel(Group(*rows, *below), title=title, title_align="left", border_style="cyan", padding=(0, 1))


def _table(run: Run, shown: Figures) -> Table:
    reward = column(run.steps, "reward/mean")
    low, high = (run_files.setting(run.config, f"reward.{name}", default) for name, default in REWARD_RANGE)
    held_out = column(run.evaluations, "accuracy")
    rows = {
        "reward": (
            f"{_number(shown.reward, '+.2f')}   right {_percent(shown.accuracy)}",
            sparkline(reward, low=low, high=high),
        ),
        "held-out": (_held_out(run.evaluations), sparkline(held_out, low=0.0, high=1.0)),
        "staleness": (
            f"mean {_number(shown.staleness_mean, '.1f')}   max {_number(shown.staleness_max, 'd')}",
            f"masked as too old {_percent(shown.masked)}",
        ),
        "tokens/s": (
            f"trained {_count(shown.trained_per_s)}",
            f"generated {_count(shown.generated_per_s)}",
        ),
        "idle": (f"trainer {_percent(shown.trainer_idle)}", f"generator {_percent(shown.generator_idle)}"),
        "response": (
            f"mean {_number(shown.length_mean, '.0f')}   p99 {_number(shown.length_p99, '.0f')} tokens",
            f"interrupted {shown.interrupted:,}   cut off {_percent(shown.truncated)}",
        ),
    }
    table = Table.grid(padding=(0, 3))
    for name, (first, second) in rows.items():
        table.add_row(
            Text(name, style="cyan"), Text(first), Text(second, style="green" if second[:1] in BLOCKS else "")
        )
    return table


def _held_out(evaluations: Sequence[Line]) -> str:
    if not evaluations:
        return "–"
    first, last = evaluations[0], evaluations[-1]
    if len(evaluations) == 1:
        return f"{first['accuracy']:.1%} at version {first['version']}"
    return f"{first['accuracy']:.1%} → {last['accuracy']:.1%} at version {last['version']}"


def _voices(run: Run, *, starting: bool) -> list[RenderableType]:
    """What the processes say: all of them while the run starts, later only the newest warning."""
    table = Table.grid(padding=(0, 2))
    if starting:
        for role, phase in phases(run).items():
            table.add_row(Text(role, style="cyan"), Text(phase, overflow="ellipsis", no_wrap=True))
    alarm = last_alarm(run)
    if alarm:
        table.add_row(Text("warning", style="yellow"), Text(alarm, overflow="ellipsis", no_wrap=True))
    return [Text(), table] if table.row_count else []


def _mean(steps: Sequence[Line], name: str) -> float | None:
    values = column(steps, name)
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _clock(seconds: float | None) -> str:
    return "–" if seconds is None else run_files.clock(seconds)


def watch(directory: pathlib.Path) -> None:
    """Follows a run from another terminal, until Ctrl-C."""
    if run_files.setting(Run(directory).config, "sft.data", ""):
        supervised_page.watch(directory)
    with Display(directory) as display:
        while True:
            display.update()
            time.sleep(0.5)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        raise SystemExit("usage: python -m areal_jax.launch.display DIR, where DIR is the directory of a run")
    watch(pathlib.Path(sys.argv[1]))
