"""How fast the generation engine is: against Hugging Face, static batching, the machine's bound, and through swaps.

    python -m experiments.bench_generation --out=DIR [--model=smollm2|default|both] [--dtype=float32|bfloat16|both]
                                           [--parts=...] [--seconds=...]

In: nothing; SmolLM2-135M's shape has random weights, the default model is the one of configs/math.py. Out: tables,
DIR/results.json (`vs_huggingface`, `vs_static`, `over_bound` {batch: ratio}, `swap_throughput` {policy: ratio}, per
model and dtype) and DIR/curves.png. Of a model as such, `vs_huggingface` is our best dtype over the best of Hugging
Face, and the others are those of our best dtype. What is compared takes turns in one process; figures are medians. A
part that ran before into the same DIR is kept, so the benchmark can run in pieces.

    huggingface  output tokens per second over those of `transformers.generate`, same weights, prompts, lengths and
                 dtype, both greedy, requests in the order of their arrival; how it is made as fast as it gets is in
                 bench_huggingface.py (pip install torch transformers). `vs_huggingface_sorted` is over one that knows
                 all lengths beforehand and takes neighbours in length together. All dtypes take turns.
    static       continuous batching over waves of the same engine, each waiting for its last: a batch keeps its width,
                 as it does where batching is static. `vs_static_narrow` is over waves that go on in the narrow step
                 (`generation.slot_buckets`) when few are left
    bound        time per decode step over what memory and arithmetic allow (bench_bound.py), and where the rest goes;
                 the step's products with weights alone, by XLA and by other libraries (bench_products.py)
    swap         stall of an update in decode steps; tokens per second with one every 2 s over those with none
    curves       time per decode step by context length; by batch it is in `bound`

Lengths are log-normal (sigma 1, p99/p50 of at least 8) and forced: no EOS, `max_new_tokens` of each request.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from absl import app, flags

from areal_jax import host_memory
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
DTYPES = ("float32", "bfloat16")
RATIOS = ("vs_huggingface", "vs_static", "over_bound", "swap_throughput")
AGREEING = 8  # first tokens of a request that must be those of Hugging Face
CURVE_SLOTS = 16


def main(argv: Sequence[str]) -> None:
    del argv
    if unknown := set(_PARTS.value) - set(PARTS):
        raise ValueError(f"--parts has {', '.join(sorted(unknown))}; it may have {', '.join(PARTS)}")
    out, results = runs.begin(_OUT.value)
    for name in MODELS if _MODEL.value == "both" else (_MODEL.value,):
        bench = make_bench(name, DTYPES[0])
        dtypes = DTYPES if _DTYPE.value == "both" else (_DTYPE.value,)
        benches = {dtype: dataclasses.replace(bench, dtype=dtype) for dtype in dtypes}
        found = results.setdefault(name, {})
        for dtype, each in benches.items():
            workload = {"tokens": int(bench.lengths.sum()), "p99_over_p50": tail(bench.lengths)}
            assert workload["p99_over_p50"] >= 8, workload
            found.setdefault(dtype, {}).update(memory=bench_bound.check_memory(each), workload=workload)
        for part in _PARTS.value:
            for dtype, entries in MEASURES[part](benches, _SECONDS.value).items():
                found[dtype].update(entries)
            found.update(best(found))
            runs.write(out, results)
    plot(out / "curves.png", results)
    print(table(results))


def best(found: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios of a model as such, for those by dtype: our best dtype, the best of Hugging Face."""
    measured = by_dtype(found)
    rates = {dtype: of["huggingface"]["tokens_per_second"] for dtype, of in measured.items() if "huggingface" in of}
    ours = max(rates, key=lambda dtype: rates[dtype]["ours"]) if rates else next(iter(measured))
    rated: dict[str, Any] = {}
    for of in (*measured.values(), measured[ours]):  # a part may have been run in another dtype only
        rated |= {name: of[name] for name in RATIOS if name in of}
    ratios = {name: rated[name] for name in RATIOS if name in rated}
    if rates:
        for ratio, order in (("vs_huggingface", "arrival"), ("vs_huggingface_sorted", "length")):
            ratios[ratio] = rates[ours]["ours"] / max(rate[order] for rate in rates.values())
    return {"dtype": ours, **ratios}


# The parts: each gives entries of results.json, by dtype.


