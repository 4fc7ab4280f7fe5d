"""What a config must keep to: each rule is broken once, and the error names it."""

import importlib.util
import json

import pytest

from areal_jax import config_rules
from areal_jax.config import Config, build, default_config, to_json
from areal_jax.config_rules import check, check_evaluation, check_packages, check_serving


def test_a_group_of_one_has_no_baseline(tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.data.train = config.eval.data = config.reward.function = "areal_jax.config:get_config"
    config.rollout.group_size = 1
    check(build(config))
    config.trainer.objective.group_baseline = True
    with pytest.raises(ValueError, match="makes every advantage 0"):
        check(build(config))


def test_a_model_path_that_is_not_set_says_what_it_may_be():
    with pytest.raises(ValueError, match="config.model.path is not set; give --config.model.path=DIR or org/name"):
        check(build(default_config()))


def test_an_evaluation_alone_asks_for_nothing_of_training(tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.eval.data = config.reward.function = "areal_jax.config:get_config"
    config.trainer.token_budget = 1
    check_evaluation(build(config))
    with pytest.raises(ValueError, match="config.data.train is not set; give --config.data.train=FILE, hub:NAME or"):
        check(build(config))
    config.eval.samples, config.eval.temperature = 8, 0.0
    with pytest.raises(ValueError, match=r"eval.temperature=0 takes the most likely token.*eval.samples=8.*the same"):
        check_evaluation(build(config))
    config.eval.samples, config.eval.data = 1, ""
    with pytest.raises(ValueError, match="config.eval.data is not set"):
        check_evaluation(build(config))


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
        ("eval.temperature", -1.0, "config.eval.temperature=-1.0 must be 0 .greedy., or at least 1e-06"),
        ("eval.top_p", 0.0, r"config.eval.top_p=0.0 must be above 0 and at most 1"),
        ("eval.top_p", 1.5, r"config.eval.top_p=1.5 must be above 0 and at most 1"),
        ("eval.top_k", -1, "config.eval.top_k=-1 must be at least 0"),
        ("rollout.temperature", 1e39, "config.rollout.temperature=1e.39 must be 0 .greedy., or .* at most 1e.06"),
        (
            "trainer.optimizer",
            {"warmup_fraction": 10.0},
            "warmup_fraction=10.0 must be at least 0 and at most 1",
        ),
        ("trainer.optimizer", {"beta2": 1.0}, "optimizer.beta2=1.0 must be at least 0 and below 1"),
        ("trainer.optimizer", {"max_grad_norm": 0.0}, "optimizer.max_grad_norm=0.0 must be above 0"),
        ("trainer.optimizer", {"lr": float("nan")}, "optimizer.lr=nan must be at least 0"),
        ("trainer.mesh", {"fsdp": 0}, "config.trainer.mesh.fsdp=0 must be at least 1, or -1 for all that are left"),
        ("reward.correct", float("inf"), "config.reward.correct=inf must be a finite number"),
        ("generation.length_buckets", (0, 28672), "config.generation.length_buckets=0 must be at least 1"),
        ("generation.addresses", (), "config.generation.addresses is empty"),
        ("generation.addresses", ("localhost",), "config.generation.addresses='localhost' must be .host:port."),
        ("generation.addresses", ("127.0.0.1:99999",), "'127.0.0.1:99999' must be .host:port. .* to 65535"),
        ("generation.addresses", ("::1:80",), r"'::1:80' must be .host:port. .* or \[::1\]:8000"),
        ("generation.addresses", ("127.0.0.1:5", "127.0.0.1:5"), "generation.addresses have 127.0.0.1:5 both"),
        ("trainer.address", "127.0.0.1:22x", "config.trainer.address='127.0.0.1:22x' must be .host:port."),
        ("generation.top_logprobs", 21, "top_logprobs=21 must be at least 0 and at most 20"),
        ("run.name", "", "config.run.name is empty"),
        ("run.name", "../elsewhere", "run.name='../elsewhere' must be the name of a directory under runs/"),
        ("run.dir", __file__, "the run's directory .*test_config_rules.py is a file"),
        ("run", {"launch": "threads", "cores": (0, 1)}, r"launch=threads is a run in one process, .*cores=\(0, 1\)"),
        ("reward.correct", -5.0, "config.reward.correct=-5.0 must be more than config.reward.incorrect=-5.0"),
        ("reward.function", "os.path", "config.reward.function='os.path' must be module:function"),
        ("reward.function", "math:pi", "config.reward.function='math:pi' must be module:function of a function"),
        ("trainer.objective", {"clip_eps": 0.0}, "config.trainer.objective.clip_eps=0.0 must be above 0"),
        ("run.seed", -1, "config.run.seed=-1 must be at least 0 and at most 4294967295"),
        ("eval.max_new_tokens", -1, "config.eval.max_new_tokens=-1 must be at least 0"),
        ("trainer.distributed", {"processes": 0}, "config.trainer.distributed.processes=0 must be at least 1"),
        ("trainer.distributed", {"processes": 2}, "coordinator='' must be host:port of process 0, at which the 2"),
        ("trainer.distributed", {"processes": 2, "coordinator": "host"}, "coordinator='host' must be host:port"),
        ("generation.length_buckets", (512, 28671), "end below the longest sequence, 28672 tokens.*of at least 28672"),
        ("profile.steps", "10-12", "'10-12' must be FIRST:LAST, two training steps counted from 1, like 10:12"),
        ("profile.steps", "12:10", "FIRST at least 1 and not above LAST, LAST at most trainer.steps=250"),
        ("profile.steps", "0:3", "FIRST at least 1"),
        ("profile.steps", "240:251", "LAST at most trainer.steps=250"),
        ("model.lora", {"rank": -1}, "config.model.lora.rank=-1 must be at least 0"),
        ("model.lora", {"rank": 8, "alpha": 0.0}, "rank=8 with alpha=0.0 .*an alpha above 0 and at least one target"),
        ("model.lora", {"rank": 8, "targets": ()}, r"targets=\(\): adapters need an alpha above 0 and at least one"),
        ("model.lora", {"targets": ("head",)}, "model.lora.targets='head' must be one of query, key, value, out, gate"),
        ("model.path", "/nowhere", "no such directory"),
        ("data.train", "nowhere.jsonl", "no such file"),
        ("data.train", "nowhere.json", r"config.data.train=nowhere.json: no such file \(looked for /"),
        ("data.train", "nowhere.parquet", "no such file"),
        ("eval.data", "data.csv", r"config.eval.data='data.csv' must be a .jsonl, .json, .*file, .hub:NAME"),
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


def supervised(tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.sft.data = "areal_jax.config:get_config"
    config.trainer.steps = 0
    return config


def test_supervised_fine_tuning_asks_for_nothing_of_generation_and_reward(tmp_path):
    config = supervised(tmp_path)
    config.rollout.temperature, config.reward.function = 0.0, "nowhere:nothing"
    check(build(config))
    assert build(config).trained_length == config.sft.max_length
    config.sft.data = ""
    with pytest.raises(ValueError, match="config.trainer.steps=0 must be at least 1"):
        check(build(config))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("data.train", "x.jsonl", r"sft.data=.* and config.data.train=x.jsonl .*both set; leave one of them empty"),
        ("sft.data", "", r"config.sft.eval_data=.* is set and config.sft.data is not"),
        ("sft.data", "nowhere.jsonl", "config.sft.data=nowhere.jsonl: no such file"),
        ("sft.eval_data", "nowhere.csv", "config.sft.eval_data='nowhere.csv' must be a .jsonl"),
        ("sft.response", "prompt", "config.sft.prompt='prompt' and config.sft.response='prompt' must name two columns"),
        ("sft.max_length", 99999, "token_budget=32768 is less than the longest example, config.sft.max_length=99999"),
        ("sft.batch_size", 0, "config.sft.batch_size=0 must be at least 1"),
        ("sft.epochs", 0, "config.sft.epochs=0 must be at least 1"),
        ("trainer.steps", -1, "config.trainer.steps=-1 must be at least 0"),
        ("trainer.distributed.processes", 2, "coordinator='' must be host:port of process 0"),
        ("model.lora.rank", -1, "config.model.lora.rank=-1 must be at least 0"),
    ],
)
def test_what_contradicts_supervised_fine_tuning_is_refused(tmp_path, path, value, message):
    config = supervised(tmp_path)
    config.sft.eval_data = config.sft.data
    check(build(config))
    config.update_from_flattened_dict({path: value})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check(build(config))


def test_a_shape_that_is_no_file_is_named(tmp_path):
    config = default_config()
    config.model.path, config.model.shape = str(tmp_path), "nowhere.json"
    config.data.train = config.eval.data = config.reward.function = "areal_jax.config:get_config"
    with pytest.raises(FileNotFoundError, match=r"config.model.shape=nowhere.json: no such file"):
        check(build(config))


@pytest.mark.parametrize(("package", "spec"), [("datasets", "hub:openai/gsm8k:main"), ("pyarrow", "train.parquet")])
def test_a_data_set_whose_package_is_missing_is_refused_with_the_command(tmp_path, monkeypatch, package, spec):
    (tmp_path / "train.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    config = default_config()
    config.model.path = str(tmp_path)
    config.eval.data = config.reward.function = "areal_jax.config:get_config"
    config.data.train = spec
    check(build(config))  # as for --dry_run
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ValueError, match=f"config.data.train: .* needs the package {package}.*: pip install {package}"):
        check_packages(build(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == package else find_spec(name))
    check_packages(build(config))


def test_serving_needs_a_model_and_neither_data_nor_reward(tmp_path):
    config = default_config()
    with pytest.raises(ValueError, match="config.model.path is not set"):
        check_serving(build(config))
    config.model.path = str(tmp_path)
    check_serving(build(config))
    config.generation.http_addresses = ("127.0.0.1:0", "127.0.0.1:0")
    with pytest.raises(ValueError, match=r"http_addresses names 2 addresses for 1 servers"):
        check_serving(build(config))
    config.generation.http_addresses = ()
    config.generation.max_length, config.generation.length_buckets = 100, (64,)
    with pytest.raises(ValueError, match=r"end below the longest sequence, 100 tokens \(generation.max_length\)"):
        check_serving(build(config))


def test_slots_hold_max_length_tokens_and_a_run_refuses_one_that_is_too_short(tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.data.train = config.eval.data = config.reward.function = "areal_jax.config:get_config"
    config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.eval.max_new_tokens = 100, 50, 60
    assert build(config).cache_length == 160
    config.generation.max_length = 200
    check(build(config))
    assert build(config).cache_length == 200
    config.generation.max_length = 159
    with pytest.raises(ValueError, match=r"max_length=159 is less than the longest sequence, 160 tokens"):
        check(build(config))


@pytest.mark.parametrize(("path", "value"), [("generation.tensor", 2), ("trainer.dtype", "bfloat16")])
def test_equal_bits_are_promised_on_one_device_in_one_dtype(path, value, tmp_path):
    config = default_config()
    config.model.path = str(tmp_path)
    config.eval.data = config.data.train = config.reward.function = "areal_jax.config:get_config"
    config.generation.batch_invariant = True
    check(build(config))
    config.update_from_flattened_dict({path: value})
    with pytest.raises(ValueError, match="set generation.tensor=1 and both dtypes alike"):
        check(build(config))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"launch": "threads"}, "run.launch=threads is a run in one process.*distributed.processes=2"),
        ({"cores": [0, 1]}, r"run.cores=\(0, 1\) has one core for the trainer.*processes=2; leave cores empty"),
    ],
)
def test_several_trainer_processes_are_no_threads_and_share_no_core(run, message, tmp_path):
    values = json.loads(to_json(build(default_config())))
    values["model"]["path"] = str(tmp_path)
    values["data"]["train"] = values["eval"]["data"] = values["reward"]["function"] = "areal_jax.config:get_config"
    values["trainer"]["distributed"] = {"coordinator": "127.0.0.1:0", "processes": 2}
    check(build(values))
    values["run"] |= run
    with pytest.raises(ValueError, match=message):
        check(build(values))


