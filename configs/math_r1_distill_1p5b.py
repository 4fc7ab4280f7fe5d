"""Math with DeepSeek-R1-Distill-Qwen-1.5B: the recipe of the paper AReaL (arXiv 2505.24298), appendix B.

    pip install huggingface_hub datasets
    python -m areal_jax.main --config=configs/math_r1_distill_1p5b.py --dry_run   # memory, nothing downloaded
    python -m areal_jax.main --config=configs/math_r1_distill_1p5b.py

Every value of the paper's table is a default of areal_jax/config.py; here stands only what is not in that table: the
model, the data, two-byte numbers, which in the paper are fp16 and here bfloat16, and activations that are computed
again in the backward pass (trainer.remat), without which a GPU of 80 GB does not hold 32,768 tokens: `--dry_run` says
51 GiB, and 143 GiB with trainer.remat=none. On a mesh of n devices that share out the rows set trainer.token_budget to
n * 32768, as the paper's budget is for each device.

Hardware: the paper's is 16 hosts of 8 H800, of which three quarters generate. Expected there after 250 steps, 14.8 h:
AIME24 avg@32 of 42.2 (29.3 before). These numbers are the paper's; this project has not run the recipe.
"""

import os
import pathlib

from areal_jax.config import default_config

TEMPLATE = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."  # the model card's


def get_config():
    config = default_config()
    config.run.name = "math_r1_distill_1p5b"
    config.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    config.model.shape = os.path.relpath(
        pathlib.Path(__file__).parent / "shapes" / "deepseek-r1-distill-qwen-1.5b.json"
    )

    config.data.train = "hub:agentica-org/DeepScaleR-Preview-Dataset"
    config.data.options = {"layout": "deepscaler", "template": TEMPLATE}
    config.eval.data = "hub:HuggingFaceH4/aime_2024"
    config.eval.options = {"layout": "aime", "template": TEMPLATE}
    config.eval.prompts = 0
    config.eval.samples = 32
    config.reward.function = "areal_jax.rewards.math_verdict:answers_match"

    config.trainer.dtype = config.generation.dtype = "bfloat16"
    config.trainer.remat = "layers"
    return config
