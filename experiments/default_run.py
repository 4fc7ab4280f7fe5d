"""The default job on several seeds: the held-out score before and after, and the wall time with cold and warm caches.

    python -m experiments.default_run --out=DIR

In: nothing. Out: DIR/results.json, DIR/curves.png, and the runs. The first run compiles everything, into a new cache;
the others find their programs there. Seeds change prompts and sampling; the warm-started model and the 256 held-out
problems are the same.
"""

import os
import pathlib
from collections.abc import Sequence

import matplotlib as mpl
from absl import app, flags

from experiments import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

_OUT = runs.OUT
_SEEDS = flags.DEFINE_list("seeds", ["1", "2", "3"], "Seeds of the runs.")


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value).absolute()
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(out / "cache")}
    results = [one_run(out / f"seed-{seed}", seed, environment) for seed in _SEEDS.value]
    plot(out / "curves.png", results)
    runs.write(
        out, {"cold_wall_s": results[0]["wall_s"], "warm_wall_s": [r["wall_s"] for r in results[1:]], "runs": results}
    )


def one_run(directory: pathlib.Path, seed: str, environment: dict[str, str]) -> runs.Line:
    summary = runs.run(directory, f"run.seed={seed}", environment=environment)
    evaluations = runs.lines(directory, "evaluations")
    first = runs.lines(directory, "metrics")[0]
    began = first["time"] - first["step_s"]  # of the first step: what comes before is start-up and compilation
    curve = [[max(0.0, line["time"] - began), line["accuracy"]] for line in evaluations]
    goal = summary["held_out"]["before"] + 0.3
    kept = ("held_out", "wall_s", "trained_tokens", "staleness", "swaps_mid_sequence", "logp_gap", "idle")
    return {
        "seed": int(seed),
        "rl_s": curve[-1][0],
        "rl_s_to_30_points": next((seconds for seconds, accuracy in curve if accuracy >= goal), None),
        "curve": curve,
        **{name: summary[name] for name in kept},
        "recompilations_after_warmup": summary["recompilations_after_warmup"],
    }


def plot(path: pathlib.Path, results: list[runs.Line]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for result in results:
        seconds, accuracy = zip(*result["curve"], strict=True)
        axes.plot(seconds, accuracy, marker=".", label=f"seed {result['seed']}")
    axes.set(xlabel="seconds of RL", ylabel="held-out accuracy, temperature 1", ylim=(0, 1), title="The default job")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