@pytest.mark.parametrize("key", ["trainer", "generation"])
def test_parts_that_start_one_by_one_need_ports_that_the_others_know(key):
    values = json.loads(to_json(build(default_config())))
    values["trainer"]["address"], values["generation"]["addresses"] = "127.0.0.1:8470", ["[::1]:8471", "[::1]:8472"]
    config_rules.check_parts(build(values))
    values["trainer"] |= {"address": "127.0.0.1:0"} if key == "trainer" else {}
    values["generation"] |= {"addresses": ["[::1]:8471", "[::1]:0"]} if key == "generation" else {}
    with pytest.raises(ValueError, match=rf"config.{key}.address.*: the port of .*:0 is left open"):
        config_rules.check_parts(build(values))


def test_bounds_are_of_settings_that_there_are_and_only_a_few_numbers_have_none():
    known = {path for path, _ in config_rules._numbers(Config(), "")}
    tuples = {"run.cores", "generation.length_buckets", "generation.slot_buckets", "trainer.row_buckets"}
    of_rules = {
        "reward.correct",
        "reward.incorrect",
        "rollout.top_p",
        "rollout.top_k",
        "eval.top_p",
        "model.lora.alpha",
    }
    assert set(config_rules.BOUNDS) == (known | tuples) - of_rules
