"""A real language model learns arithmetic on the CPU: SmolLM2-135M-Instruct, asynchronously, task by task.

    pip install gguf && python -m experiments.smollm2_model --out=runs/smollm2
    python -m experiments.smollm2_math --out=DIR

In: the model directory. Out: DIR/results.json, DIR/learning.png, and a run per task. Each task starts from the same
pretrained weights. Scores of the first and the last weights are taken by `areal_jax.export` and
`areal_jax.evaluate`, as a user would.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import matplotlib as mpl
from absl import app, flags

from experiments import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

_OUT = runs.OUT
_MODEL = flags.DEFINE_string("model", "runs/smollm2", "What experiments.smollm2_model wrote.")
_TASKS = flags.DEFINE_list(
    "tasks", ["one_digit:40", "two_digits:160", "chain_sum:80"], "TASK:STEPS of configs/smollm2_135m_math.py."
)

CONFIG = "configs/smollm2_135m_math.py"
TITLES = {
    "one_digit": "one-digit sums",
    "two_digits": "two-digit sums and differences",
    "chain_sum": "reasoning-gym's chain_sum",
}
SHOWN = 6  # problems with their answers before and after
SAMPLES = 8  # of each held-out problem, for the scores before and after


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value).absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = [one_task(out, *task.split(":")) for task in _TASKS.value]
    plot(out / "learning.png", results)
    runs.write(out, {"tasks": results})


def one_task(out: pathlib.Path, task: str, steps: str) -> runs.Line:
    directory, config = out / task, f"{CONFIG}:{task}"
    if not directory.exists():  # an experiment that was stopped goes on with the task that it had not begun
        runs.run(directory, f"trainer.steps={steps}", f"model.path={_MODEL.value}", config=config)
    summary = json.loads((directory / "summary.json").read_text())
    exported = out / f"{task}-model"
    if not exported.exists():
        command(out / f"{task}-export.log", "areal_jax.export", f"--checkpoint={directory}", f"--out={exported}")
    models = {"before": _MODEL.value, "after": str(exported)}
    greedy = {when: score(out, config, path, temperature=0.0, samples=1) for when, path in models.items()}
    sampled = {when: score(out, config, path, temperature=1.0, samples=SAMPLES) for when, path in models.items()}
    steps_log = runs.lines(directory, "metrics")
    began = steps_log[0]["time"] - steps_log[0]["step_s"]
    curve = [
        [line["version"], max(0.0, line["time"] - began), line["accuracy"]]
        for line in runs.lines(directory, "evaluations")
    ]
    kept = ("held_out", "wall_s", "trained_tokens", "generated_tokens", "staleness", "swaps_mid_sequence", "logp_gap")
    return {
        "task": task,
        "steps": int(steps),
        "greedy": greedy,
        f"avg@{SAMPLES}": sampled,
        "curve": curve,
        "train": [[line["version"], line["time"] - began, line["reward/accuracy"]] for line in steps_log],
        "answers": answers(runs.lines(directory, "completions")),
        **{name: summary[name] for name in kept},
        "idle": summary["idle"],
        "recompilations_after_warmup": summary["recompilations_after_warmup"],
    }


def command(log: pathlib.Path, module: str, *arguments: str) -> None:
    with log.open("w") as file:
        subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=file, stderr=file)


def score(out: pathlib.Path, config: str, model: str, *, temperature: float, samples: int) -> float:
    """Held-out accuracy, by the command that users have for it."""
    directory = out / f"{config.split(':')[1]}-{pathlib.Path(model).name}-{'sampled' if temperature else 'greedy'}"
    if not (directory / "evaluation.json").exists():
        command(
            directory.with_suffix(".log"),
            "areal_jax.evaluate",
            f"--config={config}",
            f"--config.model.path={model}",
            f"--config.eval.temperature={temperature}",
            f"--config.eval.samples={samples}",
            f"--out={directory}",
        )
    return json.loads((directory / "evaluation.json").read_text())["accuracy"]


def answers(completions: Sequence[runs.Line]) -> list[runs.Line]:
    """The same held-out problems before and after."""
    by_phase = {phase: [line for line in completions if line["phase"] == phase] for phase in ("before", "after")}
    pairs = list(zip(by_phase["before"], by_phase["after"], strict=True))[:SHOWN]
    return [
        {
            "answer": before["answer"],
            "prompt": before["prompt"],
            "before": before["completion"],
            "after": after["completion"],
        }
        for before, after in pairs
    ]


def plot(path: pathlib.Path, results: Sequence[runs.Line]) -> None:
    figure, axes = plt.subplots(1, len(results), figsize=(5.2 * len(results), 4), layout="constrained", squeeze=False)
    for ax, result in zip(axes[0], results, strict=True):
        _, seconds, reward = zip(*result["train"], strict=True)
        ax.plot([s / 60 for s in seconds], reward, color="tab:blue", alpha=0.35, label="answers sampled for training")
        _, seconds, accuracy = zip(*result["curve"], strict=True)
        ax.plot(
            [s / 60 for s in seconds], accuracy, color="tab:orange", marker="o", markersize=4, label="held-out problems"
        )
        ax.set(
            title=TITLES[result["task"]],
            xlabel="minutes of RL on two CPU cores",
            ylabel="right answers, temperature 1",
            ylim=(-0.02, 1.02),
        )
        ax.legend(loc="lower right")
    figure.suptitle("SmolLM2-135M-Instruct, trained asynchronously")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
