"""The training loop: batches in, versions out.

    for batch in queue:                                     <- whole groups, oldest first
        minibatches = pack(batch), with_prox(weights now)   <- of several processes, the rows of each (shared.py)
        for minibatch in minibatches: update
        version + 1
        publish                                             -> generation servers, then the staleness gate

Consumes: batches of the trajectory queue. Produces: a version of the weights per batch, a line of metrics.jsonl, now
and then a checkpoint. Waits for: the queue (`idle_s`), the devices (`prox_s`, `update_s`), the publish before
(`publish_wait_s`). Unblocked by: the rollout controller, which puts groups. Ends: after `trainer.steps` or when `stop`
is set, leaving a checkpoint from which the same call goes on; or by an error.

The version is minted here and nowhere else. The first thing published is the version that training starts from (0, or
the checkpoint's), once the queue is restored and every program compiled: whoever waits for its announcement, waits for
the trainer to be ready.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax import Array

from areal_jax.algorithms.advantage import trajectory_advantages
from areal_jax.algorithms.packing import Layout, make_layout, pack, split_minibatches
from areal_jax.config import Config
from areal_jax.distributed import Processes
from areal_jax.metrics import Writer
from areal_jax.models.transformer import TransformerConfig
from areal_jax.profiling import Profile
from areal_jax.trainer import lora
from areal_jax.trainer.checkpoint import Checkpoints, Facts
from areal_jax.trainer.journal import Figures, Journal, no_figures, reinforcement_figures
from areal_jax.trainer.shared import shares
from areal_jax.trainer.skipped import SkippedMinibatches
from areal_jax.trainer.state import TrainState, reserve_beside
from areal_jax.trainer.step import (
    Minibatch,
    Outcome,
    Programs,
    build_programs,
    decoupled_objective,
    published,
    update,
    with_behav_as_prox,
    with_prox_logprobs,
)
from areal_jax.trainer.utilisation import Work, work_of
from areal_jax.types import Arrays, Trajectory

log = logging.getLogger(__name__)

# Params of version 0, made in these shapes, dtypes and shardings; the training state takes them over.
ReadParams = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Array]]


class Queue(Protocol):
    """The trajectory queue, which lives in the trainer's process, of several in process 0."""

    def get(self, version: int, *, timeout_s: float, stop: threading.Event) -> list[Trajectory] | None: ...
    def announce(self, version: int, *, finished: bool) -> None: ...
    def snapshot(self, version: int) -> Mapping[str, np.ndarray]: ...
    def restore(self, snapshot: Arrays) -> None: ...
    @property
    def waiting(self) -> int: ...
    @property
    def dropped(self) -> dict[str, int]: ...


class Publisher(Protocol):
    """Brings a version to every generation server in the background, then announces it."""

    def publish(self, export: Callable[[], Mapping[str, Array | np.ndarray]], version: int) -> None: ...
    def close(self) -> None: ...


def train(
    config: Config,
    *,
    model_config: TransformerConfig,
    read_params: ReadParams,
    queue: Queue,
    publisher: Publisher,
    open_log: Callable[[int], Writer],
    stop: threading.Event,
    processes: Processes,
) -> int:
    """Trains to `trainer.steps` versions, from the newest checkpoint of the run if there is one; returns the version.

    `read_params` gives those of version 0, and is called only by a run that begins. `open_log` opens the step log of a
    run that stands at a version. `processes` are the trainer's, each of which calls this; they go on together.
    """
    programs, layout = build(config, model_config)
    shared = shares(processes, programs)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(contextlib.closing(open_checkpoints(config)))
        state, version = start(checkpoints, programs, facts(config, model_config, 0), read_params, queue)
        reserve_beside(state)
        log.info("compiling for microbatches of rows x tokens %s", layout.shapes)
        programs.compile(layout.shapes)
        log.info("ready at version %d, waiting for trajectories", version)
        work = work_of(programs, model_config, config.trainer.dtype)
        journal = stack.enter_context(contextlib.closing(open_journal(config, work, open_log(version))))
        profile = stack.enter_context(contextlib.closing(open_profile(config)))
        publisher.publish(functools.partial(published, programs, state.params), version)
        while version < config.trainer.steps:
            profile.at(version + 1)
            with journal.measure("idle_s"):
                timeout_s = config.trainer.batch_timeout_s
                batch = shared.next(functools.partial(queue.get, version, timeout_s=timeout_s, stop=stop))
            if batch is None:
                break
            waiting = queue.waiting
            with journal.measure("pack_s"):
                minibatches = shared.take(functools.partial(make_minibatches, config, batch, version, layout))
            with journal.measure("prox_s"):
                minibatches = with_prox(config, programs, state, minibatches)
            with journal.measure("update_s"):
                state, outcomes = update_all(programs, state, minibatches, meanwhile=journal.flush)
            version += 1
            with journal.measure("publish_wait_s"):
                publisher.publish(functools.partial(published, programs, state.params), version)
            due = config.trainer.checkpoint.every and version % config.trainer.checkpoint.every == 0
            if due:
                with journal.measure("checkpoint_s"):
                    checkpoints.save(state, facts(config, model_config, version), queue.snapshot(version))
            journal.add(version, batch, minibatches, outcomes, {"queue/waiting": waiting, "dropped": queue.dropped})
            if due:
                journal.flush()  # a run that goes on from here does not do this step again
        if checkpoints.newest != version:
            checkpoints.save(state, facts(config, model_config, version), queue.snapshot(version))
    publisher.close()
    if version >= config.trainer.steps:
        queue.announce(version, finished=True)
    return version


