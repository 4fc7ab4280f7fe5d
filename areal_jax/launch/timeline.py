"""How each process spent each moment of a run, as shares of equal bins of time.

In: lines of the run's files, and the edges of the bins (seconds since 1970). Out: arrays over bins, by what was done,
in the order in which the picture stacks them. Called by `picture`. Pure.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.launch.run_files import Line

IDLE = "idle"
UPDATE, PROX, REST = "update", "proximal log-probabilities", "rest of the step"
CHECKPOINT, PUBLISH = "checkpoint", "waiting to publish"
DECODE, SWAP = "decoding", "weight swap"
OPEN, CLOSED = "gate open", "gate closed"
Segments = Mapping[str, list[tuple[float, float]]]
# The parts of a training step in the order in which they happen.
STEP = {
    "idle_s": IDLE,
    "pack_s": REST,
    "prox_s": PROX,
    "update_s": UPDATE,
    "publish_wait_s": PUBLISH,
    "checkpoint_s": CHECKPOINT,
}


def shares(segments: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """Share of each bin that the segments (begin, end) cover, [len(edges) - 1] in 0..1."""
    covered = np.zeros(len(edges) - 1)
    for begin, end in segments:
        covered += np.clip(np.minimum(end, edges[1:]) - np.maximum(begin, edges[:-1]), 0.0, None)
    return np.minimum(covered / np.diff(edges), 1.0)


def step_parts(line: Line) -> dict[str, tuple[float, float]]:
    """(begin, end) of each of `STEP` by name, one after the other, up to the step's `time`, and of "rest_s" behind."""
    parts: dict[str, tuple[float, float]] = {}
    at = line["time"] - line["step_s"]
    for name in STEP:
        stop = min(at + line.get(name, 0.0), line["time"])
        parts[name] = (at, stop)
        at = stop
    return {**parts, "rest_s": (at, line["time"])}


def trainer_shares(steps: Sequence[Line], edges: np.ndarray) -> dict[str, np.ndarray]:
    """What the trainer did."""
    segments: Segments = {kind: [] for kind in (UPDATE, PROX, REST, CHECKPOINT, PUBLISH, IDLE)}
    for line in steps:
        for name, part in step_parts(line).items():
            segments[STEP.get(name, REST)].append(part)
    return {kind: shares(parts, edges) for kind, parts in segments.items()}


def generator_shares(lines: Sequence[Line], edges: np.ndarray) -> dict[str, np.ndarray]:
    """What a generation server did; where within its interval of about a second it did what is not known."""
    segments: Segments = {kind: [] for kind in (DECODE, SWAP, IDLE)}
    for line in lines:
        at = line["time"] - line["interval_s"]
        for kind, seconds in [(DECODE, line["busy_s"]), (SWAP, line["swap_stall_s"]), (IDLE, np.inf)]:
            stop = min(at + seconds, line["time"])
            segments[kind].append((at, stop))
            at = stop
    return {kind: shares(parts, edges) for kind, parts in segments.items()}


def rollout_shares(lines: Sequence[Line], edges: np.ndarray) -> dict[str, np.ndarray]:
    """When the staleness gate was open or closed; `gate_closed_s` is a running total."""
    segments: Segments = {OPEN: [], CLOSED: []}
    for before, line in itertools.pairwise(lines):
        closed = min(max(line["gate_closed_s"] - before["gate_closed_s"], 0.0), line["time"] - before["time"])
        segments[OPEN].append((before["time"], line["time"] - closed))
        segments[CLOSED].append((line["time"] - closed, line["time"]))
    return {kind: shares(parts, edges) for kind, parts in segments.items()}


def generated_rate(lines: Sequence[Line], edges: np.ndarray) -> np.ndarray:
    """Tokens per second of one generation server in each bin, [len(edges) - 1]."""
    rates = np.zeros(len(edges) - 1)
    for line in lines:
        begin = line["time"] - line["interval_s"]
        rates += line["tokens"] / line["interval_s"] * shares([(begin, line["time"])], edges)
    return rates
