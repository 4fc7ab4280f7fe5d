"""How fast the trainer is: against the machine's matmul rate, against torch, by sequence length and by model size.

    python -m experiments.bench_trainer --out=DIR [--model=smollm2|default|both|SHAPE] [--parts=...] [--seconds=...]
                                        [--rows=2048,4096,8192] [--dtype=...] [--remat=...] [--vocab_block=...]

In: nothing; all models have random weights, born on the device, in the shapes of SmolLM2-135M, of the model of
configs/math.py, or of any config.json (configs/shapes/qwen2.5-1.5b-instruct.json). Out: a table, DIR/results.json
(`matmul_utilisation`, `vs_torch_padded`, per model) and DIR/trainer.png. One device, all its cores, one row per
microbatch, of the first length of --rows and one per update where nothing else is said. What is compared takes turns in
one process; figures are medians. A part that ran before into the same DIR is kept. About a quarter of an hour on two
CPU cores without --parts=unpadded; what a GPU is given is in gpu_check.sh.

    utilisation  `matmul_utilisation`: model FLOPs per second of an update step over the best rate of a product of two
                 square matrices of the same dtype (bench_bound.py), and `mfu`, over the peak that the maker prints,
                 where it is known (areal_jax.trainer.utilisation); and where the rest goes (bench_step_parts.py)
    prox         the proximal pass of a batch of four equal rows in 1, 2 and 4 minibatches (bench_prox.py)
    torch        `vs_torch_padded`: tokens per second over those of `transformers` under torch (bench_torch.py), an
                 update of four rows; the same sequences, shuffled, in microbatches of 2, padded to the longer of
                 each, same threads (pip install torch transformers)
    unpadded     the same against torch with one sequence at a time, which pads nothing; only when asked for
    lengths      tokens per second and utilisation by row length, each of a second update at least, whatever --seconds
                 says; with the bytes that the plan of --dry_run gives, and the most that were in use
    sizes        the same by model size, shapes between the two models
    tiles        seconds of attention in a layer, forward and backward, by row length and by tile of the plain form
                 (models/tiled_attention.py); only when asked for

FLOPs are counted as `areal_jax.models.flops` says: 6 per weight of a matrix product (the head among them) and token of
a sequence, and attention over the pairs that the causal mask leaves. Padding, rematerialisation and the optimizer
count nothing, so that they lower the utilisation. Lengths of sequences are the paper's (bench_steps.py), divided so
that a row holds what 32,768 tokens hold there; rows are as full as in a large batch.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from absl import app, flags

from areal_jax import host_memory
from areal_jax.config import TrainerConfig
from areal_jax.models.attention import Kernels
from areal_jax.models.huggingface import load_config
from areal_jax.models.tiled_attention import Tile, tile_for
from areal_jax.models.transformer import TransformerConfig, param_count
from areal_jax.trainer.step import run_in_turn
from areal_jax.trainer.utilisation import TERA, peak_tflops
from areal_jax.types import Trajectory
from experiments import bench_bound, bench_memory, bench_prox, bench_step_parts, runs
from experiments.bench_steps import OPTIMIZER, TRAINER, Remat, Training, Work, rows_of_work
from experiments.bench_workload import DEFAULT_MODEL, SMOLLM2_135M, medians, take_turns, timed

mpl.use("Agg")
import matplotlib.pyplot as plt

DEFAULT_PARTS = ("utilisation", "prox", "torch", "lengths", "sizes")
PARTS = (*DEFAULT_PARTS, "unpadded", "tiles")
MODELS = ("smollm2", "default")
ROWS = (2048, 4096, 8192)
COMPARED_ROWS = 4  # of an update that is compared with torch's, and of a step with a proximal pass
PER_DEVICE = 2  # sequences of torch's microbatches: with more, both do not fit in 24 GB
TILES = (Tile(64, 64), Tile(128, 128), Tile(256, 128), Tile(256, 256))
SIZES = {"2M": (128, 4), "8M": (256, 8), "23M": (384, 12)}  # d_model, layers


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model, and the sizes that it is measured with: lengths of rows, with what of each is computed again."""

    model: TransformerConfig
    rows: Mapping[int, Remat]
    trainer: TrainerConfig = TRAINER

    @functools.cached_property
    def _training(self) -> Training:
        return Training(self.model, self.trainer)

    def training(self, row: int) -> Training:
        """The model under training, one and the same, compiled for a row of this length."""
        self._training.compile(row, self.rows[row])
        return self._training

    @property
    def row(self) -> int:
        return next(iter(self.rows))

    @functools.cached_property
    def work(self) -> Work:
        return rows_of_work(1, self.row, self.model.vocab_size)