def measure_huggingface(benches: Mapping[str, Bench], seconds: float) -> dict[str, dict[str, Any]]:
    # torch and transformers, which only this part needs
    from experiments.bench_huggingface import ORDERS, HuggingFace

    theirs = {dtype: HuggingFace(bench) for dtype, bench in benches.items()}
    choices = {(dtype, order): each.best(order) for dtype, each in theirs.items() for order in ORDERS}
    calls: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        schedulers = {d: stack.enter_context(serving(b, b.slots, b.longest)) for d, b in benches.items()}
        for dtype, bench in benches.items():
            calls[f"ours {dtype}"] = functools.partial(continuous, bench, schedulers[dtype])
            for order in ORDERS:
                calls[f"{order} {dtype}"] = functools.partial(theirs[dtype].run, choices[dtype, order][0], order)
        found = take_turns(calls, seconds * len(benches), rounds=3)
        answers = {d: serve(bench, schedulers[d], range(bench.slots)) for d, bench in benches.items()}
    entries = {}
    for dtype, bench in benches.items():
        own = {name: found[f"{name} {dtype}"] for name in ("ours", *ORDERS)}
        rates = {name: int(bench.lengths.sum()) / s for name, s in medians(own).items()}
        entries[dtype] = {
            "vs_huggingface": rates["ours"] / rates["arrival"],
            "vs_huggingface_sorted": rates["ours"] / rates["length"],
            "huggingface": {
                "tokens_per_second": rates,
                "slots": bench.slots,
                "chosen": {order: dataclasses.asdict(choices[dtype, order][0]) for order in ORDERS},
                "predicted_seconds": {order: choices[dtype, order][1] for order in ORDERS},
                "same_first_tokens": agreement(answers[dtype], theirs[dtype]),
                "seconds": own,
            },
        }
    return entries


def agreement(answers: Mapping[int, list[int]], theirs: Any) -> str:
    """In how many of the requests that are long enough the first tokens are those of Hugging Face."""
    compared = [uid for uid, tokens in answers.items() if len(tokens) >= AGREEING]
    agreeing = [answers[uid][:AGREEING] == theirs.tokens(uid, AGREEING) for uid in compared]
    return f"{sum(agreeing)} of {len(agreeing)}"


def measure_static(bench: Bench, seconds: float) -> dict[str, Any]:
    slots, longest = bench.slots, bench.longest
    with serving(bench, slots, longest) as own, serving(bench, slots, longest, slot_buckets=(slots,)) as full_width:
        calls = {
            "continuous": lambda: continuous(bench, own),
            "static": lambda: static(bench, full_width),
            "static_narrow": lambda: static(bench, own),
        }
        found = take_turns(calls, seconds, rounds=3)
    middle = medians(found)
    return {
        "vs_static": middle["static"] / middle["continuous"],
        "vs_static_narrow": middle["static_narrow"] / middle["continuous"],
        "static": {"slots": slots, "seconds": found},
    }


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


Measure = Callable[[Mapping[str, Bench], float], dict[str, dict[str, Any]]]


def each(measure: Callable[[Bench, float], dict[str, Any]]) -> Measure:
    """One dtype after the other."""
    return lambda benches, seconds: {dtype: measure(bench, seconds) for dtype, bench in benches.items()}


MEASURES: dict[str, Measure] = {
    "huggingface": measure_huggingface,
    "static": each(measure_static),
    "bound": each(measure_bound),
    "swap": each(measure_swap),
    "curves": each(measure_curves),
}


# What is shown.


def table(results: dict[str, Any]) -> str:
    """All that was measured, one line each."""
    lines = []
    for name, found in results.items():
        if "vs_huggingface" in found:
            lines.append(f"\n{name}: {found['vs_huggingface']:.2f} times the best of Hugging Face, in {found['dtype']}")
        for dtype, of in by_dtype(found).items():
            lines += [f"\n{name}, {dtype}", *rows(of)]
    return "\n".join(lines)


