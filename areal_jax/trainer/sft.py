"""Supervised fine-tuning on the trainer's own programs: the warm start of a model before reinforcement learning.

In: prompt and response tokens, batch by batch. Out: the train state after each update. Called by scripts; waits for the
devices only where the caller looks at a result. Accumulation, optimizer, sharding and packing are those of step.py; the
objective is the cross-entropy of the response tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jax import Array

from areal_jax.algorithms.packing import make_layout, pack
from areal_jax.config import TrainerConfig
from areal_jax.models.transformer import TransformerConfig
from areal_jax.trainer.state import TrainState, copies, initial_state
from areal_jax.trainer.step import Minibatch, Outcome, build_programs, supervised_objective, update
from areal_jax.types import Trajectory

Example = tuple[Sequence[int], Sequence[int]]  # prompt tokens (at least one), response tokens


def fit(
    model_config: TransformerConfig,
    params: Mapping[str, np.ndarray | Array],
    batches: Iterable[Sequence[Example]],
    config: TrainerConfig,
    *,
    updates: int,
    max_length: int,
) -> Iterator[tuple[TrainState, Outcome]]:
    """One optimizer update per batch; yields the state after it, which the next one donates: copy what is to stay.

    `updates` is the length of the learning rate's schedule, `max_length` the longest prompt and response together.
    """
    programs = build_programs(
        model_config, config, supervised_objective, updates=updates, temperature=1.0, export_dtype="float32"
    )
    layout = make_layout(
        config.row_buckets, max_length=max_length, token_budget=config.token_budget, shards=programs.shards
    )
    state = initial_state(copies(params, programs.abstract.params), programs.abstract, programs.optimizer)
    programs.compile(layout.shapes)
    for examples in batches:
        rows = pack([_example(*e) for e in examples], np.zeros(len(examples)), layout, version=0, max_staleness=0)
        state, outcome = update(programs, state, Minibatch(rows))
        yield state, outcome


def mean_loss(outcome: Outcome) -> float:
    """Cross-entropy per response token of an update's batch, before the update, in nats."""
    return float(sum(map(float, (s["loss"] for s in outcome.sums))) / sum(float(s["tokens"]) for s in outcome.sums))


def _example(prompt: Sequence[int], response: Sequence[int]) -> Trajectory:
    return Trajectory(
        uid=0,
        sample=0,
        prompt_tokens=np.asarray(prompt, np.int32),
        tokens=np.asarray(response, np.int32),
        behav_logprobs=np.zeros(len(response), np.float32),
        versions=np.zeros(len(response), np.int32),
        reward=0.0,
        truncated=False,
    )
