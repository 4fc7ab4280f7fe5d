"""What the proximal pass of a training step costs: by minibatches, beside the updates and a pass over the whole batch.

In: a model under training, packed microbatches. Out: seconds, calls of the program, and whether the numbers are those
of the whole pass. Called by `bench_trainer`. Waits for the device.

The first of n minibatches needs no pass (`trainer.step.with_prox_logprobs`), so that (n - 1) / n of a whole one is what
it must cost. A call of the program `logprobs` is one microbatch. Compared bit by bit with the whole pass are the
log-probabilities of all tokens that train which the step goes by: of the first minibatch those of its own update, which
another program computes, of the others those of the pass.
"""

import copy
import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from areal_jax.trainer.step import CONTEXT, Minibatch, update, with_prox_logprobs
from areal_jax.types import TrainBatch
from experiments.bench_steps import Training
from experiments.bench_workload import take_turns

MINIBATCHES = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step in seconds, the calls of its proximal pass, and how far its numbers are from a whole one's."""

    whole_pass: float
    proximal_pass: float
    updates: float
    calls: int
    own_difference: float  # the greatest of the first minibatch, in nats
    pass_difference: float  # of the others


def proximal_pass(training: Training, batches: Sequence[TrainBatch], seconds: float) -> dict[str, Any]:
    """By number of minibatches, which take turns; medians. A step of two microbatches comes before and is not kept."""
    steps: dict[int, list[Step]] = {n: [] for n in MINIBATCHES}

    def turn(n: int) -> float:
        began = time.monotonic()
        steps[n].append(take_step(training, batches, n))
        return time.monotonic() - began

    take_step(training, batches[:2], 2)
    take_turns({str(n): functools.partial(turn, n) for n in MINIBATCHES}, seconds)
    return {str(n): described(found, len(batches)) for n, found in steps.items()}


def described(steps: Sequence[Step], microbatches: int) -> dict[str, Any]:
    seconds = {name: [getattr(step, name) for step in steps] for name in ("whole_pass", "proximal_pass", "updates")}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "calls": max(step.calls for step in steps),
        "calls_of_whole_pass": microbatches,
        "over_whole_pass": middle["proximal_pass"] / middle["whole_pass"],
        "over_updates": middle["proximal_pass"] / middle["updates"],
        "own_difference": max(step.own_difference for step in steps),
        "pass_difference": max(step.pass_difference for step in steps),
        "seconds": seconds,
    }


def compared(found: Mapping[str, Any]) -> str:
    """What `described` says of the numbers, in words."""
    differences = {"first": found["own_difference"]} | ({"others": found["pass_difference"]} if found["calls"] else {})
    return ", ".join(f"{of} {f'within {d:.1e} nats' if d else 'bit-equal'}" for of, d in differences.items())


def take_step(training: Training, batches: Sequence[TrainBatch], minibatches: int) -> Step:
    """One real step of these microbatches, dealt out in order, after a pass over all of them with the same weights."""
    assert len(batches) % minibatches == 0, (len(batches), minibatches)
    each, programs, params = len(batches) // minibatches, training.programs, training.state.params
    parts = [Minibatch.of(batches[first : first + each]) for first in range(0, len(batches), each)]
    passes: list[Array] = []

    def counted(*arguments: Any) -> Array:
        passes.append(programs.logprobs(*arguments))
        return passes[-1]

    counting = copy.copy(programs)
    counting.logprobs = counted  # type: ignore[assignment]
    times = [time.monotonic()]
    temperature = programs.scalars["temperature"]
    whole = jax.block_until_ready([programs.logprobs(params, programs.put(b, CONTEXT), temperature) for b in batches])
    times.append(time.monotonic())
    parts = with_prox_logprobs(counting, params, parts)
    jax.block_until_ready(passes)
    times.append(time.monotonic())
    outcomes = []
    for part in parts:
        training.state, outcome = update(programs, training.state, part)
        outcomes.append(outcome)
    jax.block_until_ready((training.state, outcomes))
    times.append(time.monotonic())
    used = [*outcomes[0].logprobs, *(prox_RL for part in parts[1:] for prox_RL in part.prox_logprobs)]
    differences = [
        float(np.abs(np.asarray(a_RL) - np.asarray(b_RL))[batch.loss_mask > 0].max())
        for a_RL, b_RL, batch in zip(used, whole, batches, strict=True)
    ]
    whole_pass, proximal_pass, updates = np.diff(times).tolist()
    own, others = max(differences[:each]), max(differences[each:], default=0.0)
    return Step(whole_pass, proximal_pass, updates, len(passes), own, others)