def build(config: Config, model_config: TransformerConfig) -> tuple[Programs, Layout]:
    """The programs and the shapes they run on. Raises ValueError when mesh, model and token budget do not fit."""
    programs = build_programs(
        model_config,
        config.trainer,
        decoupled_objective,
        updates=config.trainer.steps * config.trainer.objective.minibatches,
        temperature=config.rollout.temperature,
        export_dtype=config.generation.dtype,
        model=config.model,
    )
    layout = make_layout(
        config.trainer.row_buckets,
        max_length=config.max_length,
        token_budget=config.trainer.token_budget,
        shards=programs.shards,
    )
    return programs, layout


def open_checkpoints(config: Config) -> Checkpoints:
    return Checkpoints(config.run_dir / "checkpoints", keep=config.trainer.checkpoint.keep)


def open_profile(config: Config) -> Profile:
    """The profile of this process; one of several leaves a trace of its own."""
    name = "trainer" if jax.process_count() == 1 else f"trainer-{jax.process_index()}"
    return Profile(config.run_dir / "profile" / name, config.profiled_steps)


def open_journal(config: Config, work: Work, writer: Writer) -> Journal:
    recomputed_prox = config.trainer.objective.prox == "recompute"
    figures = functools.partial(
        reinforcement_figures, work=work, correct_reward=config.reward.correct, recomputed_prox=recomputed_prox
    )
    return make_journal(config, figures, writer)


def make_journal(config: Config, figures: Figures, writer: Writer) -> Journal:
    """The journal of this process; the figures are process 0's."""
    saved = SkippedMinibatches(config.run_dir / "skipped")
    if jax.process_index():  # it would end this process, and with it process 0, before that one has saved the minibatch
        return Journal(writer, saved, no_figures, most_skipped=None)
    return Journal(writer, saved, figures, most_skipped=config.trainer.skipped_in_a_row)


def facts(config: Config, model_config: TransformerConfig, version: int) -> Facts:
    """What a checkpoint belongs to: it is not restored into another model, or into another stream of prompts."""
    run = {
        "seed": config.run.seed,
        "data": config.data.train,
        "options": config.data.options,
        "prompts_per_step": config.trainer.prompts_per_step,
        "group_size": config.rollout.group_size,
        **lora.facts(config.model),
    }
    model = dataclasses.asdict(model_config)
    del model["kernels"]  # how it is computed, which may change between two starts
    return json.loads(json.dumps({"version": version, "model": model, "run": run}))


def start(
    checkpoints: Checkpoints,
    programs: Programs,
    wanted: Facts,
    read_params: ReadParams,
    queue: Queue,
) -> tuple[TrainState, int]:
    """State and version of the newest checkpoint, whose queue is put back; or those of a run that begins."""
    if checkpoints.newest is None:
        return programs.begin(read_params, wanted["run"]["seed"]), 0
    restored = checkpoints.restore(programs.abstract, wanted)
    queue.restore(restored.queue)
    return restored.state, restored.version


def make_minibatches(config: Config, batch: Sequence[Trajectory], version: int, layout: Layout) -> list[Minibatch]:
    """Advantages over the whole batch, then its minibatches, packed; with overdue=train no token is too old.

    A trajectory whose advantage is exactly 0 (a group of equal rewards) has no gradient, whatever the ratio: it is not
    computed, only counted among the tokens that the loss is divided by.
    """
    objective = config.trainer.objective
    advantages_B = trajectory_advantages(
        np.array([t.reward for t in batch]),
        np.array([t.uid for t in batch]),
        group_size=config.rollout.group_size,
        normalize=objective.normalize_advantages,
        std=objective.advantage_std,
        group_baseline=objective.group_baseline,
    )
    max_staleness = version if config.rollout.overdue == "train" else config.rollout.max_staleness

    def minibatch(part: np.ndarray) -> Minibatch:
        moving = part[advantages_B[part] != 0]
        gradless = [batch[i] for i in part[advantages_B[part] == 0]]
        packed = pack(
            [batch[i] for i in moving], advantages_B[moving], layout, version=version, max_staleness=max_staleness
        )
        tokens = sum(int(np.count_nonzero(t.versions >= version - max_staleness)) for t in gradless)
        return Minibatch.of(packed, gradless_tokens=tokens)

    return [minibatch(part) for part in split_minibatches(batch, objective.minibatches)]


def with_prox(
    config: Config, programs: Programs, state: TrainState, minibatches: Sequence[Minibatch]
) -> list[Minibatch]:
    """Adds the proximal log-probabilities, computed before the first update, or the behaviour policy's (naive)."""
    if config.trainer.objective.prox == "naive":
        return with_behav_as_prox(minibatches)
    minibatches = with_prox_logprobs(programs, state.params, minibatches)
    jax.block_until_ready([m.prox_logprobs for m in minibatches])
    return minibatches


def update_all(
    programs: Programs, state: TrainState, minibatches: Sequence[Minibatch], meanwhile: Callable[[], None]
) -> tuple[TrainState, list[Outcome]]:
    """An update per minibatch. `meanwhile` is called when all are dispatched, before the devices are waited for.

    In a process that runs its programs in turn (`step.run_in_turn`) the calls themselves have waited.
    """
    outcomes = []
    for minibatch in minibatches:
        state, outcome = update(programs, state, minibatch)
        outcomes.append(outcome)
    meanwhile()
    jax.block_until_ready(outcomes)
    return state, outcomes