def find_model(name: str) -> TransformerConfig:
    """Of a name in MODELS, or of a path."""
    if name == "smollm2":
        return SMOLLM2_135M
    return load_config(DEFAULT_MODEL if name == "default" else pathlib.Path(name))


def make_bench(
    model: TransformerConfig, rows: Sequence[int], trainer: TrainerConfig, allowed: Sequence[Remat]
) -> Bench:
    """Raises ValueError where the device has no room for a row."""
    remats = {row: bench_memory.choose_remat(model, trainer, row, allowed, bench_memory.room()) for row in rows}
    return Bench(model, remats, trainer)


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
    settings: dict[str, Any] = {"dtype": _DTYPE.value, "vocab_block": _VOCAB_BLOCK.value}
    trainer = dataclasses.replace(TRAINER, **settings)
    lengths = [int(row) for row in _ROWS.value]
    allowed = [remat for remat in bench_memory.LEAST_FIRST if _REMAT.value in ("auto", remat)]
    for name in MODELS if _MODEL.value == "both" else (_MODEL.value,):
        bench = make_bench(find_model(name), lengths, trainer, allowed)
        found = results.setdefault(pathlib.Path(name).name.removesuffix(".json"), {})
        found |= {"parameters": param_count(bench.model), "dtype": trainer.dtype}
        for part in [part for part in _PARTS.value if part in MEASURES]:
            bench_memory.give_back()
            found.update(MEASURES[part](bench, _SECONDS.value))
            runs.write(out, results)
    if "sizes" in _PARTS.value:
        models = {name: sized(*size) for name, size in SIZES.items()}
        results["sizes"] = measure_sizes(models, lengths[0], _SECONDS.value)
        runs.write(out, results)
    plot(out / "trainer.png", results)
    print(table(results))


# The parts: each gives entries of results.json.


def utilisation(flops_per_s: float, rate: float, dtype: str) -> dict[str, float]:
    """Shares of the rate of products that was measured and, of a device whose peak is known, of that one."""
    peak = peak_tflops(jax.devices()[0].device_kind, dtype)
    shares = {"matmul_utilisation": flops_per_s / rate}
    return shares if peak is None else shares | {"mfu": flops_per_s / (peak * TERA)}


def measure_utilisation(bench: Bench, seconds: float) -> dict[str, Any]:
    training, work, dtype = bench.training(bench.row), bench.work, bench.trainer.dtype
    parts = bench_step_parts.make_parts(training, work.batches[0])
    for part in parts.values():
        timed(part.run)  # compiles
    training.step(work.batches)
    measure_rate = functools.partial(bench_bound.matmul_rate, dtype)
    found = take_turns({"step": lambda: training.step(work.batches), "matmul rate": measure_rate}, seconds / 2)
    found |= take_turns({name: functools.partial(timed, part.run) for name, part in parts.items()}, seconds / 2)
    rate, step = max(found.pop("matmul rate")), medians(found)["step"]
    asked = work.flops(bench.model)
    return {
        **utilisation(asked / step, rate, dtype),
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


def measure_prox(bench: Bench, seconds: float) -> dict[str, Any]:
    batches = COMPARED_ROWS * bench.work.batches  # as sequences differ in length, other rows would be other work
    return {"prox": bench_prox.proximal_pass(bench.training(bench.row), batches, seconds)}


def measure_torch(bench: Bench, seconds: float) -> dict[str, Any]:
    ratio, found = against_torch(bench, PER_DEVICE, seconds)
    return {"vs_torch_padded": ratio, "torch": found}


def measure_unpadded(bench: Bench, seconds: float) -> dict[str, Any]:
    ratio, found = against_torch(bench, 1, seconds)
    return {"vs_torch_unpadded": ratio, "torch_unpadded": found}


def against_torch(bench: Bench, per_device: int, seconds: float) -> tuple[float, dict[str, Any]]:
    """Our tokens per second over theirs, and how that came about; the first losses are those of the same weights.

    A round of the same updates comes before and does not count: by then both have taken the memory that they keep,
    which the kernel clears as it hands it out.
    """
    from experiments.bench_torch import TorchTraining  # torch and transformers, which only this needs

    if bench.trainer.dtype != "float32":
        raise ValueError(f"--dtype={bench.trainer.dtype}: torch's step is float32; leave its parts out of --parts")
    training, work = bench.training(bench.row), rows_of_work(COMPARED_ROWS, bench.row, bench.model.vocab_size)
    theirs = TorchTraining(bench.model, training.state.params, OPTIMIZER)
    order = np.random.default_rng(0).permutation(len(work.sequences))
    sequences = [whole(work.sequences[i]) for i in order]
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}

    def kept(name: str, step: Callable[[], tuple[float, float]]) -> float:
        taken, loss = step()
        losses[name].append(loss)
        return taken

    calls: dict[str, Callable[[], float]] = {
        "ours": functools.partial(kept, "ours", lambda: training.step_with_loss(work.batches)),
        "theirs": functools.partial(kept, "theirs", lambda: theirs.step_with_loss(sequences, per_device)),
    }
    take_turns(calls, 0, rounds=1)
    found = take_turns(calls, seconds)
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
    for row in bench.rows:
        bench_memory.give_back()
        found[str(row)] = speed(bench.training(row), row, seconds / len(bench.rows))
    return {"lengths": found}


