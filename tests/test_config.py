import dataclasses

import pytest

from areal_jax import config as config_lib
from areal_jax.config import Config, EvaluationConfig, build, default_config, get_config, to_json


def test_the_defaults_are_the_papers_recipe():
    c = Config()
    assert (c.trainer.prompts_per_step, c.rollout.group_size, c.trainer.objective.minibatches) == (512, 16, 4)
    assert (c.trainer.objective.clip_eps, c.rollout.temperature, c.rollout.max_staleness) == (0.2, 1.0, 8)
    assert (c.rollout.top_p, c.rollout.top_k) == (1.0, 0)
    assert (c.reward.correct, c.reward.incorrect) == (5.0, -5.0)
    o = c.trainer.optimizer
    assert (o.lr, o.schedule, o.warmup_fraction, o.beta1, o.beta2) == (2e-5, "constant", 0.001, 0.9, 0.95)
    assert (o.eps, o.weight_decay, o.max_grad_norm) == (1e-5, 0.05, 1.0)
    assert (c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.trainer.token_budget) == (1024, 27648, 32768)


def test_a_config_survives_the_way_through_ml_collections_and_json(tmp_path):
    config = default_config()
    config.trainer.optimizer.lr = 1e-3
    config.data.options = {"terms": 3}
    config.generation.addresses = ("127.0.0.1:1", "127.0.0.1:2")
    built = build(config)
    assert built.trainer.optimizer.lr == 1e-3 and built.data.options == {"terms": 3}
    (tmp_path / "config.json").write_text(to_json(built))
    assert build(get_config(str(tmp_path / "config.json"))) == built


def test_a_text_on_the_command_line_that_is_no_number_names_its_key():
    assert config_lib.wrong_text("trainer.steps", "ten") == "config.trainer.steps=ten must be a whole number"
    assert config_lib.wrong_text("trainer.optimizer.lr", "x") == "config.trainer.optimizer.lr=x must be a number"
    assert config_lib.wrong_text("metrics.wandb", "x") == "config.metrics.wandb=x must be true or false"
    assert config_lib.wrong_text("run.cores", "x") == ""


def test_an_unknown_key_names_its_nearest_neighbour():
    values = dataclasses.asdict(Config())
    values["trainer"]["optimizer"]["learning_rat"] = 1.0
    with pytest.raises(
        ValueError, match=r"config.trainer.optimizer.learning_rat does not exist; the nearest key is config\.trainer"
    ):
        build(values)
    assert "config.trainer.optimizer.lr" in config_lib.unknown_key("trainer.lr")


def test_a_longer_evaluation_needs_a_longer_cache_and_no_more_of_the_trainer():
    config = Config(eval=EvaluationConfig(max_new_tokens=30000))
    assert (config.max_length, config.eval_max_new_tokens, config.cache_length) == (28672, 30000, 31024)
    config = Config(eval=EvaluationConfig(max_new_tokens=100))
    assert (config.max_length, config.eval_max_new_tokens, config.cache_length) == (28672, 100, 28672)
    assert Config().eval_max_new_tokens == Config().rollout.max_new_tokens


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("a/b/c", False),
        ("/org/name", False),
        ("./name", False),
        ("~/name", False),
        ("org/name@", False),
        ("org/", False),
    ],
)
def test_a_hub_id_is_told_from_a_directory_by_its_form(path, is_id):
    assert config_lib.is_hub_id(path) == is_id


def test_what_is_on_the_disk_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_lib.is_hub_id("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not config_lib.is_hub_id("org/name")
