"""The warm-started default model before any RL: how often it is right, and how long its answers are.

    python -m experiments.default_model --out=DIR

In: nothing. Out: DIR/results.json and DIR/lengths.png. 256 held-out problems, 8 samples each at temperature 1, and one
greedy answer each, from our own generation engine.
"""

import asyncio
import dataclasses
import pathlib
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from absl import app

from areal_jax import compilation, config
from areal_jax.launch import generation_server, roles
from areal_jax.launch.threads import LocalGenerate
from areal_jax.rewards.final_answer import final_answer
from areal_jax.rollout.evaluation import Evaluation, askable, evaluate, plan
from areal_jax.tokenizer import Tokenizer
from configs import math
from experiments import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

_OUT = runs.OUT

SAMPLES = 8


def main(argv: Sequence[str]) -> None:
    del argv
    compilation.enable_cache()
    out = pathlib.Path(_OUT.value).absolute()
    out.mkdir(parents=True, exist_ok=True)
    settings = config.build(math.get_config())
    scheduler = generation_server.make_scheduler(settings)
    sampled = asyncio.run(ask(settings, LocalGenerate(scheduler), samples=SAMPLES, temperature=1.0))
    greedy = asyncio.run(ask(settings, LocalGenerate(scheduler), samples=1, temperature=0.0))
    scheduler.stop()
    lengths = [sample["tokens"] for record in sampled.records for sample in record["samples"]]
    p50, p99 = np.percentile(lengths, [50, 99])
    results = {
        "problems": len(sampled.records),
        "samples": SAMPLES,
        "pass@1": sampled.figures()["pass@1"],
        f"pass@{SAMPLES}": sampled.figures()[f"pass@{SAMPLES}"],
        "greedy": greedy.figures()["accuracy"],
        "length": {"p50": p50, "p99": p99, "max": max(lengths), "p99_over_p50": p99 / p50},
    }
    plot(out / "lengths.png", lengths)
    runs.write(out, results)


async def ask(settings: config.Config, generate: LocalGenerate, *, samples: int, temperature: float) -> Evaluation:
    tokenizer, slots = Tokenizer.load(settings.model.path), settings.generation.slots
    asked = dataclasses.replace(settings.eval, samples=samples, temperature=temperature)
    settings = dataclasses.replace(settings, eval=asked)
    planned = plan(settings, stop_tokens=tokenizer.eos_ids, in_flight=slots, per_request=slots)
    with roles.make_scorer(settings) as scorer:
        return await evaluate(
            askable(roles.load_prompts(settings, "held_out", tokenizer), planned),
            planned,
            generate=generate,
            scorer=scorer,
            tokenizer=tokenizer,
            final_answer=final_answer,
        )


def plot(path: pathlib.Path, lengths: Sequence[int]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.hist(lengths, bins=range(max(lengths) + 2))
    axes.set(xlabel="tokens of a sampled answer", ylabel="answers", title="The default model before RL")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
