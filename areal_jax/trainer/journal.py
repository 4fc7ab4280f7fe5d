"""What a training step leaves for the log: its line of metrics.jsonl, written while the devices work on the next step.

In: the batch, its packed minibatches and what the updates returned (still on the devices). Out: one dict per step under
the names of `areal_jax.metrics.METRICS`. Called by the loop; waits for the devices only when a line is asked for.
Here, too, a minibatch without a finite gradient is saved (skipped.py), and the run ends when gradients stay so.

Shapes: B trajectories, R packed rows, L tokens of a row.
"""

import collections
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from areal_jax import compilation
from areal_jax.algorithms import packing
from areal_jax.algorithms.staleness import staleness_figures
from areal_jax.metrics import Seconds, Writer, percentiles, with_prefix
from areal_jax.trainer.skipped import SkippedMinibatches
from areal_jax.trainer.step import Minibatch, Outcome
from areal_jax.trainer.utilisation import Work
from areal_jax.types import TrainBatch, Trajectory

TIMES = ("idle_s", "pack_s", "prox_s", "update_s", "publish_wait_s", "checkpoint_s")

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """A finished step: what it worked on, what came of it, and what is measured on the host."""

    version: int  # after the step
    batch: Sequence[Trajectory]
    minibatches: Sequence[Minibatch]
    outcomes: Sequence[Outcome]
    numbers: Line


Figures = Callable[[Step], Line]  # what a line says of a step and its outcomes


class Journal:
    """Times the parts of a step, and holds its line back until `flush`, so that no device is waited for in between."""

    def __init__(
        self,
        writer: Writer,
        skipped: SkippedMinibatches,
        figures: Figures,
        *,
        most_skipped: int | None,
    ):
        """`most_skipped` updates in a row without a finite gradient end the run; None: that is for others to see."""
        self._writer, self._saved, self._figures = writer, skipped, figures
        self._most_skipped = most_skipped
        self._seconds, self._ended = Seconds(), time.monotonic()
        self._pending: Step | None = None
        self._skipped = self._skipped_in_a_row = 0

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time inside to the step's `name`, under which a profile shows it too."""
        with jax.profiler.TraceAnnotation(name), self._seconds.measure(name):
            yield

    def add(
        self,
        version: int,
        batch: Sequence[Trajectory],
        minibatches: Sequence[Minibatch],
        outcomes: Sequence[Outcome],
        numbers: Line,
    ) -> None:
        """Ends the step whose weights are `version`; `numbers` goes into its line as it is."""
        self.flush()
        now = time.monotonic()
        times = dict.fromkeys(TIMES, 0.0) | self._seconds.take()
        numbers = {"version": version, "time": time.time(), "step_s": now - self._ended} | times | numbers
        numbers["compilations"] = compilation.count()
        self._pending, self._ended = Step(version, batch, minibatches, outcomes, numbers), now

    def flush(self) -> None:
        """Writes the line of the step held back. Raises FloatingPointError after too many updates without gradient."""
        step, self._pending = self._pending, None
        if step is None:
            return
        skipped = [bool(outcome.facts["skipped"]) for outcome in step.outcomes]
        self._count_skipped(skipped)
        saved = self._save_skipped(step, skipped)
        self._writer.write(step.numbers | self._figures(step) | {"updates/skipped": self._skipped})
        self._check_skipped(step.version - 1, saved)

    def close(self) -> None:
        self.flush()
        self._writer.close()

    def _count_skipped(self, skipped: Sequence[bool]) -> None:
        for each in skipped:
            self._skipped += each
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if each else 0

    def _save_skipped(self, step: Step, skipped: Sequence[bool]) -> pathlib.Path | None:
        """The file of the step's first minibatch without a finite gradient; None when there is none."""
        if True not in skipped:
            return None
        place = skipped.index(True)
        return self._saved.save(step.version - 1, place, step.minibatches[place], step.outcomes[place])

    def _check_skipped(self, version: int, saved: pathlib.Path | None) -> None:
        if self._most_skipped is not None and self._skipped_in_a_row >= self._most_skipped:
            raise FloatingPointError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row, the last of them in the "
                f"step from version {version}; all were skipped, so the weights are still those before. Look at that "
                f"step's first minibatch without a finite gradient, saved in {saved}, and in metrics.jsonl at the loss "
                "or, of reinforcement learning, the rewards and behav_weight/max; lower trainer.optimizer.lr, compute "
                f"in float32 (trainer.dtype), or allow more (trainer.skipped_in_a_row={self._most_skipped})"
            )


def no_figures(step: Step) -> Line:
    """Of a process that is not the first: process 0 has what concerns all."""
    return {}


