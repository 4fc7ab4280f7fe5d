"""What packing saves: the trainer's Algorithm 1 under a token budget against a fixed number of padded microbatches.

    python -m experiments.bench_packing --out=DIR [--parts=paper,measured] [--seconds=60]

In: nothing. Out: a table, DIR/results.json (`padding_share`, `vs_fixed`, and how they came about) and DIR/packing.png.
A part that ran before into the same DIR is kept. About two minutes on two CPU cores, most of it compilation.

    paper      `padding_share`: over minibatches of 2,048 trajectories (512 prompts x 16 answers in 4 minibatches), of
               the lengths in bench_steps.py, under a budget of 32,768 tokens; nothing is computed but the packing. And
               tokens and FLOPs that each way of making microbatches computes, at the shape of Qwen2.5-1.5B
    measured   `vs_fixed`: tokens per second of real update steps on the same sequences, packed over padded, in turns in
               one process, medians; a small model, lengths and budget divided by 32. And divided by 128

Fixed microbatches (after the paper's figure 6a) hold as many sequences as the budget holds on average, in the order of
arrival, one per row, padded to the longest: 4, which makes the paper's 32 microbatches of the 128 sequences that each
of 16 devices has of a minibatch. `fixed_sorted` takes neighbours in length together instead, which leaves next to no
padding. Both exceed the budget where the long sequences are (`largest_microbatch`), and nearly every microbatch has a
shape of its own, a compilation each. The paper's fixed microbatches are padding-free, as all its
training is, and lose by their uneven sizes; what `vs_fixed` is against is what a trainer has that does not pack.

Attention is counted as every form of it computes it: without what the causal mask and segments leave out. Of fixed rows
it computes the padding.

Shapes: R rows, L tokens of a row.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from absl import app, flags

from areal_jax import host_memory
from areal_jax.algorithms.packing import Layout, choose_rows, make_layout, split_minibatches
from areal_jax.models.flops import matrix_weights
from areal_jax.models.huggingface import load_config
from areal_jax.models.transformer import TransformerConfig
from areal_jax.trainer.step import run_in_turn
from areal_jax.types import Trajectory
from experiments import bench_steps, runs
from experiments.bench_steps import FORWARD_AND_BACKWARD, LONGEST, TOKEN_BUDGET, Training, paper_lengths
from experiments.bench_workload import medians, take_turns

mpl.use("Agg")
import matplotlib.pyplot as plt

PARTS = ("paper", "measured")
BATCHES = 8  # of random lengths, each with all its minibatches
BATCH, MINIBATCHES = 512 * 16, 4
FIXED_SEQUENCES = 4  # of a fixed microbatch
SHARDS = 16  # devices that share a minibatch, in the second figure of the trainer's packing
MINIBATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32)
QWEN2P5_1P5B = pathlib.Path(__file__).parents[1] / "configs" / "shapes" / "qwen2.5-1.5b-instruct.json"
MODEL = TransformerConfig(vocab_size=1024, d_model=384, layers=4, heads=6, kv_heads=3, head_size=64, d_ff=1024)
SCALES = (32, 128)  # of the measured steps
MEASURED_SEQUENCES = 64


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a way of making microbatches computes for a minibatch."""

    shapes: list[tuple[int, int]]  # [R, L] of each microbatch
    pairs: float  # (query, key) pairs of attention, per head and layer


Plan = Callable[[np.ndarray], Planned]  # tokens of each sequence [B], in the order of arrival


def main(argv: Sequence[str]) -> None:
    del argv
    out, results = runs.begin(_OUT.value)
    for part in _PARTS.value:
        results.update(MEASURES[part](_SECONDS.value))
        runs.write(out, results)
    plot(out / "packing.png", results)
    print(table(results))


# Ways of making microbatches.


