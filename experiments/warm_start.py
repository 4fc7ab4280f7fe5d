"""Makes the model that `configs/math.py` starts from: a tiny transformer, warm-started by supervised fine-tuning.

    python -m experiments.warm_start --out=DIR

In: nothing. Out: DIR/model in the Hugging Face format, DIR/results.json and DIR/loss.png. About six minutes on two CPU
cores. The model first learns to write out all steps, with problems that grow longer; then it is shown a mixture of
full, skipped and faulty reasoning, so that it starts reinforcement learning in doubt:

    start 9 a: +4 b: -6 find b
    full      a: 13 b: 7 answer: 7
    skipped   answer: 8                    (a guess, right one time in four)
    faulty    a: 13 b: 13 answer: 13       (a step forgotten)
"""

import json
import pathlib
import random
import time
from collections.abc import Iterator, Sequence

import jax
import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tokenizers
from absl import app, flags

from areal_jax import compilation
from areal_jax.config import MeshConfig, OptimizerConfig, TrainerConfig
from areal_jax.models.safetensors_files import save_model
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.rollout import arithmetic
from areal_jax.rollout.arithmetic import Problem
from areal_jax.trainer import sft
from experiments import runs

_OUT = runs.OUT
_UPDATES = flags.DEFINE_integer("updates", 3600, "Optimizer updates.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the initial weights and the problems.")

PAD, EOS = "<pad>", "<eos>"
CURRICULUM = 0.3  # share of the updates over which problems grow from 4 to 26 steps
MIXTURE = 0.28  # share of the updates, the last ones, with skipped and faulty reasoning among the full
SHARES = {"full": 0.36, "skipped": 0.52, "faulty": 0.12}
GUESSES_RIGHT = 0.25
SECOND_FAULT = 0.25
EVEN_SKEW = 1.2  # of the number of steps while learning, so that long problems are no rarity
BATCH_TOKENS = 1800  # what always fits into one microbatch of 16 rows
MAX_LENGTH = 116

TRAINER = TrainerConfig(
    token_budget=2048,
    row_buckets=(128,),
    mesh=MeshConfig(data=1),
    optimizer=OptimizerConfig(
        lr=3e-3, schedule="cosine", warmup_fraction=0.017, beta2=0.98, eps=1e-8, weight_decay=0.0
    ),
)


def main(argv: Sequence[str]) -> None:
    del argv
    compilation.enable_cache()
    out = pathlib.Path(_OUT.value)
    tokenizer = make_tokenizer()
    model_config = TransformerConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=32,
        d_ff=160,
        qk_norm=True,
        tied_embeddings=True,
        max_positions=128,
    )
    params, results = train(model_config, tokenizer, updates=_UPDATES.value, seed=_SEED.value)
    save_model(out / "model", model_config, params)
    save_tokenizer(out / "model", tokenizer)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(out / "loss.png", results["loss"])


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per word, in the format of the `tokenizers` library."""
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, *arithmetic.words()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def save_tokenizer(directory: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
    (directory / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": eos, "pad_token_id": pad}, indent=2) + "\n"
    )


def train(
    model_config: TransformerConfig, tokenizer: tokenizers.Tokenizer, *, updates: int, seed: int
) -> tuple[dict[str, np.ndarray], dict]:
    """The warm-started params on the host, and what training looked like."""
    params = init_params(model_config, jax.random.key(seed))
    batches = example_batches(random.Random(seed), tokenizer, updates)
    began, losses, tokens = time.time(), [], 0.0
    fitting = sft.fit(model_config, params, batches, TRAINER, updates=updates, max_length=MAX_LENGTH)
    for update, (state, outcome) in enumerate(fitting, start=1):  # noqa: B007  (the last state is what is kept)
        losses.append(sft.mean_loss(outcome))
        tokens += sum(float(sums["tokens"]) for sums in outcome.sums)
        if update % 100 == 0:
            left = (time.time() - began) / update * (updates - update)
            print(f"update {update}/{updates}  loss {np.mean(losses[-100:]):.4f}  {left:.0f} s left", flush=True)
    results = {
        "updates": updates,
        "seed": seed,
        "parameters": sum(int(np.prod(p.shape)) for p in params.values()),
        "seconds": time.time() - began,
        "response_tokens": tokens,
        "loss": losses,
    }
    return {name: np.asarray(array) for name, array in state.params.items()}, results


def example_batches(rng: random.Random, tokenizer: tokenizers.Tokenizer, updates: int) -> Iterator[list[sft.Pair]]:
    """A batch of about BATCH_TOKENS tokens per update, in the order of the curriculum."""
    for update in range(updates):
        progress, size = update / updates, 0
        batch: list[sft.Pair] = []
        while size < BATCH_TOKENS - MAX_LENGTH:
            prompt, response = example(rng, progress)
            batch.append((tokenizer.encode(prompt).ids, tokenizer.encode(f"{response} {EOS}").ids))
            size += len(batch[-1][0]) + len(batch[-1][1])
        yield batch


def example(rng: random.Random, progress: float) -> tuple[str, str]:
    """Prompt and response at this share of the training."""
    mixed = progress >= 1 - MIXTURE
    most = round(4 + (arithmetic.MOST_STEPS - 4) * min(1.0, progress / CURRICULUM))
    skew = arithmetic.SKEW if mixed and rng.random() < 0.5 else EVEN_SKEW
    problem = arithmetic.sample_problem(rng, held_out=False, most_steps=most, skew=skew)
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0] if mixed else "full"
    return problem.text, {"full": full, "skipped": skipped, "faulty": faulty}[kind](rng, problem)


def full(rng: random.Random, problem: Problem) -> str:
    return arithmetic.written_out(problem.totals)


def skipped(rng: random.Random, problem: Problem) -> str:
    """Only an answer, mostly a near miss."""
    answer = problem.totals[-1]
    near = [n for n in range(max(0, answer - 3), min(arithmetic.LARGEST, answer + 3) + 1) if n != answer]
    return f"answer: {answer if rng.random() < GUESSES_RIGHT else rng.choice(near)}"


def faulty(rng: random.Random, problem: Problem) -> str:
    """One step, sometimes two, forgotten: the total stays, and later steps start from the wrong one."""
    forgotten = {rng.randrange(len(problem.operations)) for _ in range(1 + (rng.random() < SECOND_FAULT))}
    total, totals = problem.start, []
    for i, operation in enumerate(problem.operations):
        if i not in forgotten:
            total = min(arithmetic.LARGEST, max(0, arithmetic.apply(operation, total)))
        totals.append(total)
    return arithmetic.written_out(totals)


def plot(path: pathlib.Path, losses: Sequence[float]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(losses, linewidth=0.5)
    axes.axvline((1 - MIXTURE) * len(losses), color="gray", linestyle=":")
    axes.set(
        xlabel="update", ylabel="loss per response token (nats)", title="Warm start: full reasoning, then the mixture"
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
