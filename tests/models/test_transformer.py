import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from areal_jax.generation import sampling
from areal_jax.generation.engine import Engine, EngineOptions, empty_requests
from areal_jax.models import decode, kv_cache, sharding
from areal_jax.models.huggingface import load_config
from areal_jax.models.kv_cache import IN_PIECES
from areal_jax.models.logprobs import from_logits, token_logprobs
from areal_jax.models.safetensors_files import load_model
from areal_jax.models.transformer import (
    RMSNorm,
    Transformer,
    TransformerConfig,
    bind,
    cast,
    graph,
    init_params,
    look_up,
    param_count,
    param_shapes,
    rope_frequencies,
    rotate,
    rotations,
    strip_rows,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

FAMILIES = {
    "llama": {"rope_type": "llama3", "rope_factor": 8.0, "rope_original_positions": 8},
    "mistral": {"head_size": 6},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True},
}
DEFAULT_MODEL = pathlib.Path(__file__).parents[2] / "configs" / "arithmetic_model"


def config_of(family: str = "qwen3", **fields) -> TransformerConfig:
    shape = {"vocab_size": 32, "d_model": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "d_ff": 32}
    return TransformerConfig(**shape | {"family": family} | FAMILIES[family] | fields)


def random_params(config: TransformerConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Large and nowhere zero, biases and norms too, so that nothing can be left out unnoticed."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(0.5, 0.5, s.shape), jnp.float32) for name, s in param_shapes(config).items()}


@jax.jit
def hidden_of(model: Transformer, *row: jax.Array) -> jax.Array:
    return model(*row)


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
    first = np.asarray(hidden_of(model, *rows([1, 2, 3, 0], [4, 5])))
    second = np.asarray(hidden_of(model, *rows([9, 2, 3, 0], [4, 5])))
    assert np.abs(first[0, :4] - second[0, :4]).max() > 1e-3
    np.testing.assert_array_equal(first[0, 4:], second[0, 4:])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_single_ones(family):
    config = config_of(family)
    model = bind(graph(config), random_params(config))
    packed = hidden_of(model, *rows([1, 2, 3, 0], [4, 5]))
    np.testing.assert_allclose(np.asarray(packed)[:, 4:], hidden_of(model, *rows([4, 5])), atol=1e-5)


@jax.jit
def prefilled(model: Transformer, tokens_BL: jax.Array) -> tuple[kv_cache.LayerCache, ...]:
    """A cache of three slots: the second row, nothing, the first one."""
    cache = decode.init_cache(model.config, 3, (5, 8, 12, 16), jnp.float32)
    return kv_cache.write_rows(IN_PIECES, cache, decode.prefill(model, tokens_BL), jnp.array([1, -1, 0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_logits_of_the_full_forward(family):
    config = config_of(family)
    model = bind(graph(config), random_params(config))
    tokens_BL = jax.random.randint(jax.random.key(0), (2, 12), 0, 32)
    row = (tokens_BL, jnp.tile(jnp.arange(12), (2, 1)), jnp.ones((2, 12), jnp.int32))
    expected = np.asarray(jax.jit(lambda model, *row: model.logits(model(*row)))(model, *row))
    cache = prefilled(model, tokens_BL[:, :7])
    step = jax.jit(functools.partial(decode.decode_step, attended=12))
    for at in range(7, 12):
        fed, places = jnp.array([tokens_BL[1, at], 0, tokens_BL[0, at]]), jnp.array([at, 16, at])
        logits, cache = step(model, fed, places, cache)
        logits = np.asarray(logits)
        np.testing.assert_allclose(logits[0], expected[1, at], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(logits[2], expected[0, at], rtol=1e-4, atol=1e-4)
    assert not any(np.asarray(array[1]).any() for array in jax.tree.leaves(cache))  # the slot outside wrote nothing


def test_rotation_depends_on_distance_only():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    frequencies = rope_frequencies(config_of(rope_theta=100.0))

    def score(a: int, b: int) -> jax.Array:
        turned = [rotate(z, *rotations(frequencies, jnp.array([[at]]))) for z, at in ((x, a), (y, b))]
        return jnp.sum(turned[0] * turned[1])

    np.testing.assert_allclose(score(3, 1), score(13, 11), rtol=1e-5)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


@pytest.mark.parametrize("dtype, atol", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_a_norm_and_its_gradients_are_those_of_the_formula(dtype, atol):
    """The slow twin: x / rms(x) * scale in float64, differentiated by JAX."""
    rng = np.random.default_rng(0)
    x, out = rng.normal(size=(2, 3, 5, 24)).astype(dtype)
    scale = rng.normal(size=24).astype(dtype)
    graphdef = nnx.split(RMSNorm(24, 1e-3))[0]

    def ours(x, scale):
        return nnx.merge(graphdef, {"scale": scale})(x)

    def plain(x, scale):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3) * scale

    found = [ours(x, scale), *jax.vjp(ours, x, scale)[1](jnp.asarray(out))]
    with jax.enable_x64():
        exact = [np.asarray(array, np.float64) for array in (x, scale, out)]
        expected = [plain(*exact[:2]), *jax.vjp(plain, *exact[:2])[1](jnp.asarray(exact[2]))]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(np.asarray(mine, np.float64), theirs, atol=atol * np.abs(theirs).max())


def test_grouped_queries_are_repeated_keys():
    """The slow twin: as many key/value heads as query heads, each repeated for its group."""
    grouped, full = config_of("llama"), config_of("llama", kv_heads=4)
    params = random_params(grouped)
    repeated = {
        name: jnp.repeat(array, 2, axis=1) if name.endswith(("key.kernel", "value.kernel")) else array
        for name, array in params.items()
    }
    row = rows([3, 1, 4, 1, 5])
    expected = hidden_of(bind(graph(full), repeated), *row)
    np.testing.assert_allclose(hidden_of(bind(graph(grouped), params), *row), expected, atol=1e-5)


def test_bfloat16_params_compute_in_bfloat16_and_stay_near():
    config = config_of()
    params = init_params(config, jax.random.key(0))
    exact = hidden_of(bind(graph(config), params), *rows([1, 2, 3, 4]))
    rounded = hidden_of(bind(graph(config), cast(params, jnp.bfloat16)), *rows([1, 2, 3, 4]))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.15)


def test_the_gradient_of_a_token_that_comes_often_is_whole_in_bfloat16():
    # Token 1 at 1000 places with gradient 1 each, token 2 at one; a sum in bfloat16 would stay at 256.
    tokens = np.append(np.full(1000, 1), 2)
    gradient_VD = jax.grad(lambda table_VD: look_up(table_VD, tokens).sum())(jnp.ones((4, 1), jnp.bfloat16))
    assert gradient_VD.dtype == jnp.bfloat16 and gradient_VD.ravel().tolist() == [0, 1000, 1, 0]


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


def test_rope_frequencies_by_hand():
    """head 8, theta 10^4: 1, 0.1, 0.01, 0.001 radians a position; 2 pi * 100 original positions: 100, 10, 1, 0.1 turns.

    llama3 with factor 8, low 1 and high 19: more than 19 turns are kept, at most 1 divided by 8, and 10 turns lie half
    way: (0.1 + 0.0125) / 2 = 0.05625.
    """
    plain = config_of(rope_theta=1e4)
    np.testing.assert_allclose(rope_frequencies(plain), [1, 0.1, 0.01, 0.001], rtol=1e-6)
    linear = dataclasses.replace(plain, rope_type="linear", rope_factor=4.0)
    np.testing.assert_allclose(rope_frequencies(linear), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)
    llama3 = dataclasses.replace(
        plain, rope_type="llama3", rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=19.0,
        rope_original_positions=2 * np.pi * 100,
    )  # fmt: skip
    np.testing.assert_allclose(rope_frequencies(llama3), [1, 0.05625, 0.00125, 0.000125], rtol=1e-6)


# A vocabulary that is padded, or larger than the tokenizer's.


def padded(params, config: TransformerConfig) -> dict[str, jax.Array]:
    """The params with zeros where the config has more rows."""
    wide = param_shapes(config)
    more = {name: [(0, w - n) for w, n in zip(wide[name].shape, params[name].shape, strict=True)] for name in wide}
    return {name: jnp.pad(params[name], more[name]) for name in wide}


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # untied and tied
def test_padding_goes_on_and_comes_off(family):
    config = config_of(family, padded_vocab=40)
    params = random_params(dataclasses.replace(config, padded_vocab=0))
    wide = padded(params, config)
    assert {name: array.shape for name, array in wide.items()} == {n: s.shape for n, s in param_shapes(config).items()}
    for name, array in wide.items():
        np.testing.assert_array_equal(strip_rows(name, array, config), params[name])
    assert param_count(config) == sum(array.size for array in params.values())


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.grad, has_aux=True)
def gradients_of(params, config, temperature):
    """Of a sum that moves every log-probability and entropy; and these, both [1, 6]."""
    tokens, positions, segments = rows([1, 2, 3, 29, 5, 6])
    model = bind(graph(config), params)
    hidden = model(tokens, positions, segments)
    logprobs, entropy = token_logprobs(model, hidden, tokens, temperature=temperature, block=7)
    return jnp.sum(logprobs * jnp.arange(6)) + jnp.sum(entropy**2), (logprobs, entropy)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_ids_that_are_not_live_have_no_mass_and_no_gradient(family, temperature):
    """Log-probabilities, entropy and gradients are those of a vocabulary that ends at the last live id."""
    config = config_of(family, padded_vocab=40, live_vocab=30)
    short = dataclasses.replace(config, vocab_size=30, padded_vocab=0, live_vocab=0)
    params = random_params(config)
    gradients, found = gradients_of(params, config, temperature)
    cut = {name: strip_rows(name, array, short) for name, array in params.items()}
    expected_gradients, expected = gradients_of(cut, short, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(strip_rows(name, gradient, short), expected_gradients[name], rtol=1e-3, atol=1e-4)
    assert np.abs(gradients["embedding"][:30]).max() > 0.01
    assert not gradients["embedding"][30:].any()
    assert family == "qwen2" or not gradients["head.kernel"][:, 30:].any()


def test_ids_that_are_not_live_are_never_sampled():
    """Their logits would be the largest by far, were they not masked."""
    config = config_of(padded_vocab=40, live_vocab=30, tied_embeddings=True)
    params = random_params(config)
    params["embedding"] = params["embedding"].at[30:].set(100.0)
    model = bind(graph(config), params)
    logits_V = jax.jit(lambda model, *row: model.logits(model(*row)[:, -1]))(model, *rows([1, 2, 3]))
    logits_SV = np.tile(logits_V, (2000, 1))
    slots = jnp.arange(2000, dtype=jnp.uint32)
    keys = sampling.request_keys(slots, slots, slots)
    for temperature in (0.0, 0.3, 1.0, 100.0):
        tokens, logprobs = sampling.sample(
            logits_SV, jnp.full(2000, -jnp.inf), keys, jnp.zeros(2000, jnp.int32), jnp.full(2000, temperature)
        )
        assert tokens.max() < 30 and np.isfinite(logprobs).all()
        expected, _ = from_logits(logits_SV[:, :30], tokens, temperature=temperature or 1.0)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert len(set(np.asarray(tokens).tolist())) == 30  # the last temperature makes all live ones likely


def test_the_engine_makes_no_token_that_is_not_live():
    config = config_of(padded_vocab=40, live_vocab=30, tied_embeddings=True)
    params = random_params(config)
    params["embedding"] = params["embedding"].at[30:].set(100.0)
    engine = Engine(
        config, EngineOptions(slots=4, max_length=32, decode_steps=28, prefill_rows=4, length_buckets=(32,))
    )
    weights = engine.load(params, version=0)
    requests = empty_requests(4)
    requests.row[:], requests.length[:], requests.prompt_length[:] = range(4), 3, 3
    requests.limit[:], requests.temperature[:], requests.uid[:] = 32, 20.0, range(4)
    state = engine.start(
        engine.init_decode_state(), engine.prefill_rows(weights, [np.array([1, 2, 3], np.int32)] * 4), requests
    )
    _, decoded = engine.decode(weights, state, 32)
    assert decoded.count.min() == 28 and decoded.tokens.max() < 30
    assert np.isfinite(decoded.logprobs).all() and len(set(np.asarray(decoded.tokens).flat)) > 20


def test_the_default_model_fits_a_tensor_axis_that_does_not_divide_its_97_words():
    params = load_model(DEFAULT_MODEL)[1]
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    whole, wide = load_config(DEFAULT_MODEL), load_config(DEFAULT_MODEL, vocab_multiple=2)
    assert (whole.vocab_rows, wide.vocab_rows, wide.vocab_size) == (97, 98, 97)
    with pytest.raises(ValueError, match="has 97 along its vocab axis, which the mesh axis tensor=2 must divide"):
        sharding.param_shardings(params, mesh)
    placed = jax.device_put(padded(params, wide), sharding.param_shardings(padded(params, wide), mesh))
    tokens = jax.random.randint(jax.random.key(0), (8, 12), 0, 97)

    def logprobs(params, config):
        model = bind(graph(config), params)
        hidden = model(tokens, jnp.tile(jnp.arange(12), (8, 1)), jnp.ones((8, 12), jnp.int32))
        return token_logprobs(model, hidden, tokens, temperature=0.7, block=32)

    logprobs = jax.jit(logprobs, static_argnums=1)
    np.testing.assert_allclose(logprobs(placed, wide), logprobs(params, whole), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"live_vocab": 33}, "live_vocab=33 must be between 0 .* and vocab_size=32"),
        ({"padded_vocab": 31}, "padded_vocab=31 must not be below vocab_size=32"),
        ({"rope_type": "yarn"}, "rope_type='yarn' is not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)