def measure_tiles(bench: Bench, seconds: float) -> dict[str, Any]:
    model = bench.model
    found: dict[str, Any] = {}
    for row in bench.rows:
        (batch,) = rows_of_work(1, row, model.vocab_size).batches
        segment_ids_RL = jnp.asarray(batch.segment_ids)
        calls: dict[str, Callable[[], float]] = {}
        for tile in TILES:
            program = bench_step_parts.mixing_of_a_layer(model, segment_ids_RL, bench.trainer.dtype, Kernels(tile=tile))
            calls[written(tile)] = functools.partial(timed, program)
            timed(program)  # compiles
        chosen = written(tile_for(row, model.head_size))
        found[str(row)] = {"chosen": chosen, "seconds": medians(take_turns(calls, seconds / len(bench.rows)))}
    return {"tiles": found}


def written(tile: Tile) -> str:
    return f"{tile.queries} x {tile.keys}"


def measure_sizes(models: dict[str, TransformerConfig], row: int, seconds: float) -> dict[str, Any]:
    benches = {name: Bench(model, {row: "none"}) for name, model in models.items()}
    return {
        name: {"parameters": param_count(bench.model), **speed(bench.training(row), row, seconds / len(models))}
        for name, bench in benches.items()
    }


def speed(training: Training, row: int, seconds: float) -> dict[str, Any]:
    """Of update steps of one row, the first of which is not counted: the kernel clears the memory that it takes."""
    work, dtype = rows_of_work(1, row, training.model.vocab_size), training.config.dtype
    rate = bench_bound.matmul_rate(dtype)
    first, found = training.step(work.batches), [training.step(work.batches)]
    while len(found) < 5 and first + sum(found) + found[-1] <= seconds:
        found.append(training.step(work.batches))
    rate = max(rate, bench_bound.matmul_rate(dtype))
    step = float(np.median(found))
    asked = work.flops(training.model)
    return {
        "step_seconds": step,
        "tokens_per_second": work.tokens / step,
        "seconds_per_1000_tokens": 1000 * step / work.tokens,
        **utilisation(asked / step, rate, dtype),
        "model_TFLOP": asked / 1e12,
        "remat": training.config.remat,
        "planned_bytes": bench_memory.planned(training.model, training.config, row),
        "peak_bytes": bench_memory.peak(),
        "seconds": found,
    }


MEASURES: dict[str, Callable[[Bench, float], dict[str, Any]]] = {
    "utilisation": measure_utilisation,
    "prox": measure_prox,
    "torch": measure_torch,
    "unpadded": measure_unpadded,
    "lengths": measure_lengths,
    "tiles": measure_tiles,
}


# What is shown.


def table(results: dict[str, Any]) -> str:
    """All that was measured, one line each."""
    lines = []
    for name, found in by_model(results).items():
        lines += [f"\n{name}, {found['parameters']:,} parameters, {found['dtype']}", *rows(found)]
    if "sizes" in results:
        lines.append("\nby size, random weights")
        lines += [
            f"  {f['parameters']:>11,} parameters: {f['tokens_per_second']:8.0f} tokens/s, utilisation "
            f"{f['matmul_utilisation']:.2f}"
            for f in results["sizes"].values()
        ]
    return "\n".join(lines)


def by_model(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: found for name, found in results.items() if name != "sizes"}


def shares(found: Mapping[str, Any]) -> str:
    mfu = f", MFU {found['mfu']:.2f}" if "mfu" in found else ""
    return f"utilisation {found['matmul_utilisation']:.2f}{mfu}"


