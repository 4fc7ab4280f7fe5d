"""A bfloat16 engine on the CPU: keys and values are bfloat16 numbers, kept as float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.generation import placement
from areal_jax.generation.engine import Engine, EngineOptions, empty_requests
from areal_jax.models.transformer import TransformerConfig, init_params

SMALL = TransformerConfig(vocab_size=96, d_model=32, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=64)


def test_only_a_cpu_keeps_bfloat16_numbers_as_float32():
    exact = dataclasses.replace(SMALL, kernels="batch_invariant")
    dtypes = {platform: placement.cache_dtype(SMALL, "bfloat16", platform) for platform in ("cpu", "gpu", "tpu")}
    assert dtypes == {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
    assert placement.cache_dtype(SMALL, "float32", "gpu") == "float32"
    assert placement.cache_dtype(exact, "bfloat16", "cpu") == "bfloat16"


def test_prefilled_and_decoded_keys_and_values_are_bfloat16_numbers():
    options = EngineOptions(slots=2, max_length=8, decode_steps=4, length_buckets=(8,), dtype="bfloat16")
    engine = Engine(SMALL, options, devices=jax.devices()[:1])
    weights = engine.load(init_params(SMALL, jax.random.key(0)), version=0)
    requests = empty_requests(2)
    requests.row[0], requests.length[0], requests.prompt_length[0], requests.limit[0] = 0, 3, 3, 8
    state = engine.start(
        engine.init_decode_state(), engine.prefill_rows(weights, [np.array([5, 6, 7], np.int32)]), requests
    )
    state, decoded = engine.decode(weights, state, 8)
    assert decoded.count[0] == 4
    for layer in state.cache.layers:
        for array in jax.tree.leaves(layer):
            assert array.dtype == jnp.float32 and np.count_nonzero(array[0]) >= 6 * 2 * 8  # 6 tokens were fed
            np.testing.assert_array_equal(array, array.astype(jnp.bfloat16).astype(jnp.float32))
