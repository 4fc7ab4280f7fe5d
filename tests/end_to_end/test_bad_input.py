"""Mistakes of the user: each ends the real command within seconds, in one error that names it, and leaves nothing."""

import json
import shutil
import socket
import time

import pytest

from tests.end_to_end import job

MATH = "--config=configs/math.py"
MODEL = job.ROOT / "configs" / "arithmetic_model"


def fails(tmp_path, settings, *, within_s):
    """Runs the command to its end and returns the text of its one error."""
    run_dir = tmp_path / "run"
    began = time.monotonic()
    status, out, err = job.run(run_dir, settings, timeout_s=60)
    seconds = time.monotonic() - began
    assert status in (1, 2)
    assert err.startswith("error: ")
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert "what every file is" not in out, "the page of a run that came to nothing"
    assert seconds < within_s, f"took {seconds:.1f} s"
    job.assert_nothing_left(run_dir)
    return err.removeprefix("error: ")


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"trainer.stepz": 3}, ["config.trainer.stepz does not exist", "config.trainer.steps"]),
        ({"trainer.steps": "many"}, ["config.trainer.steps=many must be a whole number"]),
        ({"trainer.steps": 0}, ["config.trainer.steps=0 must be at least 1"]),
        ({"rollout.max_staleness": -1}, ["config.rollout.max_staleness=-1 must be at least 0"]),
        ({"model.path": "/nowhere/model"}, ["config.model.path=/nowhere/model", "no such directory"]),
        ({"data.train": "/nowhere/train.jsonl"}, ["config.data.train=/nowhere/train.jsonl", "no such file"]),
        ({"eval.data": "areal_jax.nothing:Prompts"}, ["config.eval.data", "areal_jax.nothing"]),
        ({"data.options.nosuch": 3}, ["data.options={'nosuch': 3} do not fit data.train="]),
        ({"trainer.token_budget": 64}, ["config.trainer.token_budget=64", "112 tokens", "at least 112"]),
        ({"trainer.prompts_per_step": 7}, ["prompts_per_step=7", "multiple of", "minibatches=2"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_is_refused_before_anything_starts(tmp_path, settings, texts):
    error = fails(tmp_path, settings, within_s=10)
    assert error.count("\n") == 1
    assert all(text in error for text in texts), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "words", "text"),
    [
        ("main", [], "--config is not set; give --config=configs/math.py or another file under configs/"),
        ("main", ["--config=configs/nope.py"], "--config=configs/nope.py: no such file"),
        (
            "main",
            ["--config=README.md"],
            "--config=README.md must be a Python file with a get_config(), like "
            "configs/math.py or another file under configs/; a saved one is --config=areal_jax/config.py:README.md",
        ),
        (
            "main",
            ["--config=configs/own.py:tiny"],
            "--config=configs/own.py, line 42: configs/own.py:tiny must be configs/own.py or configs/own.py:small",
        ),
        ("main", [MATH, "--index=1"], "--index=1 is said of --role=generator; give this role, or leave --index out"),
        ("main", [MATH, "--devices=8"], "--devices=8 must be at least 0, and is for a plan: give --dry_run with it"),
        ("evaluate", ["--config", "configs/nope.py"], "--config=configs/nope.py: no such file"),
        ("export", ["--checkpoint=runs/math"], "--out is not set; give --out=DIR, a directory that does not exist yet"),
        ("export", ["--outt=x"], "Unknown command line flag 'outt'. Did you mean: out ?"),
    ],
)
def test_a_command_line_that_lacks_something_is_told_in_a_sentence(module, words, text):
    status, _, err = job.end(job.start_command(words, f"areal_jax.{module}"), 60)
    assert (status, err) == (2, f"error: {text}\n")


@pytest.mark.parametrize("key", ["trainer.address", "generation.addresses"])
def test_a_port_in_use_is_named(tmp_path, key):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = fails(tmp_path, {key: address if key == "trainer.address" else f"('{address}',)"}, within_s=10)
    assert error.count("\n") == 1
    assert f"cannot listen on {address}: Address already in use; choose another port" in error


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_port_in_use_is_named_by_a_part_started_by_hand(tmp_path, role):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        own = {
            "trainer": {"trainer.address": address, "generation.addresses": "('127.0.0.1:1',)"},
            "generator": {"generation.addresses": f"('{address}',)"},
        }
        status, _, err = job.end(job.start(tmp_path / "run", own[role], f"--role={role}"), 60)
    assert status == 2
    assert f"error: cannot listen on {address}: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("launch", ["processes", "threads"])
def test_a_mesh_that_the_devices_do_not_fill_is_found_before_others_have_compiled(tmp_path, monkeypatch, launch):
    monkeypatch.setitem(job.ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))  # empty
    error = fails(tmp_path, {"trainer.mesh.data": 3, "run.launch": launch}, within_s=10)
    compiled = "\n".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "compiled 1 of 1" not in compiled
    assert "trainer.mesh is data=3 x fsdp=1 x tensor=1, which does not divide the 1 device(s)" in error
    assert "try data=-1" in error


def test_more_slots_than_the_machine_has_memory_for_are_refused(tmp_path):
    error = fails(tmp_path, {"generation.slots": 10**9}, within_s=15)
    assert "the weights and the cache of config.generation.slots=1000000000 sequences of up to 112 tokens" in error
    assert "this host has" in error and "lower config.generation.slots" in error


def test_a_budget_that_does_not_hold_a_row_per_shard_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(job.ENVIRONMENT, "XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    error = fails(tmp_path, {"trainer.token_budget": 512, "trainer.mesh.data": 8}, within_s=15)
    assert "trainer.token_budget=512 must hold the longest possible sequence, 112 tokens" in error
    assert "set it to at least 896" in error  # 8 shards of 112


def test_a_directory_without_a_model_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    error = fails(tmp_path, {"model.path": tmp_path / "model"}, within_s=15)
    assert str(tmp_path / "model") in error
    assert "config.json" in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step, with its checkpoint."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert job.run(run_dir, {"trainer.steps": 1, "run.launch": "threads"})[0] == 0
    return run_dir


@pytest.mark.parametrize("launch", ["processes", "threads"])
def test_a_checkpoint_of_another_model_is_not_restored(tmp_path, trained, launch):
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    error = fails(tmp_path, {"model.path": model, "run.launch": launch, "trainer.steps": 2}, within_s=15)
    assert f"the checkpoint of version 1 in {run_dir / 'checkpoints'} is of another model" in error
    assert "rope_theta is" in error
    assert "12345.0 here" in error
    assert job.version(run_dir) == 1, "what was there stays"


def test_no_second_error_hides_the_first(tmp_path):
    """A prompt source that fails in the controller, while the others are well."""
    (tmp_path / "empty.jsonl").write_text("")
    error = fails(tmp_path, {"data.train": tmp_path / "empty.jsonl"}, within_s=15)
    assert "empty.jsonl" in error
    assert job.lines(tmp_path / "run", "metrics") == []