def rows(found: dict[str, Any]) -> list[str]:
    lines = []
    if "matmul_utilisation" in found:
        of = found["utilisation"]
        lines.append(
            f"  {shares(found)}: {of['model_TFLOP']:.3f} TFLOP in "
            f"{of['step_seconds']:.2f} s, machine {of['matmul_GFLOP_per_s']:.0f} GFLOP/s"
        )
        lines += [
            f"    {part:15} {f['seconds']:8.3f} s, {f['share']:4.0%} of the step; {f['at_the_matmul_rate']:8.3f} s at "
            f"the machine's rate, {f['lost']:8.3f} s lost"
            for part, f in of["parts"].items()
        ]
    lines += [
        f"  {n} minibatch(es): proximal pass of {f['calls']} of {f['calls_of_whole_pass']} calls of `logprobs`, "
        f"{f['over_whole_pass']:.2f} of the whole pass's time, {f['over_updates']:.3f} of the updates'; its numbers: "
        f"{bench_prox.compared(f)}"
        for n, f in found.get("prox", {}).items()
    ]
    for key, what in (("padded", "torch"), ("unpadded", "torch_unpadded")):
        if f"vs_torch_{key}" in found:
            rates, empty = found[what]["tokens_per_second"], found[what]["padding_share"]
            losses = {name: each[0] for name, each in found[what]["losses"].items()}
            lines.append(
                f"  over torch, {key}: {found[f'vs_torch_{key}']:.2f} ({rates['ours']:.1f} against "
                f"{rates['theirs']:.1f} tokens/s; padding {empty['ours']:.0%} and {empty['theirs']:.0%}; first loss "
                f"{losses['ours']:.4f} and {losses['theirs']:.4f})"
            )
    lines += [
        f"  rows of {length:>6}: {f['tokens_per_second']:8.1f} tokens/s, {shares(f)}, {f['step_seconds']:.2f} s, "
        f"remat={f['remat']}, {sum(f['planned_bytes'].values()) / 1e9:.2f} GB planned, {f['peak_bytes'] / 1e9:.2f} GB "
        "at most so far"
        for length, f in found.get("lengths", {}).items()
    ]
    lines += [
        f"  attention of a layer in a row of {length}, by tile of queries x keys: "
        + ", ".join(f"{tile} {s:.3f} s{' (chosen)' * (tile == f['chosen'])}" for tile, s in f["seconds"].items())
        for length, f in found.get("tiles", {}).items()
    ]
    return lines


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    sizes = [(f["parameters"], f["tokens_per_second"]) for f in results.get("sizes", {}).values()]
    for i, (name, found) in enumerate(by_model(results).items()):
        curve = found.get("lengths", {})
        per_token = [f["seconds_per_1000_tokens"] for f in curve.values()]
        if curve:
            axes[0].plot([int(length) for length in curve], per_token, f"C{i}o-", label=name)
        if "utilisation" in found:
            sizes.append((found["parameters"], found["utilisation"]["tokens_per_second"]))
            bottom = 0.0
            for j, (part, f) in enumerate(found["utilisation"]["parts"].items()):
                axes[2].bar(name, f["share"], bottom=bottom, color=f"C{j}", label=part if i == 0 else None)
                bottom += f["share"]
    if sizes:
        axes[1].plot(*zip(*sorted(sizes), strict=True), "o-", label="random weights")
    axes[0].set(xscale="log", yscale="log", xlabel="tokens of a row", ylabel="s per 1,000 tokens of an update")
    axes[1].set(xscale="log", yscale="log", xlabel="parameters", ylabel="tokens/s, rows of the first length")
    axes[2].set(ylabel="share of a step")
    for one in axes:
        if one.get_legend_handles_labels()[0]:
            one.legend()
        else:  # a part that was not measured: nothing to scale its axes by
            one.set_axis_off()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    host_memory.start_training(in_turn=True)  # as a trainer
    run_in_turn()
    _OUT = runs.OUT
    _MODEL = flags.DEFINE_string("model", "both", f"Which model, of {', '.join(MODELS)}, both, or a config.json.")
    _ROWS = flags.DEFINE_list("rows", [str(row) for row in ROWS], "Lengths of rows in tokens.")
    _DTYPE = flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Of the forward pass.")
    _REMAT = flags.DEFINE_enum(
        "remat", "auto", ("auto", *bench_memory.LEAST_FIRST), "trainer.remat; auto: the least whose plan fits."
    )
    _VOCAB_BLOCK = flags.DEFINE_integer("vocab_block", TRAINER.vocab_block, "trainer.vocab_block.")
    _PARTS = runs.define_parts(PARTS, DEFAULT_PARTS)
    _SECONDS = flags.DEFINE_float(
        "seconds", 60.0, "Seconds of measuring per part and model, at least two repetitions of a ratio in any case."
    )
    app.run(main)
