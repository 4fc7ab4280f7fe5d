"""What the trainer's benchmarks train: sequences of the paper's lengths at any scale, and real update steps.

In: a model, lengths, microbatches. Out: minibatches, and the seconds of an update. Called by `bench_packing` and
`bench_trainer`. Waits for the device.

Lengths are log-normal and cut off at both ends, which lie two standard deviations of the logarithm from its mean: 1,024
and 28,672 tokens, the longest prompt and answer of the paper, under its budget of 32,768 tokens a microbatch. A scale
divides all of them. Tokens are random, all but the first of a sequence train, and the objective is cross-entropy: what
it does to the log-probabilities is next to nothing, as with the decoupled objective, and torch has the same.

Shapes: B sequences, R rows, L tokens of a row.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from areal_jax.algorithms.packing import Layout, allocate, pack
from areal_jax.config import OptimizerConfig, TrainerConfig
from areal_jax.models import flops, sharding
from areal_jax.models.transformer import TransformerConfig
from areal_jax.trainer.sft import mean_loss
from areal_jax.trainer.state import TrainState, learning_rate, make_optimizer, random_state, reserve_beside
from areal_jax.trainer.step import Minibatch, Programs, supervised_objective, update
from areal_jax.types import ROW_ARRAYS, TrainBatch, Trajectory

SHORTEST, LONGEST = 1_024, 28_672
TOKEN_BUDGET = 32_768
DEVIATIONS = 2.0  # from the middle of the distribution to either end
LARGE_BATCH = 512  # sequences out of which rows are packed as full as in a large run
ONE_DEVICE = {"data": 1, "fsdp": 1, "tensor": 1}
OPTIMIZER = OptimizerConfig(warmup_fraction=0.0)  # the rate is constant, so that every update is alike
TRAINER = TrainerConfig(optimizer=OPTIMIZER)
Remat = Literal["none", "dots", "layers"]  # trainer.remat, the least that is computed again first
FORWARD_AND_BACKWARD = 3  # in forward passes, as `models.flops` counts


def paper_lengths(rng: np.random.Generator, count: int, scale: int = 1) -> np.ndarray:
    """Tokens of each sequence, [count] int."""
    middle = (math.log(SHORTEST) + math.log(LONGEST)) / 2
    deviation = (math.log(LONGEST) - math.log(SHORTEST)) / (2 * DEVIATIONS)
    drawn = np.exp(rng.normal(middle, deviation, count))
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(int) // scale


def sequence(rng: np.random.Generator, length: int, vocab_size: int) -> Trajectory:
    """Random tokens, of which all but the first train."""
    tokens = rng.integers(0, vocab_size, length, np.int32)
    return Trajectory(
        uid=0,
        sample=0,
        prompt_tokens=tokens[:1],
        tokens=tokens[1:],
        behav_logprobs=np.zeros(length - 1, np.float32),
        versions=np.zeros(length - 1, np.int32),
        reward=1.0,
        truncated=False,
    )


def in_rows(sequences: Sequence[Trajectory], rows: int, length: int) -> list[TrainBatch]:
    """Microbatches [rows, length] that the trainer's own packing makes of these sequences."""
    layout = Layout((length,), rows * length)
    return pack(sequences, np.ones(len(sequences)), layout, version=0, max_staleness=0)


def padded(sequences: Sequence[Trajectory]) -> TrainBatch:
    """One microbatch with a row for each sequence, all rows as long as its longest: what there is without packing."""
    longest = max(map(len, sequences))
    rows = [batch for each in sequences for batch in in_rows([each], 1, longest)]
    return TrainBatch(len(rows), **{n: np.concatenate([getattr(row, n) for row in rows]) for n in ROW_ARRAYS})


def full_rows(rng: np.random.Generator, rows: int, length: int, vocab_size: int) -> list[list[Trajectory]]:
    """The sequences of each of `rows` rows, taken from all over a large batch that Algorithm 1 has packed.

    So a benchmark of few rows has the padding of a run of many, where the last row does not count.
    """
    lengths_B = paper_lengths(rng, LARGE_BATCH, TOKEN_BUDGET // length)
    bins = allocate(lengths_B.tolist(), length)
    chosen = [bins[(2 * r + 1) * len(bins) // (2 * rows)] for r in range(rows)]
    return [[sequence(rng, int(lengths_B[i]), vocab_size) for i in row] for row in chosen]


def tokens_of(sequences: Sequence[Trajectory]) -> int:
    return sum(map(len, sequences))


# Update steps.


@functools.cache
def make_programs(model: TransformerConfig, config: TrainerConfig) -> Programs:
    """The trainer's programs on one device, whatever the mesh of the config."""
    schedule = learning_rate(config.optimizer, 1)
    return Programs(
        model,
        sharding.make_mesh(ONE_DEVICE, jax.devices()[:1]),
        make_optimizer(config.optimizer, schedule),
        schedule,
        supervised_objective,
        {"temperature": np.float32(1.0), "clip_eps": np.float32(config.objective.clip_eps)},
        compute_dtype=config.dtype,
        export_dtype=config.dtype,
        vocab_block=config.vocab_block,
        remat=config.remat,
    )


@functools.cache
def compiled_programs(model: TransformerConfig, config: TrainerConfig, length: int) -> Programs:
    """The same, compiled for one row of `length` tokens."""
    programs = make_programs(model, config)
    programs.compile([(1, length)])
    return programs


class Training:
    """A model under training, from random weights that are the same in every one of the same model."""

    def __init__(self, model: TransformerConfig, config: TrainerConfig = TRAINER):
        self.model, self.config = model, config
        self.programs = make_programs(model, config)
        self.state: TrainState = random_state(model, self.programs.abstract, self.programs.optimizer, seed=0)
        reserve_beside(self.state)  # as the trainer does

    def compile(self, length: int, remat: Remat) -> None:
        """From here on updates are of rows of `length` tokens under this rematerialisation; the state goes on."""
        self.config = dataclasses.replace(self.config, remat=remat)
        self.programs = compiled_programs(self.model, self.config, length)

    def step(self, batches: Sequence[TrainBatch]) -> float:
        """Seconds of one update from these microbatches."""
        return self.step_with_loss(batches)[0]

    def step_with_loss(self, batches: Sequence[TrainBatch]) -> tuple[float, float]:
        """The same, and the cross-entropy per token before it, in nats."""
        began = time.monotonic()
        self.state, outcome = update(self.programs, self.state, Minibatch.of(batches))
        jax.block_until_ready((self.state, outcome))
        return time.monotonic() - began, mean_loss(outcome)


# What a step asks for.


@dataclasses.dataclass(frozen=True)
class Work:
    """Sequences as microbatches, and the FLOPs that the model's mathematics asks for (rule: `models.flops`)."""

    sequences: list[Trajectory]
    batches: list[TrainBatch]

    @property
    def tokens(self) -> int:
        return tokens_of(self.sequences)

    def flops(self, model: TransformerConfig) -> float:
        return flops.train_flops(model, [len(each) for each in self.sequences])


def rows_of_work(rows: int, length: int, vocab_size: int) -> Work:
    """Full rows of `length` tokens, one per microbatch."""
    packed = full_rows(np.random.default_rng(0), rows, length, vocab_size)
    batches = [batch for row in packed for batch in in_rows(row, 1, length)]
    return Work([each for row in packed for each in row], batches)
