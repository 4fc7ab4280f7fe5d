"""Supervised fine-tuning on the trainer's own programs: cross-entropy of given responses, packed as trajectories are.

    for version in versions:
        batch = examples[order(seed, epoch)]                    <- the same for ever, so that a run goes on anywhere
        update(pack(batch))
        version + 1
        held-out loss, checkpoint                               now and then

In: prompt and response tokens. Out: the train state, checkpoints, a line of metrics.jsonl for each update, held-out
losses. `train` is a whole run, called by `launch.supervised`; `fit` is the same updates on batches that a script makes.
Waits for the devices, and in several processes for process 0, which alone has the examples. Accumulation, optimizer,
sharding, packing, sharing and checkpoints are those of reinforcement learning; a version is an update.

Shapes: R packed rows, L tokens of a row, P prompt tokens, T tokens from the first that trains.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from areal_jax.algorithms.packing import Layout, make_layout, pack, padding_share
from areal_jax.config import Config, ModelConfig, TrainerConfig
from areal_jax.distributed import Processes
from areal_jax.metrics import Writer
from areal_jax.models.transformer import Params, TransformerConfig
from areal_jax.trainer import loop, lora
from areal_jax.trainer.checkpoint import Checkpoints, Facts
from areal_jax.trainer.journal import Journal, Line, Step
from areal_jax.trainer.loop import ReadParams
from areal_jax.trainer.shared import shares
from areal_jax.trainer.state import TrainState, copies, initial_state, reserve_beside
from areal_jax.trainer.step import (
    CONTEXT,
    Minibatch,
    Outcome,
    Programs,
    build_programs,
    supervised_objective,
    update,
)
from areal_jax.trainer.utilisation import Work, work_of
from areal_jax.types import PROMPT_VERSION, Example, Trajectory

log = logging.getLogger(__name__)

Pair = tuple[Sequence[int], Sequence[int]]  # prompt tokens (at least one), response tokens, which all train


def fit(
    model_config: TransformerConfig,
    params: Mapping[str, np.ndarray | Array],
    batches: Iterable[Sequence[Pair]],
    config: TrainerConfig,
    *,
    updates: int,
    max_length: int,
) -> Iterator[tuple[TrainState, Outcome]]:
    """One optimizer update per batch; yields the state after it, which the next one donates: copy what is to stay.

    `updates` is the length of the learning rate's schedule, `max_length` the longest prompt and response together.
    """
    programs, layout = build(model_config, config, ModelConfig(), updates=updates, max_length=max_length)
    state = initial_state(copies(params, programs.abstract.params), programs.abstract, programs.optimizer)
    reserve_beside(state)
    programs.compile(layout.shapes)
    for pairs in batches:
        state, outcome = update(programs, state, minibatch([example(*pair) for pair in pairs], layout))
        yield state, outcome


def build(
    model_config: TransformerConfig, config: TrainerConfig, model: ModelConfig, *, updates: int, max_length: int
) -> tuple[Programs, Layout]:
    """The programs and the shapes they run on. Raises ValueError when mesh, model and token budget do not fit."""
    programs = build_programs(
        model_config,
        config,
        supervised_objective,
        updates=updates,
        temperature=1.0,
        export_dtype="float32",
        model=model,
    )
    layout = make_layout(
        config.row_buckets,
        max_length=max_length,
        token_budget=config.token_budget,
        shards=programs.shards,
        comes_from="sft.max_length",
    )
    return programs, layout


def example(prompt: Sequence[int], response: Sequence[int]) -> Example:
    """All of the response trains."""
    return Example(np.asarray(prompt, np.int32), np.asarray(response, np.int32), np.ones(len(response), np.bool_))


def minibatch(examples: Sequence[Example], layout: Layout) -> Minibatch:
    """The packed rows of one update."""
    rows = pack([_trajectory(e) for e in examples], np.zeros(len(examples)), layout, version=0, max_staleness=0)
    return Minibatch.of(rows)


def _packed(examples: Sequence[Example], indices: Sequence[int], layout: Layout) -> list[Minibatch]:
    return [minibatch([examples[i] for i in indices], layout)]


def _trajectory(example: Example) -> Trajectory:
    """An example as the packing takes it: what does not train has the version of a prompt, which is overdue."""
    return Trajectory(
        uid=0,
        sample=0,
        prompt_tokens=example.prompt_tokens,
        tokens=example.tokens,
        behav_logprobs=np.zeros(len(example.tokens), np.float32),
        versions=np.where(example.trains, 0, PROMPT_VERSION).astype(np.int32),
        reward=0.0,
        truncated=False,
    )


def mean_loss(outcome: Outcome) -> float:
    """Cross-entropy per response token of an update's batch, before the update, in nats."""
    return float(sum(map(float, (s["loss"] for s in outcome.sums))) / sum(float(s["tokens"]) for s in outcome.sums))


