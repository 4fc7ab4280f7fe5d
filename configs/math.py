"""Arithmetic in named steps on a model of 117 thousand parameters: runs anywhere, with nothing to download.

    python -m areal_jax.main --config=configs/math.py

Asynchronous RL (AReaL, arXiv 2505.24298) in three local processes, weights swapped in mid sequence. Two CPU cores,
one or two minutes; numbers in experiments/README.md. Expect the held-out score to rise from 0.4 to above 0.95,
while the model finds that writing out the steps pays.
"""

import os
import pathlib

from areal_jax.config import default_config


def get_config():
    config = default_config()
    config.run.name = "math"
    config.model.path = os.path.relpath(pathlib.Path(__file__).parent / "arithmetic_model")

    config.data.train = config.eval.data = "areal_jax.rollout.arithmetic:ArithmeticPrompts"
    config.data.max_prompt_tokens = 56  # 26 steps
    config.rollout.max_new_tokens = 56
    config.reward.function = "areal_jax.rewards.math_answer:stated_answer_matches"

    config.trainer.steps = 200
    config.trainer.prompts_per_step = 16
    config.rollout.group_size = 8
    config.rollout.max_staleness = 4
    config.trainer.optimizer.lr = 5e-5
    config.trainer.optimizer.warmup_fraction = 0.02
    config.trainer.objective.minibatches = 2
    config.trainer.objective.group_baseline = True

    config.trainer.token_budget = 1024
    config.trainer.row_buckets = (128,)
    config.generation.length_buckets = (32, 64, 112)
    config.eval.every = 10
    config.trainer.checkpoint.every = 25
    return config
