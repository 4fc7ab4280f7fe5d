"""The recipes for real models: their values, through the command line that a user gives, with nothing downloaded."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from areal_jax.config import build
from areal_jax.rollout.layouts import LAYOUTS

ROOT = pathlib.Path(__file__).parents[1]
GSM8K, MATH = "gsm8k_qwen2p5_1p5b", "math_r1_distill_1p5b"

# AReaL, arXiv 2505.24298, appendix B: keys of the table and the values there.
PAPER = {
    "run.seed": 1,
    "model.path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "data.max_prompt_tokens": 1024,
    "rollout.max_new_tokens": 27648,
    "rollout.group_size": 16,
    "rollout.max_staleness": 8,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "reward.correct": 5.0,
    "reward.incorrect": -5.0,
    "generation.on_update": "recompute",
    "generation.dtype": "bfloat16",  # fp16 in the paper; both take two bytes
    "trainer.dtype": "bfloat16",
    "trainer.steps": 250,
    "trainer.prompts_per_step": 512,
    "trainer.token_budget": 32768,
    "trainer.remat": "layers",  # not in the table; its budget does not fit the paper's GPUs otherwise
    "trainer.objective.prox": "recompute",
    "trainer.objective.minibatches": 4,
    "trainer.objective.clip_eps": 0.2,
    "trainer.objective.normalize_advantages": "batch",
    "trainer.objective.group_baseline": False,
    "trainer.optimizer.lr": 2e-5,
    "trainer.optimizer.schedule": "constant",
    "trainer.optimizer.warmup_fraction": 0.001,
    "trainer.optimizer.beta1": 0.9,
    "trainer.optimizer.beta2": 0.95,
    "trainer.optimizer.eps": 1e-5,
    "trainer.optimizer.weight_decay": 0.05,
    "trainer.optimizer.max_grad_norm": 1.0,
    "eval.samples": 32,
    "eval.prompts": 0,
}

# examples/math/gsm8k_grpo.yaml of AReaL's repository: their values under our keys.
AREALS_EXAMPLE = {
    "run.seed": 1,  # seed
    "model.path": "Qwen/Qwen2.5-1.5B-Instruct",  # actor.path
    "data.max_prompt_tokens": 1024,  # train_dataset.max_length
    "rollout.max_new_tokens": 1024,  # gconfig
    "rollout.group_size": 4,
    "rollout.temperature": 1.0,
    "rollout.max_staleness": 2,  # rollout.max_head_offpolicyness
    "reward.correct": 5.0,  # (1 + reward_bias) * reward_scaling
    "reward.incorrect": -5.0,  # (0 + reward_bias) * reward_scaling
    "generation.dtype": "bfloat16",  # sglang.dtype
    "trainer.dtype": "bfloat16",  # actor.dtype
    "trainer.steps": 10 * (7473 // 256),  # total_train_epochs
    "trainer.prompts_per_step": 256,  # train_dataset.batch_size
    "trainer.token_budget": 4 * 10240,  # actor.mb_spec.max_tokens_per_mb, on each of 4 devices
    "trainer.remat": "layers",  # actor.gradient_checkpointing
    "trainer.mesh.fsdp": 4,  # allocation_mode
    "trainer.objective.prox": "recompute",  # use_decoupled_loss, recompute_logprob
    "trainer.objective.minibatches": 1,  # ppo_n_minibatches
    "trainer.objective.clip_eps": 0.4,  # eps_clip
    "trainer.objective.normalize_advantages": "group",  # reward_norm
    "trainer.optimizer.lr": 1.7e-5,
    "trainer.optimizer.schedule": "constant",
    "trainer.optimizer.warmup_fraction": 0.001,
    "trainer.optimizer.beta1": 0.9,
    "trainer.optimizer.beta2": 0.999,
    "trainer.optimizer.eps": 1e-8,
    "trainer.optimizer.weight_decay": 0.017,
    "trainer.optimizer.max_grad_norm": 1.0,  # gradient_clipping
}


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory):
    """(resolved config, report) of each recipe, with an empty cache and no network."""
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}

    def dry_run(name):
        command = [sys.executable, "-m", "areal_jax.main", f"--config=configs/{name}.py", "--dry_run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return {name: dry_run(name) for name in (GSM8K, MATH)}


def value(config, key):
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize(("name", "wanted"), [(MATH, PAPER), (GSM8K, AREALS_EXAMPLE)], ids=[MATH, GSM8K])
def test_every_value_of_the_source_reaches_the_resolved_config(dry_runs, name, wanted):
    config, _ = dry_runs[name]
    assert {key: value(config, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "parameters", "weights"), [(GSM8K, "1,543,714,304", "1.44"), (MATH, "1,777,088,000", "6.62")]
)
def test_a_dry_run_reports_parameters_and_memory_per_device(dry_runs, name, parameters, weights):
    _, report = dry_runs[name]
    assert f"{parameters} parameters" in report
    assert f"{weights} GiB  weights\n" in report  # float32: 4 bytes a parameter, over 4 devices or on one
    for purpose in ("optimizer moments", "activations", "key/value cache", "prefill", "one version of the weights"):
        assert purpose in report


@pytest.mark.parametrize("name", [GSM8K, MATH])
def test_the_data_of_a_recipe_is_named_with_a_layout_that_exists_and_held_out(dry_runs, name):
    config = build(dry_runs[name][0])
    assert config.data.train.startswith("hub:") and config.eval.data.startswith("hub:")
    assert config.data.train != config.eval.data
    assert {config.data.options["layout"], config.eval.options["layout"]} <= set(LAYOUTS)
    assert "{prompt}" in config.data.options["template"] and "\\boxed{}" in config.data.options["template"]


def test_the_recipe_says_only_where_it_differs_from_the_defaults():
    text = (ROOT / "configs" / f"{MATH}.py").read_text()
    assert "optimizer" not in text and "objective" not in text
