"""GSM8K with Qwen2.5-1.5B-Instruct: the example of AReaL's repository inclusionAI/AReaL, examples/math/gsm8k_grpo.yaml.

    pip install huggingface_hub datasets
    python -m areal_jax.main --config=configs/gsm8k_qwen2p5_1p5b.py --dry_run --devices=4   # memory, nothing downloaded
    CUDA_VISIBLE_DEVICES=0,1,2,3 python -m areal_jax.main --config=configs/gsm8k_qwen2p5_1p5b.py --role=trainer
    CUDA_VISIBLE_DEVICES=4 python -m areal_jax.main --config=configs/gsm8k_qwen2p5_1p5b.py --role=generator --index=0
    (and likewise GPUs 5, 6, 7 with --index=1, 2, 3)
    python -m areal_jax.main --config=configs/gsm8k_qwen2p5_1p5b.py --role=rollout

Hardware: theirs is one host of 8 GPUs, 4 that train (FSDP) and 4 that generate; the parts are started by hand, as
`main` by itself does not share out the GPUs of a host. Expected: AReaL's authors report 0.7957 on the test set. That
number is theirs; this project has not run the recipe.

What of their setting has no key here, and what takes its place:
- rewards are normalised within their group, which is the same here, and advantages then once more over the tokens of
  the batch, which here they are not: the scale of the loss differs;
- behav_imp_weight_cap=5: the weight pi_prox / pi_behav is not capped here;
- SGLang's memory fraction, max_concurrent_rollouts=256: the staleness gate and the slots of the generation servers
  bound what is in flight here;
- their weights are bfloat16 with an Adam of their own; weights and optimizer are float32 here, the forward pass and the
  generation servers bfloat16;
- shuffling: both are seeded, the orders differ. Their 10 epochs of 7,473 // 256 = 29 batches are 290 steps, and they
  evaluate and save once an epoch.
"""

import os
import pathlib

from areal_jax.config import default_config

TEMPLATE = "{prompt}\nPlease put your final answer within \\boxed{}."


def get_config():
    config = default_config()
    config.run.name = "gsm8k_qwen2p5_1p5b"
    config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
    config.model.shape = os.path.relpath(pathlib.Path(__file__).parent / "shapes" / "qwen2.5-1.5b-instruct.json")

    config.data.train = "hub:openai/gsm8k:main:train"
    config.data.options = {"layout": "gsm8k", "template": TEMPLATE}
    config.eval.data = "hub:openai/gsm8k:main:test"
    config.eval.options = {"layout": "gsm8k", "template": TEMPLATE}
    config.data.max_prompt_tokens = 1024
    config.rollout.max_new_tokens = 1024
    config.reward.function = "areal_jax.rewards.math_verdict:answers_match"
    config.reward.correct, config.reward.incorrect = 5.0, -5.0  # their (reward - 0.5) * 10

    config.rollout.group_size = 4
    config.rollout.max_staleness = 2
    config.generation.addresses = tuple(f"127.0.0.1:{port}" for port in range(29501, 29505))
    config.generation.dtype = "bfloat16"

    config.trainer.address = "127.0.0.1:29500"
    config.trainer.steps = 290
    config.trainer.prompts_per_step = 256
    config.trainer.token_budget = 4 * 10240  # theirs is for each device
    config.trainer.remat = "layers"  # their gradient_checkpointing
    config.trainer.mesh.fsdp = 4
    config.trainer.dtype = "bfloat16"
    config.trainer.optimizer.lr = 1.7e-5
    config.trainer.optimizer.weight_decay = 0.017
    config.trainer.optimizer.beta1, config.trainer.optimizer.beta2 = 0.9, 0.999
    config.trainer.optimizer.eps = 1e-8
    config.trainer.objective.clip_eps = 0.4
    config.trainer.objective.minibatches = 1
    config.trainer.objective.normalize_advantages = "group"

    config.eval.every = 29
    config.eval.prompts = 0
    config.trainer.checkpoint.every = 29
    return config
