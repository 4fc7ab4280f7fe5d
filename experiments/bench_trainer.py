"""How fast the trainer is: against the machine's matmul rate, against torch, by sequence length and by model size.

    python -m experiments.bench_trainer --out=DIR [--model=smollm2|default|both] [--parts=...] [--seconds=...]

In: nothing; both models have random weights, in the shapes of SmolLM2-135M and of the model of configs/math.py. Out: a
table, DIR/results.json (`matmul_utilisation`, `vs_torch_padded`, per model) and DIR/trainer.png. float32, all cores, a
row of 2,048 tokens per microbatch, and per update where nothing else is said. What is compared takes turns in one
process; figures are medians. A part that ran before into the same DIR is kept. About ten minutes on two CPU cores
without --parts=unpadded.

    utilisation  `matmul_utilisation`: model FLOPs per second of an update step over the best rate of a float32 product
                 of two square matrices (bench_bound.py); and where the rest goes (bench_step_parts.py)
    torch        `vs_torch_padded`: tokens per second over those of `transformers` under torch (bench_torch.py), an
                 update of four rows; the same sequences, shuffled, in microbatches of 2, padded to the longer of
                 each, same threads (pip install torch transformers)
    unpadded     the same against torch with one sequence at a time, which pads nothing; only when asked for
    lengths      tokens per second and utilisation by row length; those that --seconds does not allow are left out
    sizes        the same by model size, shapes between the two models

FLOPs are counted as `areal_jax.models.flops` says: 6 per weight of a matrix product (the head among them) and token of
a sequence, and attention over the pairs that the causal mask leaves. Padding, rematerialisation and the optimizer
count nothing, so that they lower the utilisation. Lengths of sequences are the paper's (bench_steps.py), divided so
that a row holds what 32,768 tokens hold there; rows are as full as in a large batch.
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
from areal_jax.models.huggingface import load_config
from areal_jax.models.transformer import TransformerConfig, param_count
from areal_jax.types import TrainBatch, Trajectory
from experiments import bench_bound, bench_step_parts, runs
from experiments.bench_steps import OPTIMIZER, Training, Work, rows_of_work
from experiments.bench_workload import DEFAULT_MODEL, SMOLLM2_135M, medians, take_turns, timed

mpl.use("Agg")
import matplotlib.pyplot as plt

DEFAULT_PARTS = ("utilisation", "torch", "lengths", "sizes")
PARTS = (*DEFAULT_PARTS, "unpadded")
MODELS = ("smollm2", "default")
ROW = 2048
CURVE = (2048, 4096, 8192)
COMPARED_ROWS = 4  # of an update that is compared with torch's
PER_DEVICE = 2  # sequences of torch's microbatches: with more, both do not fit in 24 GB
SIZES = {"2M": (128, 4), "8M": (256, 8), "23M": (384, 12)}  # d_model, layers


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model, and the sizes that it is measured with."""

    name: str
    model: TransformerConfig
    row: int = ROW
    curve: tuple[int, ...] = CURVE

    @functools.cached_property
    def training(self) -> Training:
        """Compiled for a row."""
        training = Training(self.model)
        training.programs.compile([(1, self.row)])
        return training

    @functools.cached_property
    def work(self) -> Work:
        return rows_of_work(1, self.row, self.model.vocab_size)


def make_bench(name: str) -> Bench:
    return Bench(name, SMOLLM2_135M if name == "smollm2" else load_config(DEFAULT_MODEL))


def sized(d_model: int, layers: int) -> TransformerConfig:
    """A model of SmolLM2's proportions."""
    return TransformerConfig(
        vocab_size=8192,
        d_model=d_model,
        layers=layers,
        heads=d_model // 64,
        kv_heads=d_model // 128,
        head_size=64,
        d_ff=8 * d_model // 3 // 64 * 64,
        tied_embeddings=True,
    )


def main(argv: Sequence[str]) -> None:
    del argv
    out, results = runs.begin(_OUT.value)
    for name in MODELS if _MODEL.value == "both" else (_MODEL.value,):
        bench, found = make_bench(name), results.setdefault(name, {})
        found["parameters"] = param_count(bench.model)
        for part in [part for part in _PARTS.value if part in MEASURES]:
            found.update(MEASURES[part](bench, _SECONDS.value))
            runs.write(out, results)
    if "sizes" in _PARTS.value:
        results["sizes"] = measure_sizes({name: sized(*size) for name, size in SIZES.items()}, ROW, _SECONDS.value)
        runs.write(out, results)
    plot(out / "trainer.png", results)
    print(table(results))


# The parts: each gives entries of results.json.


def matmul_rate() -> float:
    """FLOP/s of a float32 product of two square matrices, the best of several."""
    return bench_bound.measure_rates().flops_per_s


