"""Your model, your data: a start for a model of up to a few billion parameters on one accelerator.

    python -m areal_jax.main --config=configs/own.py --config.model.path=DIR_OR_HUB_ID \
        --config.data.train=train.jsonl --config.eval.data=test.jsonl

Asynchronous RL (AReaL, arXiv 2505.24298) with a batch that is small beside the paper's. See first what it takes: the
same command with `--dry_run`. Sizes to change first: rollout.max_new_tokens, trainer.prompts_per_step,
trainer.token_budget (at least the longest prompt and answer together), generation.slots.

`configs/own.py:small` has sizes for a first look on two CPU cores: short questions, answers of a few tokens, a model of
some hundred million parameters. What that does to SmolLM2-135M stands in README.md; beyond, what to expect depends on
model and data.
"""

from areal_jax.config import default_config


def get_config(size=""):
    config = default_config()
    config.run.name = "own"

    config.data.max_prompt_tokens = 512
    config.rollout.max_new_tokens = 1024
    config.rollout.group_size = 8
    config.rollout.max_staleness = 2
    config.reward.correct, config.reward.incorrect = 1.0, 0.0

    config.trainer.steps = 200
    config.trainer.prompts_per_step = 16
    config.trainer.token_budget = 4096
    config.trainer.optimizer.lr = 2e-6
    config.trainer.optimizer.warmup_fraction = 0.05
    config.trainer.objective.minibatches = 1
    config.trainer.objective.group_baseline = True
    config.trainer.objective.normalize_advantages = "group"
    config.trainer.checkpoint.every = 10

    config.eval.every = 20
    config.eval.prompts = 128

    if size not in ("", "small"):
        raise ValueError(f"configs/own.py:{size} must be configs/own.py or configs/own.py:small")
    if size == "small":
        config.data.max_prompt_tokens = 64
        config.rollout.max_new_tokens = 16
        config.rollout.max_staleness = 1
        config.reward.cut_off = "wrong"
        config.trainer.steps = 30
        config.trainer.prompts_per_step = 8
        config.trainer.token_budget = 640
        config.trainer.row_buckets = (160,)
        config.trainer.optimizer.lr = 1e-5
        config.trainer.optimizer.schedule = "linear"
        config.trainer.objective.advantage_std = "none"
        config.generation.length_buckets = (80,)
        config.eval.every = 10
    return config
