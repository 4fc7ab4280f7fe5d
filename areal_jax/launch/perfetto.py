"""timeline.json: what every process of a run did when, on one clock, for https://ui.perfetto.dev or chrome://tracing.

In: the files of a run, finished, going on or killed. Out: a file in Chrome's Trace Event Format. Called by `summary`.
Waits for nobody.

    trainer             a slice per training step, in it waiting for a batch, packing, the proximal pass, the update,
                        waiting for the publish before, the checkpoint; beside it each publish with its stages,
                        and the same steps as each further process of the trainer spent them
    generation server   generating, waiting for requests, swapping weights (and in that, rebuilding caches); an arrow
                        from the publish of a version to each swap that took it
    rollout controller  when the staleness gate was closed; when the reward workers had to judge; evaluations

and as counters what is in flight, waits, runs. A step that was lost with its process and made again is there once, as
in metrics.jsonl.

One clock: each process stamps its lines with the clock of its machine. On one machine that is one clock; across
machines the tracks are as far apart as the machines' clocks are, some milliseconds under NTP.

The format wants slices of a track to nest or to follow one another: what overlaps by rounding, or because a clock was
set back, is cut (`_placed`). Its times are whole microseconds since the run's start.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_jax.launch import timeline
from areal_jax.launch.run_files import Line, Run, setting

Event = dict[str, Any]
Track = tuple[int, int]  # (pid, tid) in the file; not those of the machine

STEP, PUBLISH = (1, 1), (1, 2)  # of the trainer
GATE, JUDGING, EVALUATION = (2, 1), (2, 2), (2, 3)  # of the rollout controller
FIRST_GENERATOR, ENGINE = 3, 1
NAMES = {
    "idle_s": "wait for a batch",
    "pack_s": "pack",
    "prox_s": "proximal pass",
    "update_s": "update",
    "publish_wait_s": "wait for the publish before",
    "checkpoint_s": "checkpoint",
}
STEP_FIGURES = ("tokens/trained", "staleness/mean", "reward/mean", "model_tflops_per_s", "mfu")
EVALUATION_FIGURES = ("phase", "accuracy", "prompts", "samples")
STAGES = {  # of a publish, in the order in which they happen
    "copy_s": "copy from the devices",
    "write_s": "write the file",
    "push_s": "servers load it",
    "stall_s": "server takes it",
}
GAP_S = 3.0  # between two lines of a server: it was not there, as it writes one about every second
CLOCKS_S = 1.0  # by which the clocks of two machines may differ, when a swap is looked for in a publish


@dataclasses.dataclass(frozen=True)
class Slice:
    """Something that took from `begin` to `end`, in seconds since 1970, with what happened inside of it."""

    name: str
    begin: float
    end: float
    figures: Line = dataclasses.field(default_factory=dict)
    inside: Sequence["Slice"] = ()


def write(run: Run, path: pathlib.Path) -> None:
    """Writes the file, whole or not at all; an event per line."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events(run))
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text('{"displayTimeUnit": "ms", "traceEvents": [\n' + lines + "\n]}\n")
    os.replace(temporary, path)


def events(run: Run) -> list[Event]:
    """Every event of the file."""
    servers = dict(enumerate(run.generators.values(), start=FIRST_GENERATOR))
    return [
        *_starts(run),
        *_trainer(run),
        *_rollout(run),
        *(event for pid, lines in servers.items() for event in _server(pid, lines, run.begin)),
        *_arrows(run, servers),
    ]


def _trainer(run: Run) -> list[Event]:
    pid = STEP[0]
    others = {(pid, PUBLISH[1] + n): (name, lines) for n, (name, lines) in enumerate(run.trainers.items(), start=1)}
    own = {track: f"training steps, {name}" for track, (name, _) in others.items()}
    return [
        *_names(pid, "trainer", {STEP: "training steps", PUBLISH: "publisher", **own}),
        *_placed(STEP, map(_step, run.steps), run.begin),
        *_placed(PUBLISH, map(_publish, run.publishes), run.begin),
        *(event for track, (_, lines) in others.items() for event in _placed(track, map(_step, lines), run.begin)),
        *_counters(pid, run.steps, {"trajectories waiting": "queue/waiting", "staleness": "staleness/mean"}, run.begin),
    ]


