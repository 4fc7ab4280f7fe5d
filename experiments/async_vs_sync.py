"""Asynchronous (eta = 4) against synchronous (eta = 0) training on the same number of tokens, a core per process.

    python -m experiments.async_vs_sync --out=DIR

In: nothing. Out: DIR/results.json, DIR/times.png, and the runs. The trainer has one core and the generation server the
other; the two settings take turns, so that a machine that becomes slower slows both. Both run without evaluation until
each has trained at least the same number of tokens; wall time is read off at that token, from the first step's start.
"""

import pathlib
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from absl import app, flags

from experiments import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

_OUT = runs.OUT
_PAIRS = flags.DEFINE_integer("pairs", 3, "Runs of each setting.")
_STEPS = flags.DEFINE_integer("steps", 60, "Training steps per run.")

SETTINGS = {"asynchronous": 4, "synchronous": 0}


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value).absolute()
    runs.run(out / "warm-up", *settings(4, seed=0, steps=3))  # compiles what the others load
    found: dict[str, list[runs.Line]] = {name: [] for name in SETTINGS}
    for pair in range(_PAIRS.value):
        for name, eta in SETTINGS.items():
            directory = out / f"{name}-{pair}"
            summary = runs.run(directory, *settings(eta, seed=pair + 1, steps=_STEPS.value))
            found[name].append({"directory": directory, "summary": summary})
    tokens = min(run["summary"]["trained_tokens"] for of_setting in found.values() for run in of_setting)
    results = {name: [figures(run, tokens) for run in of_setting] for name, of_setting in found.items()}
    seconds = {name: [run["seconds"] for run in of_setting] for name, of_setting in results.items()}
    ratios = [s / a for a, s in zip(seconds["asynchronous"], seconds["synchronous"], strict=True)]
    plot(out / "times.png", results)
    runs.write(out, {"tokens": tokens, "sync_over_async": ratios, "median": float(np.median(ratios)), **results})


def settings(eta: int, *, seed: int, steps: int) -> list[str]:
    return [
        f"rollout.max_staleness={eta}",
        f"run.seed={seed}",
        f"trainer.steps={steps}",
        "run.cores=(0, 1)",
        "eval.every=0",
        "trainer.checkpoint.every=0",
    ]


def figures(run: runs.Line, tokens: int) -> runs.Line:
    """Seconds until `tokens` tokens were trained, and how the processes spent them."""
    steps = runs.lines(run["directory"], "metrics")
    began = steps[0]["time"] - steps[0]["step_s"] + steps[0]["idle_s"]  # the first batch had come
    trained = np.cumsum([step["tokens/trained"] for step in steps])
    seconds = float(np.interp(tokens, trained, [step["time"] - began for step in steps]))
    summary = run["summary"]
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "idle": {name: summary["idle"][name] for name in ("trainer", "generator")},
        "staleness": {name: summary["staleness"][name] for name in ("mean", "max")},
        "swaps_mid_sequence": summary["swaps_mid_sequence"],
        "held_out": {name: summary["held_out"][name] for name in ("before", "after")},
    }


def plot(path: pathlib.Path, results: dict[str, list[runs.Line]]) -> None:
    figure, (time_axes, idle_axes) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    names = list(results)
    for i, name in enumerate(names):
        seconds = [run["seconds"] for run in results[name]]
        time_axes.bar(i, np.median(seconds), color=f"C{i}")
        time_axes.plot([i] * len(seconds), seconds, "k.")
        for j, part in enumerate(("trainer", "generator")):
            idle = [100 * run["idle"][part] for run in results[name]]
            idle_axes.bar(j + 0.4 * i, np.median(idle), width=0.35, color=f"C{i}", label=name if j == 0 else None)
    time_axes.set(xticks=range(len(names)), xticklabels=names, ylabel="seconds for the same trained tokens")
    idle_axes.set(xticks=[0.2, 1.2], xticklabels=["trainer", "generator"], ylabel="idle, % of the time")
    idle_axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
