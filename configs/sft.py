"""Supervised fine-tuning: a model learns to give the responses of a file, in one process and without generation.

    python -m areal_jax.main --config=configs/sft.py
    python -m areal_jax.main --config=configs/sft.py:own --config.model.path=DIR --config.sft.data=train.jsonl

As it stands it takes the model of `configs/math.py`, which mostly guesses, and shows it arithmetic with all steps
written out. Two CPU cores, less than a minute; expect the held-out loss to fall, and `areal_jax.evaluate` on the
exported checkpoint to find nearly all answers right. Behind the colon, `own` has sizes for a model of up to a few
billion parameters and for rows {"prompt": ..., "response": ...} of your own; with --config.sft.eval_data=test.jsonl the
loss of other ones is measured, too. Look at --dry_run first: it says what it takes and shows an example.
"""

import os
import pathlib

from areal_jax.config import default_config


def get_config(data="arithmetic"):
    config = default_config()
    config.run.name = "sft"
    config.trainer.steps = 0  # as many as the epochs need
    config.trainer.optimizer.schedule = "cosine"
    config.trainer.optimizer.warmup_fraction = 0.03
    if data not in RECIPES:
        raise ValueError(f"configs/sft.py:{data}: there is no such recipe; take one of {', '.join(RECIPES)}")
    RECIPES[data](config)
    return config


def arithmetic(config):
    config.model.path = os.path.relpath(pathlib.Path(__file__).parent / "arithmetic_model")
    config.sft.data = config.sft.eval_data = "areal_jax.rollout.arithmetic:examples"
    config.sft.options = {"count": 2000}
    config.sft.eval_options = {"count": 400}
    config.sft.max_length = 112
    config.trainer.token_budget = 1024
    config.trainer.row_buckets = (128,)
    config.trainer.optimizer.lr = 1e-3
    config.trainer.optimizer.weight_decay = 0.0
    config.trainer.checkpoint.every = 16
    config.eval.every = 8

    # For `areal_jax.evaluate`.
    config.eval.data = "areal_jax.rollout.arithmetic:ArithmeticPrompts"
    config.data.max_prompt_tokens = 56
    config.rollout.max_new_tokens = 56
    config.generation.length_buckets = (32, 64, 112)
    config.reward.function = "areal_jax.rewards.math_answer:stated_answer_matches"


def own(config):
    config.run.name = "sft-own"
    config.sft.batch_size = 32
    config.trainer.token_budget = 8192
    config.trainer.optimizer.lr = 1e-5
    config.trainer.checkpoint.every = 100
    config.eval.every = 50


RECIPES = {"arithmetic": arithmetic, "own": own}