def _rollout(run: Run) -> list[Event]:
    pid, group_size = GATE[0], setting(run.config, "rollout.group_size", 1)
    groups = [{"time": line["time"], "groups": line["in_flight"] // group_size} for line in run.rollout]
    return [
        *_names(
            pid, "rollout controller", {GATE: "staleness gate", JUDGING: "reward workers", EVALUATION: "evaluation"}
        ),
        *_placed(GATE, _spans("gate closed", run.rollout, "gate_closed"), run.begin),
        *_placed(JUDGING, _spans("judge", run.rollout, "judging"), run.begin),
        *_placed(EVALUATION, map(_evaluation, run.evaluations), run.begin),
        *_counters(pid, run.rollout, {"trajectories in flight": "in_flight"}, run.begin),
        *_counters(pid, groups, {"groups in flight": "groups"}, run.begin),
    ]


def _server(pid: int, lines: Sequence[Line], origin: float) -> list[Event]:
    speed = [{"time": line["time"], "speed": round(line["tokens"] / line["interval_s"])} for line in lines]
    return [
        *_names(pid, f"generation server {pid - FIRST_GENERATOR}", {(pid, ENGINE): "engine"}),
        *_placed((pid, ENGINE), _engine(lines), origin),
        *_counters(pid, speed, {"tokens per second": "speed"}, origin),
        *_counters(pid, lines, {"slots active": "active", "samples waiting": "waiting"}, origin),
    ]


# What each process did.


def _step(line: Line) -> Slice:
    parts = timeline.step_parts(line)
    inside = [Slice(name, *parts[key]) for key, name in NAMES.items()]
    figures = {name: line[name] for name in STEP_FIGURES if name in line}
    return Slice(f"step {line['version']}", line["time"] - line["step_s"], line["time"], figures, inside)


def _publish(line: Line) -> Slice:
    begin = at = line["time"] - line["total_s"]
    inside = []
    for key, name in STAGES.items():
        if key in line:
            inside.append(Slice(name, at, at + line[key]))
            at += line[key]
    return Slice(f"publish version {line['version']}", begin, line["time"], {}, inside)


def _spans(name: str, lines: Sequence[Line], field: str) -> list[Slice]:
    """The times that a field of the lines lists. The controller cuts a long one at each line, which is mended here."""
    return _joined(Slice(name, *span) for line in lines for span in line.get(field, ()))


def _evaluation(line: Line) -> Slice:
    figures = {name: line[name] for name in EVALUATION_FIGURES if name in line}
    return Slice(f"evaluation of version {line['version']}", line["time"] - line["seconds"], line["time"], figures)


def _engine(lines: Sequence[Line]) -> list[Slice]:
    """What a server did from its first line to its last; nothing of lines that do not say when it waited."""
    lines = [line for line in lines if "waits" in line]
    waits = _joined(Slice("wait for requests", *wait) for line in lines for wait in line["waits"])
    swaps = [_swap(swap) for line in lines for swap in line["swapped"]]
    known = sorted([*waits, *swaps], key=_begin)
    there = _joined((Slice("", line["time"] - line["interval_s"], line["time"]) for line in lines), gap_s=GAP_S)
    return [*known, *(part for whole in there for part in _generating(whole, known))]


def _swap(swap: Line) -> Slice:
    end = swap["time"]
    inside = [Slice("rebuild caches", end - swap["recompute_s"], end)] if swap["recomputed_tokens"] else []
    figures = {"recomputed_tokens": swap["recomputed_tokens"]}
    return Slice(f"swap to version {swap['version']}", end - swap["stall_s"], end, figures, inside)


def _generating(whole: Slice, known: Sequence[Slice]) -> Iterator[Slice]:
    """What `known`, which rises, leaves of a time in which the server was there."""
    at = whole.begin
    for part in known:
        if whole.begin < part.end and part.begin < whole.end:
            yield Slice("generate", at, part.begin)
            at = max(at, part.end)
    yield Slice("generate", at, whole.end)


def _joined(parts: Iterable[Slice], *, gap_s: float = 1e-4) -> list[Slice]:
    """The slices, which rise; those that follow within `gap_s` are one."""
    joined: list[Slice] = []
    for part in parts:
        if joined and part.begin - joined[-1].end <= gap_s:
            joined[-1] = dataclasses.replace(joined[-1], end=max(joined[-1].end, part.end))
        else:
            joined.append(part)
    return joined


def _begin(part: Slice) -> float:
    return part.begin


# The format.


def _placed(track: Track, parts: Iterable[Slice], origin: float) -> list[Event]:
    """Slices of one track, in the order in which they begin, and in each what is inside of it."""

    def place(parts: Iterable[Slice], first: int, last: float) -> Iterator[Event]:
        at = first
        for part in sorted(parts, key=_begin):
            begin, end = max(_micros(part.begin, origin), at), min(_micros(part.end, origin), last)
            if begin < end:
                yield _event("X", track, part.name, begin, dur=int(end) - begin, args=part.figures)
                yield from place(part.inside, begin, end)
                at = int(end)

    return list(place(parts, 0, math.inf))


def _counters(pid: int, lines: Sequence[Line], figures: Mapping[str, str], origin: float) -> list[Event]:
    """A counter by each name of `figures`, of the figure that it shows, where a line has it."""
    return [
        _event("C", (pid, 0), name, _micros(line["time"], origin), args={"value": line[figure]})
        for name, figure in figures.items()
        for line in lines
        if line.get(figure) is not None
    ]


def _names(pid: int, process: str, tracks: Mapping[Track, str]) -> list[Event]:
    """How the process and its tracks are called, and its place among the processes."""
    names = {"process_name": {"name": process}, "process_sort_index": {"sort_index": pid}}
    return [
        *(_event("M", (pid, 0), kind, 0, args=args) for kind, args in names.items()),
        *(_event("M", track, "thread_name", 0, args={"name": name}) for track, name in tracks.items()),
    ]


def _starts(run: Run) -> list[Event]:
    """A mark across all tracks for each start of the run."""
    return [
        _event("i", STEP, f"start {number} of the run", _micros(line["time"], run.begin), s="g")
        for number, line in enumerate(run.starts, start=1)
    ]


def _arrows(run: Run, servers: Mapping[int, Sequence[Line]]) -> list[Event]:
    """From the publish of a version to each swap that took it. A version is published again after a restart."""
    swaps: dict[int, list[tuple[int, Slice]]] = collections.defaultdict(list)
    for pid, lines in servers.items():
        for swap in (swap for line in lines for swap in line.get("swapped", ())):
            swaps[swap["version"]].append((pid, _swap(swap)))
    number = itertools.count(1)
    arrows: list[Event] = []
    for line in run.publishes:
        publish = _publish(line)
        for pid, swap in swaps[line["version"]]:
            if publish.begin - CLOCKS_S < swap.end < publish.end + CLOCKS_S:
                name, same = f"version {line['version']}", {"id": next(number), "cat": "weights"}
                arrows.append(_event("s", PUBLISH, name, _micros(publish.begin, run.begin), **same))
                arrows.append(_event("f", (pid, ENGINE), name, _micros(swap.begin, run.begin), bp="e", **same))
    return arrows


def _event(phase: str, track: Track, name: str, micros: int, **more: Any) -> Event:
    return {"ph": phase, "pid": track[0], "tid": track[1], "ts": micros, "name": name, **more}


def _micros(time: float, origin: float) -> int:
    return round((time - origin) * 1e6)