def reinforcement_figures(step: Step, *, work: Work, correct_reward: float, recomputed_prox: bool) -> Line:
    """What the line of a step of reinforcement learning says, beside times and counts."""
    consuming, outcomes = step.version - 1, jax.device_get(step.outcomes)
    pairs = first_logprobs(step.minibatches, outcomes, recomputed_prox=recomputed_prox)
    return {
        **batch_figures(step.batch, consuming, correct_reward),
        **packing_figures(step.batch, step.minibatches),
        **update_figures(step.minibatches, outcomes),
        **logprob_gap(pairs, consuming),
        **work.figures(step.minibatches, step.numbers, recomputed_prox=recomputed_prox),
        **work.memory(),
    }


def batch_figures(batch: Sequence[Trajectory], version: int, correct_reward: float) -> Line:
    """Rewards, lengths and versions of the trajectories that `version` consumes."""
    rewards_B = np.array([t.reward for t in batch])
    lengths_B = np.array([len(t.tokens) for t in batch])
    versions_B = np.array([len(np.unique(t.versions)) for t in batch])
    by_prompt = collections.defaultdict(set)
    for t in batch:
        by_prompt[t.uid].add(t.reward)
    return {
        "prompts": sorted(by_prompt),
        "reward/mean": rewards_B.mean(),
        # in float32, as rewards come over the wire
        "reward/accuracy": (rewards_B.astype(np.float32) >= np.float32(correct_reward)).mean(),
        "response/length_mean": lengths_B.mean(),
        **{f"response/length_{name}": value for name, value in percentiles(lengths_B).items()},
        "response/truncated": np.mean([t.truncated for t in batch]),
        **with_prefix("staleness", staleness_figures([t.versions for t in batch], version=version)),
        "tokens/prompt": sum(len(t.prompt_tokens) for t in batch),
        "versions_per_trajectory/max": versions_B.max(),
        "trajectories/multi_version": np.count_nonzero(versions_B > 1),
        "groups/zero_variance": sum(len(rewards) == 1 for rewards in by_prompt.values()),
    }


def packing_figures(trajectories: Sequence[Trajectory], minibatches: Sequence[Minibatch]) -> Line:
    """Tokens that train (those without gradient among them), completion tokens that do not, and padding."""
    batches = [batch for minibatch in minibatches for batch in minibatch.batches]
    gradless = sum(minibatch.gradless_tokens for minibatch in minibatches)
    trained = packing.loss_tokens(batches) + gradless
    return {
        "tokens/trained": trained,
        "tokens/gradless": gradless,
        "tokens/masked": sum(len(t.tokens) for t in trajectories) - trained,
        "packing/padding": packing.padding_share(batches),
    }


def update_figures(minibatches: Sequence[Minibatch], outcomes: Sequence[Outcome]) -> Line:
    """The loss over all trained tokens; the other means over those that were computed, left out when there are none."""
    total: dict[str, float] = collections.defaultdict(float)
    for sums in (sums for outcome in outcomes for sums in outcome.sums):
        for name, value in sums.items():
            total[name] = max(total[name], float(value)) if name.endswith("_max") else total[name] + float(value)
    tokens, gradless = total["tokens"], sum(minibatch.gradless_tokens for minibatch in minibatches)
    line = {
        "loss": total["loss"] / max(1.0, tokens + gradless),
        "grad_norm": np.mean([outcome.facts["grad_norm"] for outcome in outcomes]),
        "lr": outcomes[-1].facts["lr"],
    }
    if tokens == 0:
        return line
    return line | {
        "entropy": total["entropy"] / tokens,
        "ratio/mean": total["ratio"] / tokens,
        "ratio/clipped": total["clipped"] / tokens,
        "behav_weight/mean": total["behav_weight"] / tokens,
        "behav_weight/max": total["behav_weight_max"],
        "approx_kl": total["approx_kl"] / tokens,
    }


def first_logprobs(
    minibatches: Sequence[Minibatch], outcomes: Sequence[Outcome], *, recomputed_prox: bool
) -> list[tuple[TrainBatch, Any]]:
    """(microbatch, its log-probabilities [R, L] under the step's first weights), where those were computed.

    The first update starts from those weights; the later ones have them from the proximal pass, if there was one.
    """
    pairs = list(zip(minibatches[0].batches, outcomes[0].logprobs, strict=True))
    for minibatch in minibatches[1:] if recomputed_prox else []:
        pairs += zip(minibatch.batches, jax.device_get(minibatch.prox_logprobs), strict=True)
    return pairs


def logprob_gap(pairs: Sequence[tuple[TrainBatch, Any]], version: int) -> Line:
    """|log p of the generator - log p of the trainer| over the tokens that these very weights sampled, if any."""
    gaps = [np.abs(batch.behav_logprobs - at_start)[batch.versions == version] for batch, at_start in pairs]
    gap = np.concatenate([np.zeros(0), *gaps])
    if not gap.size:
        return {}
    return with_prefix("logp_gap", percentiles(gap)) | {"logp_gap/tokens": gap.size}
