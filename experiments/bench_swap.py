"""What new weights in mid sequence cost: the stall of one update, and throughput with one every few seconds.

In: a model, a number of slots. Out: stalls in decode steps, tokens per second. Called by `bench_generation`. Waits for
the scheduler, whose slots are all busy with sequences of mixed lengths the whole time: after a drain, which lets them
all begin together, nothing is measured until they have mixed again.

The weights of an update are already on the device in their places (as with `launch=threads`), so that an update costs
what the engine does for it and not what brings the weights to it.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from areal_jax.generation.engine import EngineOptions
from areal_jax.generation.scheduler import OnUpdate, Scheduler
from areal_jax.models.transformer import TransformerConfig, param_shapes
from experiments import bench_bound
from experiments.bench_workload import Bench, Load, serving, take_turns

POLICIES: tuple[OnUpdate, ...] = ("recompute", "keep", "drain")
SLOTS = (16, 64)
EVERY_S = 2.0  # between updates
STALLS = 3  # updates per policy
DISPATCHES = 12  # of all slots, at least, in a turn


class Updates:
    """New versions for a scheduler, of two sets of weights in turn."""

    def __init__(self, bench: Bench, scheduler: Scheduler):
        other = {name: 0.999 * jnp.asarray(array) for name, array in bench.params.items()}
        self._params = itertools.cycle((other, bench.params))
        self._versions = itertools.count(1)
        self._scheduler = scheduler
        self.recomputed_per_second = 0.0  # tokens, in the last turn with recompute

    @property
    def recomputed_tokens(self) -> float:
        return self._scheduler.status()["recomputed_tokens"]

    def update(self, policy: OnUpdate) -> tuple[float, float]:
        """Seconds that decoding stood still, and seconds until the new weights were in use."""
        began = time.monotonic()
        stall = self._scheduler.update_weights(next(self._params), next(self._versions), policy).result()
        return stall, time.monotonic() - began


def swap_costs(bench: Bench, slots: int, seconds: float) -> dict[str, Any]:
    """Stall and wait of each policy in decode steps, and throughput with updates over throughput without."""
    max_length, matmul_rate = bench.contexts[-1], bench_bound.matmul_rate(bench.dtype)
    with serving(bench, slots, max_length) as scheduler:
        load, updates = Load(bench, scheduler, slots, max_length), Updates(bench, scheduler)
        load.settle()
        step = slots / tokens_per_second(load, 4 * EVERY_S)
        stalls = stall_steps(updates, step)
        load.settle()
        dispatches = DISPATCHES * step * EngineOptions(slots, max_length).decode_steps
        span = max(seconds / 2 / (1 + len(POLICIES)), 2 * EVERY_S, dispatches)  # of one turn, two turns each
        calls: dict[str, Callable[[], float]] = {"none": functools.partial(tokens_per_second, load, span)}
        for policy in POLICIES:
            calls[policy] = functools.partial(under_updates, load, updates, policy, span)
        found = take_turns(calls, seconds, rounds=2)
        load.check()
        load.close()
    ratios = {
        policy: statistics.median(a / b for a, b in zip(found[policy], found["none"], strict=True))
        for policy in POLICIES
    }
    return {
        "slots": slots,
        "step_ms": 1e3 * step,
        **stalls,
        "throughput": ratios,
        "recompute_at_most": recompute_at_most(bench.config, updates.recomputed_per_second, matmul_rate),
        "tokens_per_second": found,
    }


def recompute_at_most(config: TransformerConfig, recomputed_per_second: float, matmul_rate: float) -> float:
    """Throughput over none where all but the recomputes' time is as good as without: they run at the matmul rate.

    Of a recompute it counts the products of the layers, neither attention nor padding.
    """
    shapes = param_shapes(config).items()
    kernels = sum(math.prod(shape.shape) for name, shape in shapes if name.startswith("layers.") and "kernel" in name)
    return max(0.0, 1.0 - 2 * kernels * recomputed_per_second / matmul_rate)


def stall_steps(updates: Updates, step: float) -> dict[str, dict[str, float]]:
    """Medians over updates of each policy, in decode steps of `step` seconds."""
    pairs = {policy: [updates.update(policy) for _ in range(STALLS)] for policy in POLICIES}
    return {
        name: {policy: statistics.median(pair[i] for pair in found) / step for policy, found in pairs.items()}
        for i, name in enumerate(("stall_steps", "wait_steps"))
    }


def tokens_per_second(load: Load, seconds: float) -> float:
    """From the tokens of one dispatch to those of another: they come many at a time."""
    began, before = load.harvested()
    time.sleep(seconds)
    ended, after = load.harvested()
    return (after - before) / (ended - began)


def under_updates(load: Load, updates: Updates, policy: OnUpdate, seconds: float) -> float:
    """Tokens per second with an update every `EVERY_S` seconds, or as soon as the one before is through."""
    (began, before), known = load.harvested(), updates.recomputed_tokens
    while (at := time.monotonic()) - began < seconds:
        updates.update(policy)
        time.sleep(max(0.0, at + EVERY_S - time.monotonic()))
    ended, after = load.harvested()
    if policy == "recompute":
        updates.recomputed_per_second = (updates.recomputed_tokens - known) / (ended - began)
    if policy == "drain":
        load.settle()
    return (after - before) / (ended - began)
