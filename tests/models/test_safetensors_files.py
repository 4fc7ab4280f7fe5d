import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from areal_jax.models import safetensors_files, sharding
from areal_jax.models.huggingface import load_config
from areal_jax.models.safetensors_files import load_model, read_params, save_model, write_params
from areal_jax.models.transformer import TransformerConfig, param_shapes

FAMILIES = {
    "llama": {
        "rope_type": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_positions": 64,
    },
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True},
}
DTYPES = ("float32", "bfloat16", "float16")
MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2)]


def config_of(family: str = "qwen3", **fields) -> TransformerConfig:
    """A vocabulary of 27, which no mesh divides, and of every axis another size."""
    shape = {"vocab_size": 27, "d_model": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "d_ff": 24}
    return TransformerConfig(**shape | {"family": family} | FAMILIES[family] | fields)


def random_params(config: TransformerConfig, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = param_shapes(dataclasses.replace(config, padded_vocab=0))
    return {name: rng.normal(size=shape.shape).astype(np.dtype(dtype)) for name, shape in shapes.items()}


def places_on(mesh_shape: tuple[int, int, int], config: TransformerConfig, dtype: str = "float32"):
    devices = jax.devices()[: int(np.prod(mesh_shape))]
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, mesh_shape, strict=True)), devices)
    shapes = param_shapes(config)
    places = sharding.param_shardings(shapes, mesh)
    return {n: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype), sharding=places[n]) for n, s in shapes.items()}


