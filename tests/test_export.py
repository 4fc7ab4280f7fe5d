import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
import tokenizers

from areal_jax import export
from areal_jax.models import sharding
from areal_jax.models.huggingface import load_config
from areal_jax.models.safetensors_files import load_model, read_params, save_model
from areal_jax.models.transformer import TransformerConfig, param_shapes
from areal_jax.tokenizer import Tokenizer
from areal_jax.trainer import state
from areal_jax.trainer.checkpoint import Checkpoints
from tests.end_to_end import job

WORDS = ["<pad>", "<end>", *"abcdefghijklmnopqr"]
FAMILIES = {
    "llama": {
        "rope_type": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_positions": 64,
        "vocab_size": 27,
    },
    "qwen2": {"qkv_bias": True, "tied_embeddings": True, "vocab_size": 27},
    "qwen3": {"qk_norm": True, "vocab_size": 20},
}


def config_of(family: str = "qwen3") -> TransformerConfig:
    shape = {"d_model": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "d_ff": 24, "family": family}
    return TransformerConfig(**shape | FAMILIES[family])


def make_model(directory, config: TransformerConfig, dtype: str = "float32") -> None:
    """A model directory as it comes from elsewhere."""
    rng = np.random.default_rng(0)
    shapes = param_shapes(config)
    save_model(directory, config, {n: rng.normal(size=s.shape).astype(np.dtype(dtype)) for n, s in shapes.items()})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 1, "bos_token_id": 5}))


def make_run(run_dir, model, versions=(3,)) -> dict[int, dict[str, np.ndarray]]:
    """A run with checkpoints of a trainer on 2 x 2 devices; its params by version, with padding."""
    config = dataclasses.replace(load_config(model, vocab_multiple=2), live_vocab=len(WORDS))
    mesh = sharding.make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    optimizer = optax.adamw(1e-3)
    abstract = state.abstract_state(config, optimizer, mesh)
    params = read_params(model, config, abstract.params)
    first = min(versions)
    saved = {version: {n: p + (version - first) for n, p in params.items()} for version in versions}
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=9)
    for version, of_version in saved.items():
        facts = {"version": version, "model": dataclasses.asdict(config), "run": {}}
        checkpoints.save(state.initial_state(of_version, abstract, optimizer), facts, {})
    checkpoints.close()
    (run_dir / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))
    return {version: {n: np.asarray(p) for n, p in of_version.items()} for version, of_version in saved.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run directory, model directory, params of versions 3 and 12)"""
    directory = tmp_path_factory.mktemp("export")
    make_model(directory / "model", config_of())
    return directory / "run", directory / "model", make_run(directory / "run", directory / "model", (3, 12))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_and_in_again_is_bit_exact(family, dtype, tmp_path):
    config = config_of(family)
    make_model(tmp_path / "model", config, dtype)
    params = make_run(tmp_path / "run", tmp_path / "model")[3]
    assert params["embedding"].shape[0] == config.vocab_size + config.vocab_size % 2, "padded in the run"
    said = export.export(tmp_path / "run", tmp_path / "whole")
    again, exported = load_model(tmp_path / "whole")
    assert again == config
    for name, value in exported.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, params[name][tuple(map(slice, value.shape))])
    assert f"version 3 of {tmp_path / 'run'}" in said and "in float32, 1 file(s)" in said
    export.export(tmp_path / "run", tmp_path / "same", dtype="source")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "same")]
    assert weights[0] == weights[1]


def test_the_newest_version_is_taken_of_a_run_and_of_its_checkpoints(run, tmp_path):
    run_dir, _, params = run
    expected = {"run": (run_dir, 12), "all": (run_dir / "checkpoints", 12), "one": (run_dir / "checkpoints" / "3", 3)}
    for name, (path, version) in expected.items():
        assert f"version {version} of" in export.export(path, tmp_path / name)
        np.testing.assert_array_equal(load_model(tmp_path / name)[1]["norm.scale"], params[version]["norm.scale"])


def test_bfloat16_is_the_rounded_weights(run, tmp_path):
    run_dir, _, params = run
    export.export(run_dir, tmp_path / "out", dtype="bfloat16")
    exported = load_model(tmp_path / "out")[1]
    for name, value in exported.items():
        np.testing.assert_array_equal(value, params[12][name].astype(value.dtype))
    assert exported["norm.scale"].dtype == "bfloat16"


def test_tokenizer_template_and_ends_come_along(run, tmp_path):
    run_dir, model, _ = run
    export.export(run_dir, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [1], "pad_token_id": 0}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, 1)
    before, after = Tokenizer.load(model), Tokenizer.load(tmp_path / "out")
    assert (after.eos_ids, after.pad_id, after.vocab_size) == (before.eos_ids, before.pad_id, before.vocab_size)


def test_a_generation_config_that_is_there_is_kept_and_completed(run, tmp_path):
    run_dir, model, _ = run
    shutil.copytree(model, tmp_path / "model")
    given = {"eos_token_id": [1, 7], "pad_token_id": None, "temperature": 0.6}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(given))
    export.export(run_dir, tmp_path / "out", model=str(tmp_path / "model"))
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [1, 7], "pad_token_id": 0, "temperature": 0.6}


def test_what_is_not_there_is_named(run, tmp_path):
    run_dir, _, _ = run
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory; give that of a run"):
        export.export(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty" / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="empty/checkpoints, and found 5.orbax-checkpoint-tmp"):
        export.export(tmp_path / "empty", tmp_path / "out")
    shutil.copytree(run_dir, tmp_path / "moved")
    config = tmp_path / "moved" / "config.json"
    config.write_text(json.dumps({"model": {"path": "/gone/model"}}))
    with pytest.raises(FileNotFoundError, match=r"/gone/model.*config.json names it; say where it is now with --model"):
        export.export(tmp_path / "moved", tmp_path / "out")
    config.unlink()
    with pytest.raises(FileNotFoundError, match="config.json is not there, and nothing else says.*give --model=DIR"):
        export.export(tmp_path / "moved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_half_way_leaves_nothing(run, tmp_path, monkeypatch):
    def fails(source, directory):
        raise OSError("no space left")

    monkeypatch.setattr(export, "copy_rest", fails)
    with pytest.raises(OSError, match="no space left"):
        export.export(run[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def command(*arguments) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "areal_jax.export", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, cwd=job.ROOT, env=job.ENVIRONMENT, timeout=120)


def test_the_command_says_what_it_wrote_and_does_not_write_over_it(run, tmp_path):
    arguments = (f"--checkpoint={run[0]}", f"--out={tmp_path / 'out'}")
    first = command(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith(f"{tmp_path / 'out'}: version 12 of {run[0]}, ")
    second = command(*arguments)
    assert (second.returncode, second.stdout) == (2, "")
    assert (
        second.stderr
        == f"error: {tmp_path / 'out'} exists and is not empty; choose another directory, or remove that one\n"
    )
    assert command("--out=x").returncode != 0
