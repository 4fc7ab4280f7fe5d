"""The distance |log p of the generator - log p of the trainer| at equal version, in float32 and bfloat16.

Each dtype also with `generation.batch_invariant`, where nothing is left of it if it was rounding and nothing else.

    python -m experiments.logprob_gap --out=DIR

In: nothing. Out: DIR/results.json, DIR/gap.png, and the runs. Synchronous runs (eta = 0), in which every token was
sampled by the very weights that consume it; both sides compute in the dtype, the trainer's own weights stay float32.
"""

import pathlib
from collections.abc import Sequence

import matplotlib as mpl
from absl import app, flags

from experiments import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

_OUT = runs.OUT
_STEPS = flags.DEFINE_integer("steps", 20, "Training steps per run.")

DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value).absolute()
    results, steps = {}, {}
    for dtype in DTYPES:
        settings = [f"trainer.dtype={dtype}", f"generation.dtype={dtype}", "rollout.max_staleness=0", "eval.every=0"]
        settings.append(f"trainer.steps={_STEPS.value}")
        results[dtype] = runs.run(out / dtype, *settings)["logp_gap"]
        steps[dtype] = runs.lines(out / dtype, "metrics")
        name = f"{dtype}_batch_invariant"
        results[name] = runs.run(out / name, *settings, "generation.batch_invariant=True")["logp_gap"]
    plot(out / "gap.png", steps)
    runs.write(out, results)


def plot(path: pathlib.Path, steps: dict[str, list[runs.Line]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, (dtype, of_run) in enumerate(steps.items()):
        for name, style in (("p50", ":"), ("p99", "-"), ("max", "--")):
            values = [step[f"logp_gap/{name}"] for step in of_run]
            axes.semilogy([step["version"] for step in of_run], values, style, color=f"C{i}", label=f"{dtype} {name}")
    axes.set(xlabel="step", ylabel="|difference of log p|", title="Generator against trainer on the same weights")
    axes.legend(ncols=2)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