def held_out_loss(programs: Programs, params: Params, held_out: Minibatch) -> float:
    """Cross-entropy per response token of packed rows [R, L], in nats; nothing is updated.

    Of several processes all compute, and process 0, which has all rows, knows the loss; the others return NaN.
    """
    total = 0.0
    for batch in held_out.batches:
        logprobs_RL = programs.logprobs(params, programs.put(batch, CONTEXT), programs.scalars["temperature"])
        if jax.process_index() == 0:
            total -= float(np.asarray(logprobs_RL)[batch.loss_mask > 0].sum(dtype=np.float64))
    return total / held_out.loss_tokens if jax.process_index() == 0 else math.nan


@dataclasses.dataclass(frozen=True)
class Course:
    """Which examples each update imitates: epochs one after the other, each in a seeded order of its own.

    `total` is how many are imitated until the end, repetitions counted; the last update may hold fewer than the others.
    """

    examples: int
    batch_size: int
    seed: int
    total: int

    @property
    def updates(self) -> int:
        return -(-self.total // self.batch_size)

    def batch(self, version: int) -> list[int]:
        """Indices of the examples that are imitated from `version` to the next one; an epoch may end among them."""
        places = range(version * self.batch_size, min((version + 1) * self.batch_size, self.total))
        orders = {epoch: self._order(epoch) for epoch in {place // self.examples for place in places}}
        return [int(orders[place // self.examples][place % self.examples]) for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.examples)


def make_course(config: Config, examples: int) -> Course:
    """As long as `trainer.steps` says, or `sft.epochs` where that is 0."""
    total = config.trainer.steps * config.sft.batch_size or config.sft.epochs * examples
    return Course(examples, config.sft.batch_size, config.run.seed, total)


def train(
    config: Config,
    *,
    model_config: TransformerConfig,
    read_params: ReadParams,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    open_log: Callable[[int], Writer],
    record: Callable[[Line], None],
    stop: threading.Event,
    processes: Processes,
) -> int:
    """Trains to the end of the course, from the newest checkpoint of the run if there is one; returns the version.

    `open_log` opens the files of a run that stands at a version; `record` takes a held-out loss, before the first
    update, every `eval.every` of them, and after the last. `stop` ends it earlier, with a checkpoint of where it is.
    `processes` are the trainer's, each of which calls this; all but process 0 without examples, of which they get rows.
    """
    course, of_run = _of_first(config, model_config, examples, processes)
    programs, layout = build(
        model_config, config.trainer, config.model, updates=course.updates, max_length=config.sft.max_length
    )
    shared = shares(processes, programs)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(contextlib.closing(loop.open_checkpoints(config)))
        state, version = start(checkpoints, programs, of_run, read_params)
        reserve_beside(state)
        log.info("compiling for microbatches of rows x tokens %s", layout.shapes)
        programs.compile(layout.shapes)
        log.info("ready at version %d of %d", version, course.updates)
        work = work_of(programs, model_config, config.trainer.dtype)
        journal = stack.enter_context(contextlib.closing(open_journal(config, work, open_log(version))))
        profile = stack.enter_context(contextlib.closing(loop.open_profile(config)))
        shared.next(lambda: held_out)
        (held_out_rows,) = shared.take(functools.partial(_packed, held_out, range(len(held_out)), layout))
        evaluate = functools.partial(_evaluate, programs, held_out_rows, record)
        if version == 0:
            evaluate(state.params, version, "before")
        while version < course.updates:
            profile.at(version + 1)
            with journal.measure("idle_s"):
                batch = shared.next(functools.partial(_next_batch, course, version, stop))
            if batch is None:
                break
            with journal.measure("pack_s"):
                minibatches = shared.take(functools.partial(_packed, examples, batch, layout))
            with journal.measure("update_s"):
                state, outcomes = loop.update_all(programs, state, minibatches, meanwhile=journal.flush)
            version += 1
            numbers = evaluate(state.params, version, phase) if (phase := _phase(config, course, version)) else {}
            due = config.trainer.checkpoint.every and version % config.trainer.checkpoint.every == 0
            if due:
                with journal.measure("checkpoint_s"):
                    checkpoints.save(state, of_run | {"version": version}, {})
            journal.add(version, (), minibatches, outcomes, numbers)
            if due:
                journal.flush()  # a run that goes on from here does not do this update again
        if checkpoints.newest != version:
            checkpoints.save(state, of_run | {"version": version}, {})
    return version


def _next_batch(course: Course, version: int, stop: threading.Event) -> list[int] | None:
    return None if stop.is_set() else course.batch(version)


def _of_first(
    config: Config, model_config: TransformerConfig, examples: Sequence[Example], processes: Processes
) -> tuple[Course, Facts]:
    """The course and the facts of process 0, which alone has the examples."""
    course, of_run = make_course(config, len(examples)), facts(config, model_config, examples)
    said = json.loads(processes.of_first(json.dumps([dataclasses.asdict(course), of_run])))
    return Course(**said[0]), said[1]


def start(
    checkpoints: Checkpoints, programs: Programs, wanted: Facts, read_params: ReadParams
) -> tuple[TrainState, int]:
    """State and version of the newest checkpoint, or those of a run that begins."""
    if checkpoints.newest is None:
        return programs.begin(read_params, wanted["run"]["seed"]), 0
    restored = checkpoints.restore(programs.abstract, wanted)
    return restored.state, restored.version


def facts(config: Config, model_config: TransformerConfig, examples: Sequence[Example]) -> Facts:
    """What a checkpoint belongs to: it is not restored into another model, or into another order of other examples."""
    checksum = 0
    for each in examples:
        for array in (each.prompt_tokens, each.tokens, each.trains):
            checksum = zlib.crc32(array.tobytes(), checksum)
    run = {
        "seed": config.run.seed,
        "sft.batch_size": config.sft.batch_size,
        "examples": f"{len(examples)} with checksum {checksum:08x}",
        **lora.facts(config.model),
    }
    return json.loads(json.dumps(loop.facts(config, model_config, 0) | {"run": run}))


def open_journal(config: Config, work: Work, writer: Writer) -> Journal:
    return loop.make_journal(config, functools.partial(supervised_figures, work=work), writer)


def supervised_figures(step: Step, *, work: Work) -> Line:
    """What the line of an update says, beside times and counts; means are over response tokens."""
    (outcome,), (minibatch,) = jax.device_get(step.outcomes), step.minibatches
    trained, batches = minibatch.loss_tokens, minibatch.batches
    return {
        "loss": mean_loss(outcome),
        "entropy": sum(float(sums["entropy"]) for sums in outcome.sums) / trained,
        "grad_norm": outcome.facts["grad_norm"],
        "lr": outcome.facts["lr"],
        "tokens/trained": trained,
        "tokens/prompt": sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches) - trained,
        "packing/padding": padding_share(batches),
        **work.figures(step.minibatches, step.numbers, recomputed_prox=False),
        **work.memory(),
    }


def _phase(config: Config, course: Course, version: int) -> str:
    """Whether the held-out loss is measured at this version, and as what; "" when it is not."""
    if version == course.updates:
        return "after"
    return "during" if config.eval.every and version % config.eval.every == 0 else ""


def _evaluate(
    programs: Programs,
    held_out: Minibatch,
    record: Callable[[Line], None],
    params: Params,
    version: int,
    phase: str,
) -> dict[str, Any]:
    """Measures and records the held-out loss; returns it under its name in metrics.jsonl. Nothing without examples."""
    if not held_out.batches:
        return {}
    began = time.monotonic()
    loss = held_out_loss(programs, params, held_out)
    seconds = time.monotonic() - began
    record(
        {
            "phase": phase,
            "version": version,
            "time": time.time(),
            "seconds": seconds,
            "loss": loss,
            "tokens": held_out.loss_tokens,
        }
    )
    return {"held_out/loss": loss}