def measure_utilisation(bench: Bench, seconds: float) -> dict[str, Any]:
    training, work = bench.training, bench.work
    parts = bench_step_parts.make_parts(training, work.batches[0])
    for part in parts.values():
        timed(part.run)  # compiles
    training.step(work.batches)
    found = take_turns({"step": lambda: training.step(work.batches), "matmul rate": matmul_rate}, seconds / 2)
    found |= take_turns({name: functools.partial(timed, part.run) for name, part in parts.items()}, seconds / 2)
    rate, step = max(found.pop("matmul rate")), medians(found)["step"]
    asked = work.flops(bench.model)
    return {
        "matmul_utilisation": asked / step / rate,
        "utilisation": {
            "row": bench.row,
            "tokens": work.tokens,
            "tokens_per_second": work.tokens / step,
            "model_TFLOP": asked / 1e12,
            "matmul_GFLOP_per_s": rate / 1e9,
            "step_seconds": step,
            "parts": bench_step_parts.compared(parts, medians(found), step, rate),
            "seconds": found,
        },
    }


def measure_torch(bench: Bench, seconds: float) -> dict[str, Any]:
    ratio, found = against_torch(bench, PER_DEVICE, seconds)
    return {"vs_torch_padded": ratio, "torch": found}


def measure_unpadded(bench: Bench, seconds: float) -> dict[str, Any]:
    ratio, found = against_torch(bench, 1, seconds)
    return {"vs_torch_unpadded": ratio, "torch_unpadded": found}


def against_torch(bench: Bench, per_device: int, seconds: float) -> tuple[float, dict[str, Any]]:
    """Our tokens per second over theirs, and how that came about; the first losses are those of the same weights.

    Two updates of a row each come before and do not count: by then both have taken the memory that they keep.
    """
    from experiments.bench_torch import TorchTraining  # torch and transformers, which only this needs

    training, work = bench.training, rows_of_work(COMPARED_ROWS, bench.row, bench.model.vocab_size)
    theirs = TorchTraining(bench.model, training.state.params, OPTIMIZER)
    order = np.random.default_rng(0).permutation(len(work.sequences))
    sequences = [whole(work.sequences[i]) for i in order]
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}

    def kept(name: str, step: Callable[[], tuple[float, float]]) -> float:
        taken, loss = step()
        losses[name].append(loss)
        return taken

    def in_turns(batches: Sequence[TrainBatch], sequences: Sequence[np.ndarray], seconds: float) -> dict[str, Any]:
        return take_turns(
            {
                "ours": functools.partial(kept, "ours", lambda: training.step_with_loss(batches)),
                "theirs": functools.partial(kept, "theirs", lambda: theirs.step_with_loss(sequences, per_device)),
            },
            seconds,
        )

    in_turns(bench.work.batches, [whole(sequence) for sequence in bench.work.sequences], 0)
    found = in_turns(work.batches, sequences, seconds)
    groups = [sequences[first : first + per_device] for first in range(0, len(sequences), per_device)]
    computed = {
        "ours": sum(batch.tokens.size for batch in work.batches),
        "theirs": sum(len(group) * max(map(len, group)) for group in groups),
    }
    rates = {name: work.tokens / s for name, s in medians(found).items()}
    return rates["ours"] / rates["theirs"], {
        "tokens_per_second": rates,
        "tokens": work.tokens,
        "sequences": len(sequences),
        "per_device": per_device,
        "padding_share": {name: 1 - work.tokens / each for name, each in computed.items()},
        "losses": losses,
        "seconds": found,
    }


def whole(sequence: Trajectory) -> np.ndarray:
    """Its tokens."""
    return np.concatenate([sequence.prompt_tokens, sequence.tokens])