def edited(directory, change) -> None:
    """The tensors of model.safetensors after `change`, which may alter them in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture
def model(tmp_path):
    """A directory, its config and its params."""
    config = config_of()
    save_model(tmp_path / "model", config, random_params(config))
    return tmp_path / "model", config, random_params(config)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_params_are_read_into_their_shards_as_they_were_written(family, mesh_shape, tmp_path):
    config = config_of(family)
    expected = random_params(config)
    save_model(tmp_path / "model", config, expected)
    again = load_config(tmp_path / "model", vocab_multiple=mesh_shape[2])
    assert dataclasses.replace(again, padded_vocab=0) == config
    places = places_on(mesh_shape, again)
    read = read_params(tmp_path / "model", again, places)
    assert read.keys() == places.keys()
    for name, place in places.items():
        assert (read[name].shape, read[name].dtype) == (place.shape, place.dtype)
        assert read[name].sharding == place.sharding
        whole = np.zeros(place.shape, np.float32)
        whole[tuple(map(slice, expected[name].shape))] = expected[name]
        np.testing.assert_array_equal(read[name], whole)


@pytest.mark.parametrize("read_as", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_files_becomes_the_one_of_the_place(dtype, read_as, tmp_path):
    config = config_of()
    expected = random_params(config, dtype)
    save_model(tmp_path / "model", config, expected)
    read = read_params(tmp_path / "model", config, places_on((1, 1, 1), config, read_as))
    for name, value in expected.items():
        assert read[name].dtype == read_as
        np.testing.assert_array_equal(read[name], jnp.asarray(value).astype(read_as))


def test_files_hold_what_torch_would_and_reading_turns_it_back(tmp_path):
    """The slow twin, on kernels of more rows than are transposed at a time."""
    config = config_of(vocab_size=3 * safetensors_files.BLOCK_ROWS + 3, d_ff=2 * safetensors_files.BLOCK_ROWS + 6)
    params = random_params(config)
    save_model(tmp_path / "model", config, params)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for ours, theirs, columns in (
        ("embedding", "model.embed_tokens", None),
        ("head.kernel", "lm_head", 16),
        ("layers.1.attention.query.kernel", "model.layers.1.self_attn.q_proj", 16),
        ("layers.1.attention.out.kernel", "model.layers.1.self_attn.o_proj", 32),
        ("layers.1.feed_forward.up.kernel", "model.layers.1.mlp.up_proj", 16),
        ("layers.1.feed_forward.down.kernel", "model.layers.1.mlp.down_proj", config.d_ff),
    ):
        expected = params[ours] if columns is None else params[ours].reshape(columns, -1).T
        np.testing.assert_array_equal(tensors[f"{theirs}.weight"], expected)
    read = read_params(tmp_path / "model", config, places_on((2, 4, 1), config))
    for name, value in params.items():
        np.testing.assert_array_equal(read[name], value)


def test_a_device_is_given_its_own_slice_and_no_more(model, monkeypatch):
    directory, config, _ = model
    made = []
    copy = safetensors_files._read_slice

    def watched(tensor, layout, bounds, dtype):
        made.append((layout.name, bounds))
        return copy(tensor, layout, bounds, dtype)

    monkeypatch.setattr(safetensors_files, "_read_slice", watched)
    places = places_on((2, 4, 1), config)
    read_params(directory, config, places)
    sizes = {name: {np.prod([stop - start for start, stop in b]) for n, b in made if n == name} for name in places}
    for name, place in places.items():
        assert sizes[name] == {np.prod(place.sharding.shard_shape(place.shape))}
    assert len(made) == len(set(made)), "what two devices hold alike is read once"
    assert len([1 for name, _ in made if name == "embedding"]) == 4


def test_params_read_are_the_callers_to_donate(model):
    directory, config, expected = model
    before = (directory / "model.safetensors").read_bytes()
    read = read_params(directory, config, places_on((2, 2, 1), config))
    moved = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)(read)
    for name, value in expected.items():
        np.testing.assert_array_equal(moved[name], value + 1)
    assert (directory / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_on_the_host_has_the_same_bits_and_dtype(family, dtype, tmp_path):
    config = config_of(family)
    expected = random_params(config, dtype)
    save_model(tmp_path / "model", config, expected)
    again, params = load_model(tmp_path / "model")
    assert again == config and params.keys() == expected.keys()
    for name, value in expected.items():
        assert params[name].dtype == value.dtype
        np.testing.assert_array_equal(params[name].view(np.uint8), value.view(np.uint8))


def test_padding_is_not_written(tmp_path):
    config = config_of()
    padded = dataclasses.replace(config, padded_vocab=32, live_vocab=20)
    save_model(tmp_path / "a", config, random_params(config))
    in_memory = read_params(tmp_path / "a", padded, places_on((1, 4, 2), padded))
    assert in_memory["embedding"].shape == (32, 16) and in_memory["head.kernel"].shape == (16, 32)
    save_model(tmp_path / "b", padded, in_memory)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_large_models_go_to_several_files_with_an_index(tmp_path):
    config = config_of()
    params = random_params(config)
    files = write_params(tmp_path, config, params, shard_bytes=4000)
    assert len(files) > 2
    assert [file.name for file in files[:2]] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / safetensors_files.INDEX).read_text())
    held = {}
    for file in files:
        with safe_open(file, "np") as handle:
            assert handle.metadata() == {"format": "pt"}
            sizes = [handle.get_tensor(name).nbytes for name in handle.keys()]
            assert sum(sizes) <= 4000 or len(sizes) == 1
            held |= dict.fromkeys(handle.keys(), file.name)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in params.values())
    again, read = load_model(tmp_path)
    assert again == config
    for name, value in params.items():
        np.testing.assert_array_equal(read[name], value)


def test_writing_asks_for_one_parameter_at_a_time_and_converts_it(tmp_path):
    config = config_of()
    params = random_params(config)
    asked = []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return params[name]

    write_params(tmp_path, config, Lazy(params), dtype="bfloat16")
    assert sorted(asked) == sorted(params), "each once"
    for name, value in load_model(tmp_path)[1].items():
        np.testing.assert_array_equal(value, params[name].astype(ml_dtypes.bfloat16))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_index_says_which_files_are_the_model(tmp_path):
    """Mistral's repositories hold the weights a second time, as consolidated.safetensors with names of its own."""
    config = config_of()
    params = random_params(config)
    write_params(tmp_path, config, params, shard_bytes=4000)
    save_file({"tok_embeddings.weight": np.zeros(3, np.float32)}, tmp_path / "consolidated.safetensors")
    assert load_model(tmp_path)[1].keys() == params.keys()


