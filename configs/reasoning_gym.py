"""Problems of reasoning-gym without end, for a language model of your own, from easy to hard.

    pip install reasoning-gym
    python -m areal_jax.main --config=configs/reasoning_gym.py --config.model.path=DIR
    python -m areal_jax.main --config=configs/reasoning_gym.py:gcd,lcm,simple_equations --config.model.path=DIR

Sums, differences and products by default, the sums growing from 2 to 6 terms in the first 20,000 prompts. Behind the
colon stand other tasks, each with its own defaults. Parameters are keys, of training and of evaluation separately:
--config.data.options.tasks.products.max_digits=3. DIR is a model in the Hugging Face format that follows instructions,
1.5B parameters or so; not run to its end here.
"""

from areal_jax.config import default_config

MIXTURE = {
    "chain_sum": {
        "weight": 2.0,
        "min_terms": 2,
        "max_terms": {"ramp": [2, 6], "over": 20_000},
        "min_digits": 1,
        "max_digits": 2,
    },
    "products": {"weight": 1.0, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
}


def get_config(tasks=""):
    config = default_config()
    config.run.name = "reasoning_gym"

    mixture = {name: {"weight": 1.0} for name in tasks.split(",")} if tasks else MIXTURE
    config.data.train = config.eval.data = "areal_jax.rollout.reasoning_gym:Tasks"
    config.data.options = {"tasks": mixture, "answer_in": "tags"}
    config.eval.options = {"tasks": mixture, "answer_in": "tags"}
    config.data.max_prompt_tokens = 512
    config.reward.function = "areal_jax.rewards.reasoning_gym:solves"
    config.reward.workers = 2

    config.rollout.max_new_tokens = 1024
    config.rollout.group_size = 8
    config.rollout.max_staleness = 4
    config.trainer.prompts_per_step = 64
    config.trainer.steps = 500
    config.trainer.optimizer.lr = 1e-6
    config.trainer.objective.group_baseline = True
    config.trainer.token_budget = 16384
    config.eval.every = 20
    return config
