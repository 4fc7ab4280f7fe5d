"""How fast the generation engine is: against Hugging Face, static batching, the machine's bound, and through swaps.

    python -m experiments.bench_generation --out=DIR [--model=smollm2|default|both] [--parts=...] [--seconds=...]

In: nothing; SmolLM2-135M's shape has random weights, the default model is the one of configs/math.py. Out: tables,
DIR/results.json (`vs_huggingface`, `vs_static`, `over_bound` {batch: ratio}, `swap_throughput` {policy: ratio}, per
model) and DIR/curves.png. float32 on the CPU unless --dtype says otherwise. What is compared takes turns in one
process; figures are medians. A part that ran before into the same DIR is kept, so the benchmark can run in pieces.

    huggingface  output tokens per second over those of `transformers.generate`, same weights, prompts and lengths, both
                 greedy; how it is made as fast as it gets is in bench_huggingface.py (pip install torch transformers)
    static       continuous batching over waves of the same engine, each waiting for its last
    bound        time per decode step over what memory and arithmetic allow (bench_bound.py), and where the rest goes
    swap         stall of an update in decode steps; tokens per second with one every 2 s over those with none
    curves       time per decode step by context length; by batch it is in `bound`

Lengths are log-normal (sigma 1, p99/p50 of at least 8) and forced: no EOS, `max_new_tokens` of each request.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from absl import app, flags

from experiments import bench_bound, bench_swap, runs
from experiments.bench_workload import (
    Bench,
    continuous,
    make_bench,
    medians,
    serve,
    serving,
    static,
    tail,
    take_turns,
)

mpl.use("Agg")
import matplotlib.pyplot as plt

PARTS = ("huggingface", "static", "bound", "swap", "curves")
MODELS = ("smollm2", "default")
AGREEING = 8  # first tokens of a request that must be those of Hugging Face
CURVE_SLOTS = 16


def main(argv: Sequence[str]) -> None:
    del argv
    if unknown := set(_PARTS.value) - set(PARTS):
        raise ValueError(f"--parts has {', '.join(sorted(unknown))}; it may have {', '.join(PARTS)}")
    out, results = runs.begin(_OUT.value)
    for name in MODELS if _MODEL.value == "both" else (_MODEL.value,):
        bench = make_bench(name, _DTYPE.value)
        found = results.setdefault(name, {})
        found["memory"] = bench_bound.check_memory(bench)
        found["workload"] = {"tokens": int(bench.lengths.sum()), "p99_over_p50": tail(bench.lengths)}
        assert found["workload"]["p99_over_p50"] >= 8, found["workload"]
        for part in _PARTS.value:
            found.update(MEASURES[part](bench, _SECONDS.value))
            runs.write(out, results)
    plot(out / "curves.png", results)
    print(table(results))


# The parts: each gives entries of results.json.


def measure_huggingface(bench: Bench, seconds: float) -> dict[str, Any]:
    from experiments.bench_huggingface import HuggingFace  # torch and transformers, which only this part needs

    theirs = HuggingFace(bench)
    choice, predicted = theirs.best()
    with serving(bench, bench.slots, bench.longest) as scheduler:
        found = take_turns(
            {"ours": lambda: continuous(bench, scheduler), "theirs": lambda: theirs.run(choice)}, seconds, rounds=3
        )
        answers = serve(bench, scheduler, range(bench.slots))
    compared = [uid for uid, tokens in answers.items() if len(tokens) >= AGREEING]
    agreeing = [answers[uid][:AGREEING] == theirs.tokens(uid, AGREEING) for uid in compared]
    tokens = int(bench.lengths.sum())
    rates = {name: tokens / s for name, s in medians(found).items()}
    return {
        "vs_huggingface": rates["ours"] / rates["theirs"],
        "huggingface": {
            "tokens_per_second": rates,
            "slots": bench.slots,
            "batch": choice.batch,
            "threads": choice.threads,
            "predicted_seconds": predicted,
            "same_first_tokens": f"{sum(agreeing)} of {len(agreeing)}",
            "seconds": found,
        },
    }


def measure_static(bench: Bench, seconds: float) -> dict[str, Any]:
    with serving(bench, bench.slots, bench.longest) as scheduler:
        calls = {"continuous": lambda: continuous(bench, scheduler), "static": lambda: static(bench, scheduler)}
        found = take_turns(calls, seconds, rounds=3)
    middle = medians(found)
    return {"vs_static": middle["static"] / middle["continuous"], "static": {"slots": bench.slots, "seconds": found}}


def measure_bound(bench: Bench, seconds: float) -> dict[str, Any]:
    batches = bench_bound.BATCHES
    found = {batch: bench_bound.over_bound(bench, batch, seconds / len(batches)) for batch in batches}
    return {
        "over_bound": {str(batch): f["ratio"] for batch, f in found.items()},
        "bound": {str(b): f for b, f in found.items()},
    }


def measure_swap(bench: Bench, seconds: float) -> dict[str, Any]:
    found = [bench_swap.swap_costs(bench, slots, seconds / len(bench_swap.SLOTS)) for slots in bench_swap.SLOTS]
    least = {policy: min(f["throughput"][policy] for f in found) for policy in bench_swap.POLICIES}
    return {"swap_throughput": least, "swap": {str(f["slots"]): f for f in found}}


def measure_curves(bench: Bench, seconds: float) -> dict[str, Any]:
    found = bench_bound.step_by_context(bench, CURVE_SLOTS, seconds)
    return {"step_ms_by_context": {"slots": CURVE_SLOTS, **{str(length): ms for length, ms in found.items()}}}


MEASURES: dict[str, Callable[[Bench, float], dict[str, Any]]] = {
    "huggingface": measure_huggingface,
    "static": measure_static,
    "bound": measure_bound,
    "swap": measure_swap,
    "curves": measure_curves,
}


# What is shown.


def table(results: dict[str, Any]) -> str:
    """All that was measured, one line each."""
    return "\n".join(line for name, found in results.items() for line in [f"\n{name}", *rows(found)])


def rows(found: dict[str, Any]) -> list[str]:
    lines = [f"  cache: {found['memory']['cache_bytes_per_token']:,} bytes per slot and token, as computed"]
    if "vs_huggingface" in found:
        theirs = found["huggingface"]
        lines.append(
            f"  over Hugging Face {found['vs_huggingface']:.2f} ({theirs['tokens_per_second']['ours']:.0f} against "
            f"{theirs['tokens_per_second']['theirs']:.0f} tokens/s; its batch {theirs['batch']}, {theirs['threads']} "
            f"threads; same first tokens in {theirs['same_first_tokens']})"
        )
    if "vs_static" in found:
        lines.append(f"  over static batching {found['vs_static']:.2f} ({found['static']['slots']} slots)")
    for batch, f in found.get("bound", {}).items():
        shares = ", ".join(f"{part} {ms:.2f}" for part, ms in f["parts_ms"].items())
        lines.append(
            f"  batch {batch:>2}: {f['ratio']:5.2f} of the bound, {f['step_ms']:8.2f} ms, "
            f"{f['tokens_per_second']:7.0f} tokens/s ({shares})"
        )
    for slots, f in found.get("swap", {}).items():
        for policy, ratio in f["throughput"].items():
            lines.append(
                f"  {slots} slots, {policy:9}: stall {f['stall_steps'][policy]:6.1f} steps, in use after "
                f"{f['wait_steps'][policy]:6.1f}, throughput {ratio:.2f}"
            )
    if "step_ms_by_context" in found:
        lengths = {k: v for k, v in found["step_ms_by_context"].items() if k != "slots"}
        lines.append("  ms per step by context: " + ", ".join(f"{k}: {v:.2f}" for k, v in lengths.items()))
    return lines


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for i, (name, found) in enumerate(results.items()):
        bounds = found.get("bound", {})
        batches = [int(batch) for batch in bounds]
        axes[0].plot(batches, [f["step_ms"] for f in bounds.values()], f"C{i}o-", label=name)
        axes[0].plot(batches, [f["bound_ms"] for f in bounds.values()], f"C{i}:", label=f"{name}, bound")
        curve = {k: v for k, v in found.get("step_ms_by_context", {}).items() if k != "slots"}
        axes[1].plot([int(k) for k in curve], list(curve.values()), f"C{i}o-", label=name)
        swaps = found.get("swap_throughput", {})
        axes[2].bar([j + 0.4 * i for j in range(len(swaps))], list(swaps.values()), width=0.35, label=name)
        axes[2].set_xticks(range(len(swaps)), list(swaps))
    axes[0].set(xscale="log", yscale="log", xlabel="batch", ylabel="ms per decode step")
    axes[1].set(xscale="log", yscale="log", xlabel=f"cached tokens, {CURVE_SLOTS} slots", ylabel="ms per decode step")
    axes[2].set(ylabel=f"throughput, update every {bench_swap.EVERY_S:g} s over none")
    for each in axes:
        each.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    _OUT = runs.OUT
    _MODEL = flags.DEFINE_enum("model", "both", (*MODELS, "both"), "Which model.")
    _PARTS = flags.DEFINE_list("parts", list(PARTS), f"Which parts, of {', '.join(PARTS)}.")
    _SECONDS = flags.DEFINE_float(
        "seconds", 120.0, "Seconds of measuring per part, at least two repetitions in any case."
    )
    _DTYPE = flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Of our weights and cache.")
    app.run(main)
