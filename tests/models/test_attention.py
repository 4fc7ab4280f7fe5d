"""Tiles against all scores at once, and kernels that JAX brings, interpreted on the CPU, against the plain form.

That the kernels are also lowered for their backend is checked where that needs no such device; cuDNN's can neither be
interpreted nor lowered here, so that of it only the rule is tested (experiments/gpu_check.sh runs it).
"""

import dataclasses
import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import attention, attention_kernels, sharding, tiled_attention
from areal_jax.models.attention import PLAIN, Kernel, Kernels, causal_attention, decode_attention, packed_attention
from areal_jax.models.kv_cache import HEADS_FIRST, IN_PIECES, CacheLayout, LayerCache
from areal_jax.models.tiled_attention import Tile
from areal_jax.models.transformer import TransformerConfig, bind, graph, init_params

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ONE = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
MANY = sharding.make_mesh({"data": 2, "fsdp": 1, "tensor": 2}, jax.devices()[:4])
TAKES_ALL = lambda query, key: ""  # noqa: E731
TRITON = Kernels(
    packed=Kernel("mha", TAKES_ALL, functools.partial(attention_kernels.triton_packed, interpret=True)),
    decode=Kernel("gqa", TAKES_ALL, functools.partial(attention_kernels.triton_decode, interpret=True)),
    cache=HEADS_FIRST,
)
SPLASH = Kernels(
    packed=Kernel("splash", TAKES_ALL, functools.partial(attention_kernels.splash_packed, interpret=True)),
    causal=Kernel("splash", TAKES_ALL, functools.partial(attention_kernels.splash_causal, interpret=True)),
)


