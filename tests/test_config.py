import dataclasses
import json

import pytest

from areal_jax import config as config_lib
from areal_jax.config import Config, build, check, default_config, get_config, to_json


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


def test_a_group_of_one_has_no_baseline(tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.data.train = config.eval.data = config.reward.function = "areal_jax.config:get_config"
    config.rollout.group_size = 1
    check(build(config))
    config.trainer.objective.group_baseline = True
    with pytest.raises(ValueError, match="makes every advantage 0"):
        check(build(config))


def test_a_config_survives_the_way_through_ml_collections_and_json(tmp_path):
    config = default_config()
    config.trainer.optimizer.lr = 1e-3
    config.data.options = {"terms": 3}
    config.generation.addresses = ("127.0.0.1:1", "127.0.0.1:2")
    built = build(config)
    assert built.trainer.optimizer.lr == 1e-3 and built.data.options == {"terms": 3}
    (tmp_path / "config.json").write_text(to_json(built))
    assert build(get_config(str(tmp_path / "config.json"))) == built


def test_an_unknown_key_names_its_nearest_neighbour():
    values = dataclasses.asdict(Config())
    values["trainer"]["optimizer"]["learning_rat"] = 1.0
    with pytest.raises(
        ValueError, match=r"config.trainer.optimizer.learning_rat does not exist; the nearest key is config\.trainer"
    ):
        build(values)
    assert "config.trainer.optimizer.lr" in config_lib.unknown_key("trainer.lr")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rollout.max_staleness", -1, "config.rollout.max_staleness=-1 must be at least 0"),
        ("rollout.overdue", "skip", "'skip' must be one of mask, drop, train"),
        ("trainer.steps", "many", "is of type str; it must be of type int"),
        ("trainer.steps", True, "is of type bool; it must be of type int"),
        (
            "trainer.token_budget",
            1000,
            "config.trainer.token_budget=1000 is less than the longest sequence, 28672 tokens",
        ),
        ("trainer.prompts_per_step", 510, "must be a multiple of config.trainer.objective.minibatches=4"),
        ("rollout.temperature", 0.0, "samples greedily"),
        ("rollout.top_p", 0.8, "truncated distribution.*only top_p=1 and top_k=0 train"),
        ("rollout.top_k", 50, "only top_p=1 and top_k=0 train"),
        ("eval.samples", 5000, "no server would ever take the request"),
        ("model.path", "/nowhere", "no such directory"),
        ("data.train", "nowhere.jsonl", "no such file"),
        ("data.train", "areal_jax.rollout.nothing:x", "nothing"),
        ("reward.function", "areal_jax.config:nothing", "has no 'nothing'"),
    ],
)
def test_bad_values_are_refused_with_the_rule(path, value, message, tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.data.train = config.eval.data = "areal_jax.config:get_config"
    config.reward.function = "areal_jax.config:get_config"
    check(build(config))
    values = json.loads(to_json(build(config)))
    *sections, key = path.split(".")
    section = values
    for name in sections:
        section = section[name]
    section[key] = value
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check(build(values))
