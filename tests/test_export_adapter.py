"""Runs with `model.lora` as model directories and as adapters of PEFT."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from absl import flags
from absl.testing import flagsaver
from safetensors import safe_open
from safetensors.numpy import load_file

from areal_jax import export
from areal_jax.config import build
from areal_jax.models import peft_files, sharding
from areal_jax.models.huggingface import load_config
from areal_jax.models.safetensors_files import read_params
from areal_jax.trainer import lora, state
from areal_jax.trainer.checkpoint import Checkpoints
from tests import test_export

SCALE = 4.0 / 3  # alpha / rank
ALL = ("query", "key", "value", "out", "gate", "up", "down")
MODULES = {  # of a layer: [out, in]; 4 heads and 2 key/value heads of size 8, width 16, feed-forward 24
    "self_attn.q_proj": (32, 16),
    "self_attn.k_proj": (16, 16),
    "self_attn.v_proj": (16, 16),
    "self_attn.o_proj": (16, 32),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


def make_run(directory, model, **section) -> None:
    """A checkpoint of a trainer on 2 x 2 devices with random adapters of rank 3, as in the middle of a run."""
    section = build({"model": {"path": str(model), **section}}).model
    config = dataclasses.replace(load_config(model, vocab_multiple=2), live_vocab=len(test_export.WORDS))
    trainable, optimizer = lora.trainable(config, section), optax.adamw(1e-3)
    mesh = sharding.make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    abstract = state.abstract_state(config, optimizer, mesh, trainable)
    rng = np.random.default_rng(3)
    params = dict(read_params(model, config, trainable.of_model(abstract.params)))
    for name in abstract.params.keys() - params.keys():
        place = abstract.params[name]
        params[name] = jax.device_put(rng.normal(size=place.shape).astype(np.float32), place.sharding)
    checkpoints = Checkpoints(directory / "checkpoints", keep=1)
    facts = {"version": 5, "model": dataclasses.asdict(config), "run": json.loads(json.dumps(lora.facts(section)))}
    checkpoints.save(state.initial_state(params, abstract, optimizer, trainable), facts, {})
    checkpoints.close()
    (directory / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "model"
    test_export.make_model(directory, test_export.config_of("qwen2"))
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):
    directory = tmp_path_factory.mktemp("run")
    make_run(directory, model, lora={"rank": 3, "alpha": 4.0, "targets": ALL})
    return directory


def test_base_and_adapter_by_pefts_formula_are_the_merged_model(run, model, tmp_path):
    assert "version 5 of" in export.export(run, tmp_path / "merged")
    said = export.export_adapter(run, tmp_path / "adapter")
    # 3 * (in + out) of each module of 2 layers
    assert said.endswith(f"{2 * 3 * sum(map(sum, MODULES.values())):,} parameters of rank 3 in float32, for {model}")
    base, merged = (load_file(directory / "model.safetensors") for directory in (model, tmp_path / "merged"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = dict(base)
    for layer in range(2):
        for module, (rows, columns) in MODULES.items():
            name = f"model.layers.{layer}.{module}"
            a = adapter.pop(f"base_model.model.{name}.lora_A.weight")
            b = adapter.pop(f"base_model.model.{name}.lora_B.weight")
            assert (a.shape, b.shape) == ((3, columns), (rows, 3))
            expected[f"{name}.weight"] = base[f"{name}.weight"] + SCALE * (b @ a)
    assert adapter == {}
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
        assert np.array_equal(value, base[name]) == (not name.endswith("proj.weight"))


def test_the_adapters_config_is_pefts(run, model, tmp_path):
    export.export_adapter(run, tmp_path / "adapter", dtype="bfloat16")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA" and written["task_type"] == "CAUSAL_LM"
    assert (written["r"], written["lora_alpha"], written["bias"]) == (3, 4, "none")
    assert written["base_model_name_or_path"] == str(model)
    assert written["target_modules"] == sorted(module.split(".")[1] for module in MODULES)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "np") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_adapters_of_some_layers_are_named_by_their_modules():
    kernels = ("layers.1.attention.out.kernel", "layers.1.feed_forward.up.kernel")
    found = peft_files.target_modules(test_export.config_of("qwen2"), kernels)
    assert found == ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj"]


def test_a_run_without_adapters_has_none_to_write(model, tmp_path):
    make_run(tmp_path / "run", model, freeze=("embedding",))
    with pytest.raises(ValueError, match="--adapter: .*5 is of a run without model.lora.*without --adapter the whole"):
        export.export_adapter(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export.export(tmp_path / "run", tmp_path / "out")


def test_the_command_writes_the_adapter(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export.command_line, "log_plainly", lambda: None)
    flags.FLAGS.mark_as_parsed()
    out = tmp_path / "out"
    with flagsaver.flagsaver(checkpoint=str(run), out=str(out), adapter=True, model="org/name"):
        assert export.main(["export"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: the adapter of version 5 of {run}, ")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/name"