def packed(lengths_B: np.ndarray, *, layout: Layout) -> Planned:
    """As the trainer packs them, with the empty rows that fill the last microbatch up."""
    length, bins = choose_rows(lengths_B.tolist(), layout)
    rows = layout.rows(length)
    return Planned([(rows, length)] * -(-len(bins) // rows), float(causal(lengths_B).sum()))


def fixed(lengths_B: np.ndarray, *, sequences: int = FIXED_SEQUENCES) -> Planned:
    """So many sequences at a time in the order of arrival, a row for each, padded to the longest of them."""
    groups = [lengths_B[first : first + sequences] for first in range(0, len(lengths_B), sequences)]
    shapes = [(len(group), int(group.max())) for group in groups]
    return Planned(shapes, sum(rows * float(causal(np.array(length))) for rows, length in shapes))


def fixed_sorted(lengths_B: np.ndarray, *, sequences: int = FIXED_SEQUENCES) -> Planned:
    return fixed(np.sort(lengths_B), sequences=sequences)


def causal(lengths: np.ndarray) -> np.ndarray:
    """(query, key) pairs that a causal mask leaves of rows or sequences."""
    return lengths * (lengths + 1.0) / 2


def paper_layout(shards: int = 1) -> Layout:
    return make_layout((), max_length=LONGEST, token_budget=shards * TOKEN_BUDGET, shards=shards)


def plans() -> dict[str, Plan]:
    return {
        "packed": functools.partial(packed, layout=paper_layout()),
        f"packed, {SHARDS} shards": functools.partial(packed, layout=paper_layout(SHARDS)),
        "fixed": fixed,
        "fixed_sorted": fixed_sorted,
    }


# What they cost.


@dataclasses.dataclass(frozen=True)
class Cost:
    """Totals over minibatches; pairs are per head and layer."""

    tokens: int  # of sequences
    computed: int  # of rows
    pairs: float
    largest: int  # tokens of a microbatch
    distinct_shapes: int  # each of which XLA compiles a program for

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.computed


def cost(minibatches: Sequence[np.ndarray], plan: Plan) -> Cost:
    """Of minibatches given by the lengths of their sequences."""
    planned = [plan(lengths_B) for lengths_B in minibatches]
    sizes = [(rows, length) for each in planned for rows, length in each.shapes]
    return Cost(
        tokens=sum(int(lengths_B.sum()) for lengths_B in minibatches),
        computed=sum(rows * length for rows, length in sizes),
        pairs=sum(each.pairs for each in planned),
        largest=max(rows * length for rows, length in sizes),
        distinct_shapes=len(set(sizes)),
    )


def computed_flops(model: TransformerConfig, computed: int, pairs: float) -> float:
    """FLOPs of forward and backward passes over so many tokens and pairs, padding among them."""
    products = 2.0 * matrix_weights(model) * computed
    return FORWARD_AND_BACKWARD * (products + 4.0 * model.layers * model.heads * model.head_size * pairs)


def paper_minibatches(seed: int) -> list[np.ndarray]:
    """Lengths of the sequences of each minibatch of one batch, dealt out as the trainer does it."""
    lengths_B = paper_lengths(np.random.default_rng(seed), BATCH)
    parts = split_minibatches([of_length(int(length)) for length in lengths_B], MINIBATCHES)
    return [np.random.default_rng(seed).permutation(lengths_B[part]) for part in parts]


def of_length(length: int) -> Trajectory:
    """A trajectory that takes no memory."""
    floats, ints = np.broadcast_to(np.float32(0), length), np.broadcast_to(np.int32(0), length)
    return Trajectory(0, 0, ints[:1], ints[1:], floats[1:], ints[1:], 0.0, False)


# The parts: each gives entries of results.json.


def measure_paper(seconds: float) -> dict[str, Any]:
    del seconds  # it takes a few
    minibatches = [each for seed in range(BATCHES) for each in paper_minibatches(seed)]
    costs = {name: cost(minibatches, plan) for name, plan in plans().items()}
    worst = max(cost([each], plans()["packed"]).padding_share for each in minibatches)
    return {
        "padding_share": costs["packed"].padding_share,
        "paper": {
            "model": QWEN2P5_1P5B.stem,
            "minibatches": len(minibatches),
            "tokens_mean": float(np.mean(np.concatenate(minibatches))),
            "padding_share_of_the_worst_minibatch": worst,
            "plans": {name: described(each, costs["packed"]) for name, each in costs.items()},
            "padding_share_by_sequences": by_minibatch_size(),
            "tokens_computed_over_packed_by_microbatch": by_microbatch_size(minibatches),
        },
    }


def described(each: Cost, ours: Cost) -> dict[str, float]:
    """A plan by itself, and how many times what ours computes."""
    model = load_config(QWEN2P5_1P5B)
    flops = computed_flops(model, each.computed, each.pairs)
    return {
        "padding_share": each.padding_share,
        "largest_microbatch": each.largest,
        "distinct_shapes": each.distinct_shapes,
        "tokens_over_packed": each.computed / ours.computed,
        "flops_over_packed": flops / computed_flops(model, ours.computed, ours.pairs),
    }


def by_minibatch_size() -> dict[str, dict[str, float]]:
    """Padding share by sequences of a minibatch: in a small one, the last row counts."""
    found: dict[str, dict[str, float]] = {name: {} for name in plans()}
    for size in MINIBATCH_SIZES:
        minibatches = [paper_lengths(np.random.default_rng(seed), size) for seed in range(2 * BATCHES)]
        for name, plan in plans().items():
            found[name][str(size)] = cost(minibatches, plan).padding_share
    return found


def by_microbatch_size(minibatches: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Tokens that fixed microbatches compute over those of packed rows, by their number of sequences."""
    ours = cost(minibatches, plans()["packed"]).computed
    return {
        way.__name__: {
            str(size): cost(minibatches, functools.partial(way, sequences=size)).computed / ours
            for size in MICROBATCH_SIZES
        }
        for way in (fixed, fixed_sorted)
    }


def measure_measured(seconds: float) -> dict[str, Any]:
    found = {scale: measure_steps(scale, seconds / len(SCALES)) for scale in SCALES}
    return {
        "vs_fixed": found[SCALES[0]]["vs_fixed"],
        "measured": {str(TOKEN_BUDGET // scale): each for scale, each in found.items()},
    }


def measure_steps(scale: int, seconds: float) -> dict[str, Any]:
    """Tokens per second of the same sequences in either form; the first losses are those of the same weights."""
    rng = np.random.default_rng(0)
    lengths = paper_lengths(rng, MEASURED_SEQUENCES, scale)
    sequences = [bench_steps.sequence(rng, int(length), MODEL.vocab_size) for length in lengths]
    batches = {
        "packed": bench_steps.in_rows(sequences, 1, TOKEN_BUDGET // scale),
        "fixed": [
            bench_steps.padded(sequences[first : first + FIXED_SEQUENCES])
            for first in range(0, len(sequences), FIXED_SEQUENCES)
        ],
    }
    trainings = {name: Training(MODEL) for name in batches}
    losses = {name: trainings[name].step_with_loss(batches[name])[1] for name in batches}  # compiles
    calls: dict[str, Callable[[], float]] = {
        name: functools.partial(trainings[name].step, batches[name]) for name in batches
    }
    found = take_turns(calls, seconds)
    tokens = bench_steps.tokens_of(sequences)
    rates = {name: tokens / s for name, s in medians(found).items()}
    shares = {name: 1 - tokens / sum(batch.tokens.size for batch in each) for name, each in batches.items()}
    return {
        "vs_fixed": rates["packed"] / rates["fixed"],
        "tokens_per_second": rates,
        "padding_share": shares,
        "first_loss": losses,
        "seconds": found,
    }


MEASURES: dict[str, Callable[[float], dict[str, Any]]] = {"paper": measure_paper, "measured": measure_measured}


# What is shown.


def table(results: dict[str, Any]) -> str:
    """All that was measured, one line each."""
    lines = []
    if "paper" in results:
        worst = results["paper"]["padding_share_of_the_worst_minibatch"]
        lines.append(f"padding share {results['padding_share']:.2%}, of the worst minibatch {worst:.2%}")
        for name, of in results["paper"]["plans"].items():
            lines.append(
                f"  {name:17} padding {of['padding_share']:6.1%}, tokens x {of['tokens_over_packed']:.2f}, FLOPs x "
                f"{of['flops_over_packed']:.2f}, largest microbatch {of['largest_microbatch']:,} tokens, "
                f"{of['distinct_shapes']:,} shapes"
            )
    if "measured" in results:
        lines.append(f"packed over fixed {results['vs_fixed']:.2f}")
        lines += [
            f"  rows of {row}: {of['vs_fixed']:.2f} ({of['tokens_per_second']['packed']:.0f} against "
            f"{of['tokens_per_second']['fixed']:.0f} tokens/s; padding {of['padding_share']['packed']:.1%} and "
            f"{of['padding_share']['fixed']:.1%})"
            for row, of in results["measured"].items()
        ]
    return "\n".join(lines)


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, shares in results.get("paper", {}).get("padding_share_by_sequences", {}).items():
        axes[0].plot([int(size) for size in shares], list(shares.values()), "o-", label=name)
    for name, ratios in results.get("paper", {}).get("tokens_computed_over_packed_by_microbatch", {}).items():
        axes[1].plot([int(size) for size in ratios], list(ratios.values()), "o-", label=name)
    axes[0].set(xscale="log", ylim=(0, 1), xlabel="sequences of a minibatch", ylabel="share of padding")
    axes[1].axhline(1.0, color="C7", linestyle=":", label="packed")
    axes[1].set(xscale="log", xlabel="sequences of a fixed microbatch", ylabel="computed tokens over those of packed")
    for each in axes:
        each.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    host_memory.start_training(in_turn=True)  # as a trainer
    run_in_turn()
    _OUT = runs.OUT
    _PARTS = runs.define_parts(PARTS)
    _SECONDS = flags.DEFINE_float("seconds", 60.0, "Seconds of measured steps, at least two of each in any case.")
    app.run(main)
