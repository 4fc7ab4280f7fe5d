"""A real language model, SmolLM2-135M-Instruct, learns arithmetic on a laptop's CPU.

    pip install gguf && python -m experiments.smollm2_model --out=runs/smollm2
    python -m areal_jax.main --config=configs/smollm2_135m_math.py
    python -m areal_jax.main --config=configs/smollm2_135m_math.py:two_digits

One-digit sums asked in words by default; `:two_digits` asks for sums and differences up to 60. Asynchronous RL
(AReaL, arXiv 2505.24298) in three local processes, all parameters trained in float32. Two CPU cores, 8 GB;
numbers and pictures in experiments/README.md.
"""

from areal_jax.config import default_config

TASKS = {"one_digit": {"largest": 9, "operators": "+"}, "two_digits": {"largest": 60, "operators": "+-"}}
# The model's own chat format without its system prompt, which would double the length of every prompt.
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def get_config(task="one_digit"):
    config = default_config()
    config.run.name = f"smollm2_{task}"
    config.model.path = "runs/smollm2"

    config.data.train = config.eval.data = "areal_jax.rollout.sums:Sums"
    config.data.options = TASKS[task] | {"template": TEMPLATE}
    config.eval.options = TASKS[task] | {"template": TEMPLATE}
    config.data.max_prompt_tokens = 24
    config.rollout.max_new_tokens = 16
    config.reward.function = "areal_jax.rewards.math_answer:last_number_matches"
    config.reward.cut_off = "wrong"  # an answer must end by itself
    config.reward.correct, config.reward.incorrect = 1.0, 0.0

    config.trainer.steps = 40
    config.trainer.prompts_per_step = 8
    config.rollout.group_size = 8
    config.rollout.max_staleness = 1
    config.trainer.optimizer.lr = 1e-5
    config.trainer.optimizer.eps = 1e-8
    config.trainer.optimizer.weight_decay = 0.0
    config.trainer.objective.minibatches = 1
    config.trainer.objective.group_baseline = True
    config.trainer.objective.normalize_advantages = "group"

    config.trainer.token_budget = 640
    config.trainer.row_buckets = (80,)
    config.trainer.logprob_chunk = 320
    config.generation.slots = 64
    config.generation.decode_steps = 4
    config.generation.length_buckets = (40,)
    config.generation.prefill_rows = 8
    config.eval.every = 5
    config.eval.prompts = 64
    config.trainer.checkpoint.every = 0
    return config