def measure_lengths(bench: Bench, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    left, before = seconds, 0.0
    for i, length in enumerate(bench.curve):
        if i >= 2 and 2 * before > left:  # twice the tokens take at least twice the time
            break
        found[str(length)] = speed(bench.training, length, max(left, 0.0) / len(bench.curve))
        before = found[str(length)]["step_seconds"]
        left -= sum(found[str(length)]["seconds"])
    return {"lengths": found}


def measure_sizes(models: dict[str, TransformerConfig], row: int, seconds: float) -> dict[str, Any]:
    return {
        name: {"parameters": param_count(model), **speed(Training(model), row, seconds / len(models))}
        for name, model in models.items()
    }


def speed(training: Training, row: int, seconds: float) -> dict[str, Any]:
    """Of update steps of one row, the first of which is not counted where there is time for more."""
    training.programs.compile([(1, row)])
    work = rows_of_work(1, row, training.model.vocab_size)
    rate = matmul_rate()
    found = [training.step(work.batches)]
    while len(found) < 6 and sum(found) + found[-1] <= seconds:
        found.append(training.step(work.batches))
    rate = max(rate, matmul_rate())
    step = float(np.median(found[1:] or found))
    asked = work.flops(training.model)
    return {
        "step_seconds": step,
        "tokens_per_second": work.tokens / step,
        "seconds_per_1000_tokens": 1000 * step / work.tokens,
        "matmul_utilisation": asked / step / rate,
        "model_TFLOP": asked / 1e12,
        "seconds": found,
    }


MEASURES: dict[str, Callable[[Bench, float], dict[str, Any]]] = {
    "utilisation": measure_utilisation,
    "torch": measure_torch,
    "unpadded": measure_unpadded,
    "lengths": measure_lengths,
}


# What is shown.


def table(results: dict[str, Any]) -> str:
    """All that was measured, one line each."""
    lines = []
    for name in [name for name in MODELS if name in results]:
        lines += [f"\n{name}, {results[name]['parameters']:,} parameters", *rows(results[name])]
    if "sizes" in results:
        lines.append("\nby size, random weights")
        lines += [
            f"  {f['parameters']:>11,} parameters: {f['tokens_per_second']:8.0f} tokens/s, utilisation "
            f"{f['matmul_utilisation']:.2f}"
            for f in results["sizes"].values()
        ]
    return "\n".join(lines)


def rows(found: dict[str, Any]) -> list[str]:
    lines = []
    if "matmul_utilisation" in found:
        of = found["utilisation"]
        lines.append(
            f"  utilisation {found['matmul_utilisation']:.2f}: {of['model_TFLOP']:.3f} TFLOP in "
            f"{of['step_seconds']:.2f} s, machine {of['matmul_GFLOP_per_s']:.0f} GFLOP/s"
        )
        lines += [
            f"    {part:15} {f['seconds']:8.3f} s, {f['share']:4.0%} of the step; {f['at_the_matmul_rate']:8.3f} s at "
            f"the machine's rate, {f['lost']:8.3f} s lost"
            for part, f in of["parts"].items()
        ]
    for key, what in (("padded", "torch"), ("unpadded", "torch_unpadded")):
        if f"vs_torch_{key}" in found:
            rates, shares = found[what]["tokens_per_second"], found[what]["padding_share"]
            losses = {name: each[0] for name, each in found[what]["losses"].items()}
            lines.append(
                f"  over torch, {key}: {found[f'vs_torch_{key}']:.2f} ({rates['ours']:.1f} against "
                f"{rates['theirs']:.1f} tokens/s; padding {shares['ours']:.0%} and {shares['theirs']:.0%}; first loss "
                f"{losses['ours']:.4f} and {losses['theirs']:.4f})"
            )
    lines += [
        f"  rows of {length:>5}: {f['tokens_per_second']:8.1f} tokens/s, utilisation {f['matmul_utilisation']:.2f}"
        for length, f in found.get("lengths", {}).items()
    ]
    return lines


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    sizes = [(f["parameters"], f["tokens_per_second"]) for f in results.get("sizes", {}).values()]
    for i, name in enumerate(name for name in MODELS if name in results):
        found = results[name]
        curve = found.get("lengths", {})
        per_token = [f["seconds_per_1000_tokens"] for f in curve.values()]
        axes[0].plot([int(length) for length in curve], per_token, f"C{i}o-", label=name)
        if "utilisation" in found:
            sizes.append((found["parameters"], found["utilisation"]["tokens_per_second"]))
            bottom = 0.0
            for j, (part, f) in enumerate(found["utilisation"]["parts"].items()):
                axes[2].bar(name, f["share"], bottom=bottom, color=f"C{j}", label=part if i == 0 else None)
                bottom += f["share"]
    axes[1].plot(*zip(*sorted(sizes), strict=True) if sizes else ([], []), "o-")
    axes[0].set(xscale="log", yscale="log", xlabel="tokens of a row", ylabel="s per 1,000 tokens of an update")
    axes[1].set(xscale="log", yscale="log", xlabel="parameters", ylabel=f"tokens/s, rows of {ROW:,}")
    axes[2].set(ylabel="share of a step")
    for each in (axes[0], axes[2]):
        each.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    host_memory.keep_freed()  # as every process of a run does
    _OUT = runs.OUT
    _MODEL = flags.DEFINE_enum("model", "both", (*MODELS, "both"), "Which model.")
    _PARTS = runs.define_parts(PARTS, DEFAULT_PARTS)
    _SECONDS = flags.DEFINE_float(
        "seconds", 60.0, "Seconds of measuring per part and model, at least two repetitions of a ratio in any case."
    )
    app.run(main)
