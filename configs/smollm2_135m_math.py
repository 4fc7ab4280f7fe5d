"""A real language model, SmolLM2-135M-Instruct, learns arithmetic on a laptop's CPU.

    pip install gguf && python -m experiments.smollm2_model --out=runs/smollm2
    python -m areal_jax.main --config=configs/smollm2_135m_math.py
    python -m areal_jax.main --config=configs/smollm2_135m_math.py:two_digits

One-digit sums asked in words; behind the colon, `two_digits` asks for sums and differences of numbers up to 60, and
`chain_sum` for sums of two or three digits of reasoning-gym (pip install reasoning-gym). Asynchronous RL (AReaL, arXiv
2505.24298) in three local processes; all parameters train, in float32. Two CPU cores, 8 GB of memory. Expect one-digit
sums to be learned in a few minutes; numbers and pictures are in experiments/README.md.
"""

from areal_jax.config import default_config

# The model's own chat format without its system prompt, which would double the length of every prompt.
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
SUMS = {
    "one_digit": {"largest": 9, "operators": "+", "template": TEMPLATE},
    "two_digits": {"largest": 60, "operators": "+-", "template": TEMPLATE},
}
CHAIN_SUM = {
    "tasks": {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
    "answer_in": "number",
    "system": "You are a calculator. You reply with one number.",
}


def get_config(task="one_digit"):
    config = default_config()
    config.run.name = f"smollm2_{task}"
    config.model.path = "runs/smollm2"

    if task == "chain_sum":
        config.data.train = config.eval.data = "areal_jax.rollout.reasoning_gym:Tasks"
        config.data.options, config.eval.options = CHAIN_SUM, CHAIN_SUM
        config.reward.function = "areal_jax.rewards.reasoning_gym:solves"
        config.data.max_prompt_tokens = 72
        config.rollout.max_new_tokens = 16
        config.generation.length_buckets = (88,)
        config.trainer.row_buckets = (160,)
    else:
        config.data.train = config.eval.data = "areal_jax.rollout.sums:Sums"
        config.data.options, config.eval.options = SUMS[task], SUMS[task]
        config.reward.function = "areal_jax.rewards.math_answer:last_number_matches"
        config.data.max_prompt_tokens = 24
        config.rollout.max_new_tokens = 16
        config.generation.length_buckets = (40,)
        config.trainer.row_buckets = (80,)
    config.reward.cut_off = "wrong"  # an answer must end by itself
    config.reward.correct, config.reward.incorrect = 1.0, 0.0

    config.trainer.steps = 40
    config.trainer.prompts_per_step = 8
    config.rollout.group_size = 8
    config.rollout.max_staleness = 1
    config.trainer.optimizer.lr = 1e-5
    # One-digit sums are solved before the run ends, and then the few wrong answers are noise: the steps shrink, and a
    # lone wrong answer does not weigh most in its group. The harder tasks learn to the end.
    solved = task == "one_digit"
    config.trainer.optimizer.schedule = "linear" if solved else "cosine"
    config.trainer.optimizer.eps = 1e-8
    config.trainer.optimizer.weight_decay = 0.0
    config.trainer.objective.minibatches = 1
    config.trainer.objective.group_baseline = True
    config.trainer.objective.normalize_advantages = "group"
    config.trainer.objective.advantage_std = "none" if solved else "population"

    config.trainer.token_budget = 640
    config.generation.decode_steps = 4
    config.eval.every = 5 if task == "one_digit" else 10
    config.eval.prompts = 27 if task == "one_digit" else 96
    config.eval.samples = 2 if task == "one_digit" else 1
    config.trainer.checkpoint.every = 50
    config.trainer.checkpoint.keep = 1
    return config
