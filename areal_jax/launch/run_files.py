"""The files of a run, as the display, the summary and the picture read them.

In: a run's directory that other processes write to. Out: whole lines as dicts, and the few figures that more than one
reader needs. Called by: `display`, `summary`, `picture`, and `main` for `open_run`. Waits for nobody: a file that does
not exist yet, a last line that is half written, a run that is going on or was killed are all read as they are.
"""

import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Line = dict[str, Any]

README = """This is the directory of one run of areal_jax. Everything here can be read while the run goes on.

summary.png         the run as a picture: reward and held-out score, staleness, response length, who was idle when
summary.json        the run in numbers; written again by `python -m areal_jax.launch.summary DIR`
timeline.json       what every process did when, on one clock: open it in https://ui.perfetto.dev (the file stays on
                    your machine) or chrome://tracing; across machines the tracks are as exact as their clocks agree
config.json         the whole configuration, defaults and overrides resolved
metrics.jsonl       the trainer, one line per training step; the README of the repository explains each name
trainer-N.jsonl     process N of the trainer, where there are several: its own times of each training step
evaluations.jsonl   the held-out score, one line per evaluation: phase before | during | after, and the version asked
rollout.jsonl       the rollout controller, about a line per second; started, finished, failed and right are totals,
                    and reward_unanswered, by cause: completions that the verifier could not get through, so wrong;
                    gate_closed and judging: each [begin, end] since the line before of waiting at the staleness
                    gate, and of verdicts being awaited from the reward workers
skipped.jsonl       prompts to train on that were not asked, with the cause: too_long has tokens and their limit; again
                    after a start that goes on from an older checkpoint; held-out ones are in evaluations.jsonl
skipped/            VERSION.npz: the first minibatch of the step from that version whose gradient was not finite, so
                    that no update was made of it; arrays [rows, tokens] by microbatch ("0/tokens"); the newest three
publishes.jsonl     each version that was published: total_s seconds until `time`, of these copy_s from the devices,
                    write_s into the file, push_s until the servers had loaded it
generation-N.jsonl  generation server N, about a line per second; interval_s, busy_s, tokens, requests, swaps,
                    swap_stall_s and recomputed_tokens are those of the interval; waits: [begin, end] of waiting for
                    requests; swapped: each swap with its end, its stall and the part that rebuilt the caches
evaluations/        all completions of each evaluation, VERSION-PHASE.jsonl: one line per problem, with its samples
completions.jsonl   a few held-out prompts with their completions before and after training
starts.jsonl        one line per start of this run: a run that was stopped goes on with the same command; "logs" has the
                    bytes that each log held by then
logs/ROLE.log       what each process printed
checkpoints/        the newest states of the trainer and the queue; the same command continues from the last one
profile/            traces of the steps of profile.steps by process: tensorboard --logdir DIR/profile, with xprof
tensorboard/        the numbers of metrics.jsonl for TensorBoard: tensorboard --logdir DIR/tensorboard

To watch the run from another terminal: python -m areal_jax.launch.display DIR
Times are seconds since 1970; a version is the number of training steps behind a set of weights.
"""


def open_run(directory: pathlib.Path, command: Sequence[str], *, readme: str = README) -> None:
    """Makes the directory, explains its files in a README.txt, and notes that the run starts (again) now.

    Logs are appended to. Their sizes are noted too, so that what an earlier start printed is not told again.
    """
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    (directory / "README.txt").write_text(readme)
    sizes = {path.name: path.stat().st_size for path in sorted((directory / "logs").glob("*.log"))}
    with (directory / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "command": list(command), "logs": sizes}) + "\n")


def newest_checkpoint(directory: pathlib.Path) -> int | None:
    """Version of the newest whole checkpoint of a run; one that is half written has another name."""
    versions = [int(path.name) for path in (directory / "checkpoints").glob("*") if path.name.isdigit()]
    return max(versions, default=None)


