import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import decode, huggingface, sharding
from areal_jax.models.transformer import (
    TransformerConfig,
    bind,
    cast,
    graph,
    init_params,
    param_shapes,
    rotate,
)

FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True},
}


def config_of(family: str = "qwen3", **fields) -> TransformerConfig:
    shape = {"vocab_size": 32, "d_model": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "d_ff": 32}
    return TransformerConfig(**shape | FAMILIES[family] | fields)


def random_params(config: TransformerConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Large and nowhere zero, biases and norms too, so that nothing can be left out unnoticed."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(0.5, 0.5, s.shape), jnp.float32) for name, s in param_shapes(config).items()}


def rows(*segments: list[int]):
    """One packed row [1, L]: tokens, positions, segment ids."""
    tokens = [token for segment in segments for token in segment]
    positions = [i for segment in segments for i in range(len(segment))]
    ids = [n for n, segment in enumerate(segments, 1) for _ in segment]
    return tuple(jnp.asarray([values]) for values in (tokens, positions, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_segment_does_not_see_its_neighbours(family):
    """cases.md, packing: changing A in [A B C EOS | D E] moves neither D nor E, not by one bit."""
    config = config_of(family)
    model = bind(graph(config), random_params(config))
    first = model(*rows([1, 2, 3, 0], [4, 5]))
    second = model(*rows([9, 2, 3, 0], [4, 5]))
    assert np.abs(first[0, :4] - second[0, :4]).max() > 1e-3
    np.testing.assert_array_equal(first[0, 4:], second[0, 4:])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_single_ones(family):
    config = config_of(family)
    model = bind(graph(config), random_params(config))
    packed = model(*rows([1, 2, 3, 0], [4, 5]))
    np.testing.assert_allclose(packed[:, 4:], model(*rows([4, 5])), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_logits_of_the_full_forward(family):
    config = config_of(family)
    model = bind(graph(config), random_params(config))
    tokens_BL = jax.random.randint(jax.random.key(0), (2, 12), 0, 32)
    expected = model.logits(model(tokens_BL, jnp.tile(jnp.arange(12), (2, 1)), jnp.ones((2, 12), jnp.int32)))
    cache = decode.init_cache(config, 3, 16, jnp.float32)
    cache = decode.write_rows(cache, decode.prefill(model, tokens_BL[:, :7]), jnp.array([1, -1, 0]))
    for at in range(7, 12):
        fed, places = jnp.array([tokens_BL[1, at], 0, tokens_BL[0, at]]), jnp.array([at, 16, at])
        logits, cache = decode.decode_step(model, fed, places, cache, attended=12)
        np.testing.assert_allclose(logits[0], expected[1, at], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(logits[2], expected[0, at], rtol=1e-4, atol=1e-4)
    assert (np.asarray(cache.layers[0][0][1]) == 0).all()  # the slot outside wrote nothing


def test_rotation_depends_on_distance_only():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    score = lambda a, b: jnp.sum(rotate(x, jnp.array([[a]]), 100.0) * rotate(y, jnp.array([[b]]), 100.0))  # noqa: E731
    np.testing.assert_allclose(score(3, 1), score(13, 11), rtol=1e-5)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_grouped_queries_are_repeated_keys():
    """The slow twin: as many key/value heads as query heads, each repeated for its group."""
    grouped, full = config_of("llama"), config_of("llama", kv_heads=4)
    params = random_params(grouped)
    repeated = {
        name: jnp.repeat(array, 2, axis=1) if name.endswith(("key.kernel", "value.kernel")) else array
        for name, array in params.items()
    }
    row = rows([3, 1, 4, 1, 5])
    expected = bind(graph(full), repeated)(*row)
    np.testing.assert_allclose(bind(graph(grouped), params)(*row), expected, atol=1e-5)


def test_bfloat16_params_compute_in_bfloat16_and_stay_near():
    config = config_of()
    params = init_params(config, jax.random.key(0))
    exact = bind(graph(config), params)(*rows([1, 2, 3, 4]))
    rounded = bind(graph(config), cast(params, jnp.bfloat16))(*rows([1, 2, 3, 4]))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.15)


def test_initial_params_have_the_declared_shapes():
    config = config_of("qwen2", tied_embeddings=False)
    params = init_params(config, jax.random.key(0))
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (s.shape, s.dtype) for n, s in param_shapes(config).items()
    }


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 2, 4)])
def test_a_sharded_forward_is_the_forward(shape):
    config = config_of("qwen3", kv_heads=4, vocab_size=32)
    params = random_params(config)
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, shape, strict=True)))
    placed = jax.device_put(params, sharding.param_shardings(params, mesh))
    tokens = jax.random.randint(jax.random.key(0), (8, 6), 0, 32)
    row = (tokens, jnp.tile(jnp.arange(6), (8, 1)), jnp.ones((8, 6), jnp.int32))
    forward = jax.jit(lambda params, row: bind(graph(config), params)(*row))
    sharded_row = jax.device_put(row, jax.sharding.NamedSharding(mesh, sharding.ROWS))
    np.testing.assert_allclose(forward(placed, sharded_row), forward(params, row), atol=2e-4)


def test_a_mesh_that_does_not_fit_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="does not divide the 8 device"):
        sharding.make_mesh({"data": 3, "fsdp": 1, "tensor": 1})
    config = config_of()
    mesh = sharding.make_mesh({"data": 1, "fsdp": 2, "tensor": 4})
    with pytest.raises(ValueError, match="has 2 along its kv_heads axis, which the mesh axis tensor=4 must divide"):
        sharding.param_shardings(param_shapes(config), mesh)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hugging_face_format_gives_back_the_same_bits(family, tmp_path):
    config = config_of(family)
    params = random_params(config)
    huggingface.save_model(tmp_path, config, params)
    again, loaded = huggingface.load_model(tmp_path)
    assert again == config and loaded.keys() == params.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; supported are llama, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type='yarn' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"num_hidden_layers": 3}, "lack model.layers.2"),
        ({"num_hidden_layers": 1}, "tensors that this model has no place for"),
    ],
)
def test_what_the_model_cannot_express_is_refused_by_name(edit, message, tmp_path):
    import json

    config = config_of()
    huggingface.save_model(tmp_path, config, random_params(config))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    with pytest.raises(ValueError, match=message):
        huggingface.load_model(tmp_path)


def test_a_missing_model_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json there; give a directory in the Hugging Face format"):
        huggingface.load_model(tmp_path / "nowhere")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_hugging_face_transformers(family):
    """Against files that `make_golden.py` wrote with torch and transformers."""
    directory = pathlib.Path(__file__).parent / "golden" / family
    config, params = huggingface.load_model(directory)
    golden = np.load(directory / "logits.npz")
    model = bind(graph(config), {name: jnp.asarray(array) for name, array in params.items()})
    tokens_BL = jnp.asarray(golden["tokens"])
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    logits = model.logits(model(tokens_BL, positions_BL, jnp.ones_like(tokens_BL)))
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4 * np.abs(golden["logits"]).max())