def by_dtype(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {dtype: found[dtype] for dtype in DTYPES if dtype in found}


def rows(found: dict[str, Any]) -> list[str]:
    cache = found["memory"]
    lines = [
        f"  cache, {cache['cache_dtype']}: {cache[f'cache_bytes_per_{part}']:,.0f} bytes per {part}{of}, computed "
        f"{cache[f'cache_bytes_per_{part}_expected']:,}"
        for part, of in (("token", ""), ("slot", f" of {cache['slot_tokens']:,} tokens"))
    ]
    if "vs_huggingface" in found:
        theirs, rates = found["huggingface"], found["huggingface"]["tokens_per_second"]
        for ratio, order in (("vs_huggingface", "arrival"), ("vs_huggingface_sorted", "length")):
            chosen = theirs["chosen"][order]
            lines.append(
                f"  over Hugging Face with requests by {order} {found[ratio]:.2f} ({rates['ours']:.0f} against "
                f"{rates[order]:.0f} tokens/s; its batch {chosen['batch']}, {chosen['threads']} threads; same first "
                f"tokens in {theirs['same_first_tokens']})"
            )
    if "vs_static" in found:
        lines.append(
            f"  over static batching {found['vs_static']:.2f} ({found['static']['slots']} slots; "
            f"{found['vs_static_narrow']:.2f} over waves that end in the narrow step)"
        )
    for batch, f in found.get("bound", {}).items():
        shares = ", ".join(f"{part} {ms:.2f}" for part, ms in f["parts_ms"].items())
        lines.append(
            f"  batch {batch:>2}: {f['ratio']:5.2f} of the bound, {f['step_ms']:8.2f} ms, "
            f"{f['tokens_per_second']:7.0f} tokens/s ({shares})"
        )
        alone = ", ".join(f"{library} {ms:.2f}" for library, ms in f["products_ms"].items())
        products = f["products_ms"]["xla"] / f["bound_ms"]
        lines.append(f"            its products alone are {products:5.2f} of the bound (ms: {alone})")
    for slots, f in found.get("swap", {}).items():
        for policy, ratio in f["throughput"].items():
            lines.append(
                f"  {slots} slots, {policy:9}: stall {f['stall_steps'][policy]:6.1f} steps, in use after "
                f"{f['wait_steps'][policy]:6.1f}, throughput {ratio:.2f}"
            )
        lines.append(f"            recompute at the matmul rate would leave {f['recompute_at_most']:.2f}")
    if "step_ms_by_context" in found:
        lengths = {k: v for k, v in found["step_ms_by_context"].items() if k != "slots"}
        lines.append("  ms per step by context: " + ", ".join(f"{k}: {v:.2f}" for k, v in lengths.items()))
    return lines


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    measured = {f"{name}, {dtype}": of for name, found in results.items() for dtype, of in by_dtype(found).items()}
    for i, (name, found) in enumerate(measured.items()):
        bounds = found.get("bound", {})
        batches = [int(batch) for batch in bounds]
        if bounds:
            axes[0].plot(batches, [f["step_ms"] for f in bounds.values()], f"C{i}o-", label=name)
            axes[0].plot(batches, [f["bound_ms"] for f in bounds.values()], f"C{i}:", label=f"{name}, bound")
        curve = {k: v for k, v in found.get("step_ms_by_context", {}).items() if k != "slots"}
        if curve:
            axes[1].plot([int(k) for k in curve], list(curve.values()), f"C{i}o-", label=name)
        swaps = found.get("swap_throughput", {})
        if swaps:
            axes[2].bar([j + 0.2 * i for j in range(len(swaps))], list(swaps.values()), width=0.18, label=name)
            axes[2].set_xticks(range(len(swaps)), list(swaps))
    axes[0].set(xscale="log", yscale="log", xlabel="batch", ylabel="ms per decode step")
    axes[1].set(xscale="log", yscale="log", xlabel=f"cached tokens, {CURVE_SLOTS} slots", ylabel="ms per decode step")
    axes[2].set(ylabel=f"throughput, update every {bench_swap.EVERY_S:g} s over none")
    for one in axes:
        if one.get_legend_handles_labels()[0]:
            one.legend()
        else:  # a part that was not measured: nothing to scale its axes by
            one.set_axis_off()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    host_memory.keep_freed()  # as a generation server
    _OUT = runs.OUT
    _MODEL = flags.DEFINE_enum("model", "both", (*MODELS, "both"), "Which model.")
    _PARTS = flags.DEFINE_list("parts", list(PARTS), f"Which parts, of {', '.join(PARTS)}.")
    _SECONDS = flags.DEFINE_float(
        "seconds", 120.0, "Seconds of measuring per part, at least two repetitions in any case."
    )
    _DTYPE = flags.DEFINE_enum("dtype", "both", (*DTYPES, "both"), "Of weights and cache, ours and Hugging Face's.")
    app.run(main)