def write_lines(path: pathlib.Path, lines: Sequence[Line]) -> None:
    """A whole JSONL file at once: whoever reads it finds all of it or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    os.replace(temporary, path)


class Tail:
    """The whole lines of a file from the byte `begin` on, more of them at each `update`.

    Read anew, from its first byte, when the file has become shorter.
    """

    def __init__(self, path: pathlib.Path, parse: Callable[[str], Any] = json.loads, *, begin: int = 0) -> None:
        self.items: list[Any] = []
        self._path = path
        self._parse = parse
        self._position = begin

    def update(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._position:  # a run that went on from a checkpoint dropped its later lines
                self._position = 0
                self.items.clear()
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        self.items += [self._parse(line) for line in whole.decode(errors="replace").split("\n") if line.strip()]


def read_lines(path: pathlib.Path) -> list[Line]:
    """Every whole line of a JSONL file; none when there is no such file."""
    tail = Tail(path)
    tail.update()
    return tail.items


class Run:
    """A run as its files tell it; `update` takes in what was written since the last call."""

    def __init__(self, directory: pathlib.Path | str) -> None:
        self.directory = pathlib.Path(directory)
        self._tails: dict[pathlib.Path, Tail] = {}
        self.steps = self._tail("metrics.jsonl").items
        self.evaluations = self._tail("evaluations.jsonl").items
        self.rollout = self._tail("rollout.jsonl").items
        self.publishes = self._tail("publishes.jsonl").items
        self.starts = self._tail("starts.jsonl").items

    def update(self) -> "Run":
        """Returns itself."""
        for kind in ("generation", "trainer"):
            for path in self.directory.glob(f"{kind}-*.jsonl"):
                self._tail(path.name)
        self._tail("starts.jsonl").update()
        earlier = self.starts[-1].get("logs", {}) if self.starts else {}
        for path in self.directory.glob("logs/*.log"):
            self._tail(f"logs/{path.name}", str, begin=earlier.get(path.name, 0))
        for tail in self._tails.values():
            tail.update()
        return self

    def _tail(self, name: str, parse: Callable[[str], Any] = json.loads, *, begin: int = 0) -> Tail:
        return self._tails.setdefault(self.directory / name, Tail(self.directory / name, parse, begin=begin))

    @property
    def generators(self) -> dict[str, list[Line]]:
        """Lines of each generation server, by the stem of its file."""
        return self._of_kind("generation")

    @property
    def trainers(self) -> dict[str, list[Line]]:
        """Lines of each process of the trainer but the first, whose are `steps`, by the stem of its file."""
        return self._of_kind("trainer")

    def _of_kind(self, kind: str) -> dict[str, list[Line]]:
        return {
            path.stem: tail.items
            for path, tail in sorted(self._tails.items())
            if path.suffix == ".jsonl" and path.stem.startswith(f"{kind}-")
        }

    @property
    def logs(self) -> dict[str, list[str]]:
        """Lines that each process printed since the run's last start before it was first read, by role."""
        return {path.stem: tail.items for path, tail in sorted(self._tails.items()) if path.suffix == ".log"}

    @property
    def config(self) -> Line:
        """The resolved configuration; empty until it is written."""
        path = self.directory / "config.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def planned_steps(self) -> int:
        return int(setting(self.config, "trainer.steps", 0))

    @property
    def begin(self) -> float:
        """When the run first started; for a directory without starts.jsonl, the earliest time in any line."""
        times = [line["time"] for line in self.starts] or [
            line["time"] - line.get("step_s", line.get("interval_s", 0.0))
            for lines in (self.steps, self.rollout, self.evaluations, *self.generators.values())
            for line in lines[:1]
        ]
        return min(times, default=0.0)

    @property
    def end(self) -> float:
        """The latest time in any line."""
        return max((line["time"] for line in self._ends()), default=self.begin)

    def _ends(self) -> list[Line]:
        every = (self.steps, self.rollout, self.evaluations, *self.generators.values())
        return [lines[-1] for lines in every if lines]


def setting(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A value of the resolved configuration by its dotted name."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def column(lines: Sequence[Line], name: str) -> np.ndarray:
    """One metric of many lines, [len(lines)] float64; NaN where a line does not have it."""
    return np.array([np.nan if line.get(name) is None else line[name] for line in lines], np.float64)


def total(lines: Sequence[Line], name: str) -> float:
    return float(np.nansum(column(lines, name)))


def spans(run: Run) -> list[tuple[float, float]]:
    """From the end of the first step to the end of the last one, for each start of the run that made two steps."""
    starts = [line["time"] for line in run.starts] or [run.begin]
    steps = [[s["time"] for s in run.steps if a <= s["time"] < b] for a, b in itertools.pairwise([*starts, math.inf])]
    return [(times[0], times[-1]) for times in steps if len(times) > 1]


def steady(run: Run, lines: Sequence[Line]) -> list[Line]:
    """The lines inside `spans`: without start-up and what follows the last step. All of them while there is no span."""
    inside = spans(run)
    return [line for line in lines if any(first < line["time"] <= last for first, last in inside)] or list(lines)


def trainer_idle(steps: Sequence[Line]) -> float | None:
    """Share of the trainer's time spent waiting for batches; None without a step."""
    spent = total(steps, "step_s")
    return total(steps, "idle_s") / spent if spent else None


def generator_idle(lines: Sequence[Line]) -> float | None:
    """Share of a generation server's time with neither decoding nor a weight swap; None without a line."""
    spent = total(lines, "interval_s")
    return max(0.0, 1.0 - (total(lines, "busy_s") + total(lines, "swap_stall_s")) / spent) if spent else None


def staleness_histogram(steps: Sequence[Line]) -> np.ndarray:
    """Consumed completion tokens by staleness 0, 1, 2, ..., summed over steps."""
    histograms = [line["staleness/histogram"] for line in steps if line.get("staleness/histogram")]
    summed = np.zeros(max(map(len, histograms), default=0), np.int64)
    for histogram in histograms:
        summed[: len(histogram)] += histogram
    return summed


def clock(seconds: float) -> str:
    """`4:07` or `1:02:33`."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