def all_at_once(query, key, value, segments):
    """The slow twin: every score of a row exists."""
    K, L = key.shape[2], query.shape[1]
    key, value = (jnp.repeat(array, query.shape[2] // K, axis=2).astype(jnp.float32) for array in (key, value))
    scores = jnp.einsum("blnh,bcnh->bnlc", query.astype(jnp.float32), key) * query.shape[3] ** -0.5
    visible = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((L, L), bool))
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnlc,bcnh->blnh", weights, value).astype(query.dtype)


def tiles(queries, keys=None):
    return Kernels(tile=Tile(queries, keys or queries))


SLOW = Kernels(packed=Kernel("all at once", TAKES_ALL, all_at_once))


def inputs(rows=2, length=128, heads=4, kv_heads=2, size=64, dtype=jnp.float32):
    """Queries, keys, values and segments: two to four per row, of uneven lengths."""
    shapes = [(rows, length, n, size) for n in (heads, kv_heads, kv_heads)]
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    segments = np.stack([np.sort(np.random.default_rng(row).integers(0, 2 + row, length)) for row in range(rows)])
    return *arrays, jnp.asarray(segments, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(kernels, query, key, value, segments):
    def total(*arrays):
        out = packed_attention(*arrays, segments, kernels)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    gradients, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    return out, *gradients


@pytest.mark.parametrize(
    ("kernels", "shape"),
    [
        (tiles(32), {"length": 96, "size": 16}),
        (tiles(32), {"length": 100, "size": 16, "kv_heads": 4}),  # the last tile is not full
        (tiles(256), {"length": 37, "kv_heads": 1}),  # nor the only one
        (tiles(64, 16), {"length": 200, "size": 16}),
        (tiles(16, 64), {"length": 200, "size": 16, "kv_heads": 1}),
        (tiles(48, 32), {"length": 200, "size": 16}),  # neither is a multiple of the other
        (PLAIN, {"length": 384, "size": 16}),
        (PLAIN, {"length": 2100, "rows": 1, "heads": 2, "kv_heads": 1}),  # in the large tiles of long rows
        (TRITON, {"length": 256}),
        (TRITON, {"length": 32, "size": 80, "kv_heads": 1}),
        (SPLASH, {"length": 256}),
    ],
)
def test_packed_attention_and_its_gradient_are_those_of_the_slow_twin(kernels, shape):
    arrays = inputs(**shape)
    for found, expected in zip(value_and_gradients(kernels, *arrays), value_and_gradients(SLOW, *arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [tiles(32), TRITON, SPLASH])
def test_packed_attention_in_bfloat16_is_near_the_slow_twin(kernels):
    arrays = inputs(dtype=jnp.bfloat16)
    found, expected = (value_and_gradients(form, *arrays)[0].astype(jnp.float32) for form in (kernels, SLOW))
    assert jnp.abs(found - expected).mean() < 1e-3  # a bfloat16 near 1 has steps of 4e-3
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("kernels", [PLAIN, tiles(32), tiles(64, 32), tiles(32, 64), TRITON, SPLASH])
def test_another_segment_does_not_move_a_token_by_one_bit(kernels):
    """Rows [A | D]: A changes, and D's outputs and the gradients of D's inputs are what they were."""
    query, key, value, _ = inputs(rows=1)
    segments = jnp.asarray(np.repeat([[1, 2]], [50, 78], axis=1), jnp.int32)
    of_d = lambda arrays: [np.asarray(array[:, 50:]) for array in arrays]  # noqa: E731
    before = of_d(value_and_gradients(kernels, query, key, value, segments))
    query, key, value = (array.at[:, :50].add(100.0) for array in (query, key, value))
    for found, expected in zip(of_d(value_and_gradients(kernels, query, key, value, segments)), before, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kernels", [PLAIN, TRITON, SPLASH])
def test_on_several_devices_a_kernel_works_on_rows_and_heads_of_its_own(kernels):
    query, key, value, segments = inputs(rows=2, length=128)
    rows = jax.device_put((query, key, value), jax.NamedSharding(MANY, attention.ROW_HEADS))
    segments = jax.device_put(segments, jax.NamedSharding(MANY, sharding.ROWS))
    found = value_and_gradients(dataclasses.replace(kernels, mesh=MANY), *rows, segments)
    assert found[0].sharding.spec[2] == "tensor"
    for got, expected in zip(found, value_and_gradients(SLOW, query, key, value, segments), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_causal_attention_is_packed_attention_of_one_segment():
    query, key, value, segments = inputs()
    expected = packed_attention(query, key, value, jnp.ones_like(segments))
    np.testing.assert_array_equal(causal_attention(query, key, value), expected)
    np.testing.assert_allclose(causal_attention(query, key, value, SPLASH), expected, atol=1e-5)


def one_piece(layout: CacheLayout, key_SCKH: jax.Array, value_SCKH: jax.Array) -> LayerCache:
    return ((jnp.einsum(f"sckh->{layout.keys}", key_SCKH), jnp.einsum(f"sckh->{layout.values}", value_SCKH)),)


@pytest.mark.parametrize(("length", "size"), [(64, 16), (384, 64), (2048, 32)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_decoding_by_kernel_is_decoding_in_the_plain_form(length, size, kv_heads):
    _, key, value, _ = inputs(rows=4, length=length, kv_heads=kv_heads, size=size)
    query = jax.random.normal(jax.random.key(1), (4, 4, size))
    positions = jnp.array([0, length // 3, length - 1, length])  # the last: a free slot, outside the cache
    lengths = []

    def run(query, keys, values, lengths_S):
        lengths.append(lengths_S.tolist())
        return TRITON.decode.run(query, keys, values, lengths_S)

    decode = functools.partial(decode_attention, positions_S=positions, attended=length)
    expected = decode(query, one_piece(IN_PIECES, key, value))
    cached = one_piece(HEADS_FIRST, key, value)
    counted = dataclasses.replace(TRITON, decode=dataclasses.replace(TRITON.decode, run=run))
    np.testing.assert_allclose(decode(query, cached, kernels=counted)[:3], expected[:3], atol=1e-5)
    assert lengths == [[1, length // 3 + 1, length, 1]]  # what a free slot gets nobody reads
    query, cached = jax.tree.map(lambda array: array.astype(jnp.bfloat16), (query, cached))
    found = decode(query, cached, kernels=TRITON).astype(jnp.float32)
    np.testing.assert_allclose(found[:3], expected[:3], atol=3e-2)


def test_decoding_in_the_plain_form_looks_at_the_attended_tokens_only():
    query, key, value, _ = inputs(length=64, size=16)
    positions = jnp.array([3, 15])
    found, expected = (
        decode_attention(query[:, 0], one_piece(IN_PIECES, keys, value), positions, attended=16)
        for keys in (key.at[:, 16:].set(jnp.nan), key)
    )
    np.testing.assert_array_equal(found, expected)


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize(
    ("platform", "kernels", "size", "call"),
    [
        ("cuda", attention_kernels.gpu_kernels(ONE, longest_head=128), 64, "triton"),
        ("cuda", attention_kernels.gpu_kernels(MANY, longest_head=128), 128, "triton"),
        ("tpu", attention_kernels.tpu_kernels(ONE), 64, "tpu_custom_call"),
        ("tpu", attention_kernels.tpu_kernels(MANY), 128, "tpu_custom_call"),
    ],
)
def test_packed_attention_and_its_gradient_lower_for_the_backend(platform, kernels, size, call):
    rows, keys = bfloat16(2, 512, 4, size), bfloat16(2, 512, 2, size)
    traced = value_and_gradients.trace(kernels, rows, keys, keys, jax.ShapeDtypeStruct((2, 512), jnp.int32))
    assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) >= 2  # forward, backward


@pytest.mark.parametrize("mesh", [ONE, MANY], ids=["one device", "data and tensor"])
def test_decode_attention_lowers_for_cuda_and_tpu_and_causal_attention_for_tpu(mesh):
    gpu, tpu = attention_kernels.gpu_kernels(mesh, longest_head=128), attention_kernels.tpu_kernels(mesh)
    for platform, kernels, call in (("cuda", gpu, "triton"), ("tpu", tpu, "tpu_custom_call")):
        decode = jax.jit(functools.partial(decode_attention, attended=1024, kernels=kernels))
        axes, sizes = kernels.cache, {"s": 4, "k": 2, "c": 1024, "h": 64}
        cache = tuple(bfloat16(*(sizes[axis] for axis in order)) for order in (axes.keys, axes.values))
        traced = decode.trace(bfloat16(4, 4, 64), (cache,), jnp.zeros(4, jnp.int32))
        assert (call in traced.lower(lowering_platforms=(platform,)).as_text()) == (platform == "cuda")  # a TPU: plain
    causal = jax.jit(functools.partial(causal_attention, kernels=tpu))
    traced = causal.trace(bfloat16(2, 256, 4, 64), bfloat16(2, 256, 2, 64), bfloat16(2, 256, 2, 64))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_the_model_asks_its_kernels_for_packed_rows():
    config = TransformerConfig(vocab_size=32, d_model=16, layers=2, heads=4, kv_heads=2, head_size=16, d_ff=32)
    params = init_params(config, jax.random.key(0))
    tokens = jnp.arange(64)[None] % 32
    row = tokens, tokens, jnp.asarray(np.repeat([[1, 2]], [20, 44], axis=1), jnp.int32)
    expected = bind(graph(config), params)(*row)
    np.testing.assert_allclose(bind(graph(config, TRITON), params)(*row), expected, atol=1e-5)


# What a kernel does not take.


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "reason"),
    [
        ("packed", (2, 256, 4, 64), jnp.float32, "16-bit numbers only, and queries are float32"),
        ("packed", (2, 200, 4, 64), jnp.bfloat16, "multiples of 128 tokens, or 32 or 64, and this one has 200"),
        ("packed", (2, 16, 4, 64), jnp.bfloat16, "multiples of 128 tokens, or 32 or 64, and this one has 16"),
        ("packed", (2, 256, 4, 8), jnp.bfloat16, "16 numbers or more, and the model's have 8"),
        ("packed", (2, 256, 4, 80), jnp.bfloat16, ""),
        ("packed", (2, 64, 4, 64), jnp.bfloat16, ""),
        ("causal", (2, 200, 4, 192), jnp.bfloat16, "multiples of 8 up to 128 on this GPU, and the model's have 192"),
        ("causal", (2, 200, 4, 60), jnp.bfloat16, "multiples of 8 up to 128 on this GPU, and the model's have 60"),
        ("causal", (2, 200, 4, 64), jnp.float32, "16-bit numbers only"),
        ("causal", (2, 200, 4, 64), jnp.bfloat16, ""),
        ("decode", (2, 4, 200, 64), jnp.bfloat16, "generation.length_buckets end at 200"),
        ("decode", (2, 4, 256, 80), jnp.bfloat16, "a power of two from 16 on as size, and the model's have 80"),
        ("decode", (2, 4, 256, 64), jnp.bfloat16, ""),
        ("decode", (2, 4, 64, 16), jnp.float16, ""),
    ],
)
def test_a_gpu_kernel_says_what_it_does_not_take(kernel, shape, dtype, reason):
    key = jax.ShapeDtypeStruct(shape, dtype)
    query = jax.ShapeDtypeStruct((*shape[:2], shape[3]), dtype) if kernel == "decode" else key
    refusal = getattr(attention_kernels.gpu_kernels(ONE, longest_head=128), kernel).refusal(query, key)
    assert reason in refusal and bool(reason) == bool(refusal)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 200, 4, 64), jnp.bfloat16, "multiples of 128 tokens, and this one has 200"),
        ((2, 256, 4, 80), jnp.bfloat16, "multiples of 64, and the model's have 80"),
        ((2, 256, 4, 64), jnp.float32, "16-bit numbers only"),
        ((2, 256, 4, 64), jnp.bfloat16, ""),
    ],
)
def test_splash_attention_says_what_it_does_not_take(shape, dtype, reason):
    array = jax.ShapeDtypeStruct(shape, dtype)
    for kernel in (attention_kernels.tpu_kernels(ONE).packed, attention_kernels.tpu_kernels(ONE).causal):
        refusal = kernel.refusal(array, array)
        assert reason in refusal and bool(reason) == bool(refusal)
    assert attention_kernels.tpu_kernels(ONE).decode is None


def test_what_a_kernel_does_not_take_is_computed_in_the_plain_form_and_said_once(caplog):
    attention._log_refusal.cache_clear()
    query, key, value, segments = inputs(length=48)
    kernels = attention_kernels.gpu_kernels(ONE, longest_head=128)  # would fail on a CPU
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = packed_attention(query, key, value, segments, kernels)
    np.testing.assert_array_equal(found, packed_attention(query, key, value, segments))
    assert [record.message for record in caplog.records] == [
        "attention: the plain form instead of Pallas mha, as its rows are multiples of 128 tokens, or 32 or 64, and "
        "this one has 48"
    ]


class Device:
    """What JAX says of a device, as far as the choice of kernels asks."""

    def __init__(self, number: int, platform: str, version: str = "", capability: str = ""):
        self.id, self.process_index, self.platform, self.device_kind = number, 0, platform, platform
        self.client = types.SimpleNamespace(platform_version=version)
        if capability:  # other devices have no such thing
            self.compute_capability = capability


def mesh_of(*device: str, tensor: int) -> jax.sharding.Mesh:
    devices = np.array([Device(number, *device) for number in range(tensor)]).reshape(1, 1, tensor)
    return jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))


CUDA = "PJRT C API\ncuda 12090"


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_choice_of_kernels_is_that_of_the_devices_backend(tensor):
    large = attention_kernels.LARGE_TILE
    for choice, device, names, tile in (
        ("auto", ("gpu", CUDA, "9.0"), ["cuDNN flash attention", "Pallas mha", "Pallas gqa"], large),
        ("auto", ("gpu", "PJRT C API\nrocm 60300", "gfx942"), [None, None, None], large),
        ("auto", ("tpu",), ["splash attention", "splash attention", None], large),
        ("plain", ("gpu", CUDA, "9.0"), [None, None, None], large),
        ("plain", ("tpu",), [None, None, None], large),
        ("auto", ("cpu",), [None, None, None], Kernels().tile),
        ("plain", ("cpu",), [None, None, None], Kernels().tile),
    ):
        mesh = mesh_of(*device, tensor=tensor)
        found = attention_kernels.kernels_for(choice, mesh)
        kernels = (found.causal, found.packed, found.decode)
        assert [kernel and kernel.name for kernel in kernels] == names, (choice, device)
        assert (found.mesh, found.tile) == (mesh, tile)
        assert found.cache == (HEADS_FIRST if found.decode else IN_PIECES)


@pytest.mark.parametrize(("capability", "longest"), [("8.0", 128), ("9.0", 256), ("10.0", 256)])
def test_the_longest_head_that_cudnn_gets_is_that_of_the_gpu(capability, longest):
    causal = attention_kernels.kernels_for("auto", mesh_of("gpu", CUDA, capability, tensor=1)).causal
    for size, taken in ((longest, True), (longest + 8, False)):
        assert (causal.refusal(bfloat16(1, 64, 4, size), bfloat16(1, 64, 2, size)) == "") == taken


# Long rows.


def long_rows(length: int):
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    return value_and_gradients.lower(PLAIN, *shapes, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()


def test_memory_of_a_long_row_grows_with_the_row_and_not_with_its_square():
    taken = {length: long_rows(length).memory_analysis().temp_size_in_bytes for length in (8192, 16384, 32768)}
    heads, size = 4 + 2 + 2, 16
    row = 4 * 32768 * heads * size  # queries, keys and values, float32
    assert taken[32768] < 2.1 * taken[16384] < 2.1**2 * taken[8192]
    assert taken[32768] < 8 * row < 4 * 4 * 32768**2 / 100  # bytes of the scores of four heads


def test_a_tile_without_a_visible_key_costs_nothing():
    """The loop over tiles of keys begins where the oldest segment of the queries does."""
    segments = jnp.asarray(np.repeat([[1, 2, 3]], [70, 58, 128], axis=1))
    begins = tiled_attention._begins(segments, Tile(64, 64))[0]
    assert begins[np.array([0, 69, 70, 127, 128, 255])].tolist() == [0, 0, 70, 70, 128, 128]
    query, key, value, _ = inputs(rows=1, length=256)
    poisoned = [array.at[:, :128].set(jnp.nan) for array in (key, value)]  # NaN times a weight of 0 is NaN
    found = packed_attention(query, *poisoned, segments, tiles(64))
    assert not jnp.any(jnp.isnan(found[:, 128:])) and jnp.all(jnp.isnan(found[:, :128]))


def test_long_rows_of_large_heads_go_in_large_tiles():
    """As `bench_trainer --parts=tiles` found them fastest; short rows would compute more of what is hidden."""
    assert tiled_attention.tile_for(2048, 64) == Tile(256, 128)
    assert tiled_attention.tile_for(2047, 64) == tiled_attention.tile_for(8192, 32) == Tile(64, 64)