def test_files_without_an_index_are_all_read(tmp_path):
    config = config_of()
    params = random_params(config)
    write_params(tmp_path, config, params, shard_bytes=4000)
    (tmp_path / safetensors_files.INDEX).unlink()
    assert load_model(tmp_path)[1].keys() == params.keys()


def test_stored_tensors_that_follow_from_others_are_harmless(tmp_path):
    config = config_of("qwen2")
    save_model(tmp_path / "model", config, random_params(config))

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edited(tmp_path / "model", add)
    assert load_model(tmp_path / "model")[1].keys() == random_params(config).keys()


def test_a_head_of_its_own_under_tied_embeddings_is_refused(tmp_path):
    config = config_of("qwen2")
    save_model(tmp_path / "model", config, random_params(config))
    edited(tmp_path / "model", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match='not the same as model.embed_tokens.weight.* "tie_word_embeddings": false'):
        load_model(tmp_path / "model")


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), "the weights lack model.norm.weight, which config.json implies"),
        (
            lambda t: [t.pop(name) for name in list(t) if "mlp" in name],
            "lack model.layers.0.mlp.down_proj.weight, .* and 1 more, which",
        ),
        (lambda t: t.update(new=np.ones(2)), "tensors that this model has no place for: new; without them"),
        (lambda t: t.update({"lm_head.bias": np.ones(27)}), "no place for: lm_head.bias"),
        (
            lambda t: t.update({NORM: t[NORM][:-1]}),
            r"model.norm.weight has shape \(15,\), and config.json implies \(16,\)",
        ),
        (
            lambda t: t.update({UP: t[UP].T.copy()}),
            r"up_proj.weight has shape \(16, 24\), and config.json implies \(24, 16\)",
        ),
        (lambda t: t.update({NORM: t[NORM].astype(np.int8)}), "has dtype I8; only F32, BF16, F16 can be read"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name_before_any_is_read(change, message, model, monkeypatch):
    directory, config, _ = model
    edited(directory, change)
    monkeypatch.setattr(safetensors_files, "_read_slice", None)  # reading would fail with another error
    with pytest.raises(ValueError, match=message):
        read_params(directory, config, places_on((1, 1, 1), config))


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    config = config_of()
    files = write_params(tmp_path, config, random_params(config), shard_bytes=4000)
    (tmp_path / safetensors_files.INDEX).unlink()
    (tmp_path / "old.safetensors").write_bytes(files[0].read_bytes())
    with pytest.raises(ValueError, match=f"is in {files[0].name} and in old.safetensors; one of them is left over"):
        load_model(tmp_path)


def test_a_file_that_the_index_names_and_is_absent_is_named(tmp_path):
    config = config_of()
    files = write_params(tmp_path, config, random_params(config), shard_bytes=4000)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"names {len(files)} files, of which {files[1].name} are not there"):
        load_model(tmp_path)


@pytest.mark.parametrize("cut", [3, 100, -1])
def test_a_torn_file_is_named(cut, model):
    directory, _, _ = model
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}: no whole safetensors file .*Download it again"):
        load_model(directory)


def test_a_directory_without_weights_says_what_it_has(model):
    directory, _, _ = model
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors file there.*config.json, pytorch_model.bin"):
        load_model(directory)


def test_a_directory_is_written_whole_or_not_at_all(tmp_path):
    config = config_of()
    params = random_params(config)
    with pytest.raises(KeyError):
        save_model(tmp_path / "model", config, {n: v for n, v in params.items() if n != "norm.scale"})
    with (
        pytest.raises(RuntimeError, match="half way"),
        safetensors_files.new_directory(tmp_path / "x" / "model") as new,
    ):
        write_params(new, config, params)
        raise RuntimeError("half way")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["x"]
    (tmp_path / "model").mkdir()  # an empty one may be there
    save_model(tmp_path / "model", config, params)
    with pytest.raises(FileExistsError, match="model exists and is not empty"):
        save_model(tmp_path / "model", config, params)
