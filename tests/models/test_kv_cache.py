"""The cache holds what was written, in every layout, and attention over its pieces is attention over one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import kv_cache
from areal_jax.models.attention import PLAIN, decode_attention
from areal_jax.models.kv_cache import HEADS_FIRST, IN_PIECES, TOKENS_FIRST, CacheLayout, KVCache, LayerCache

pytestmark = pytest.mark.usefixtures("quickly_compiled")

S, K, H, ENDS = 3, 2, 4, (5, 8, 16)
LAYOUTS = (IN_PIECES, HEADS_FIRST, TOKENS_FIRST)


def empty(layout: CacheLayout, ends: tuple[int, ...] = ENDS, layers: int = 2) -> KVCache:
    return kv_cache.init_cache(layout, ends, "float32", layers=layers, slots=S, heads=K, head_size=H)


def as_tokens(layout: CacheLayout, layer: LayerCache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [S, C, K, H] of a layer."""
    keys, values = (
        np.concatenate([np.einsum(f"{axes}->sckh", np.asarray(piece[place])) for piece in layer], axis=1)
        for place, axes in enumerate((layout.keys, layout.values))
    )
    return keys, values


def rows_of(length: int, rows: int = 2) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values [B, L, K, H] of two layers, all different."""
    numbers = jnp.arange(4 * rows * length * K * H, dtype=jnp.float32).reshape(2, 2, rows, length, K, H)
    return [(1 + keys, -1 - values) for keys, values in numbers]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [3, 5, 7, 16])
def test_rows_come_to_their_slots_and_other_slots_keep_what_they_have(layout, length):
    rows = rows_of(length)
    cache = kv_cache.write_rows(layout, empty(layout), rows_of(16, rows=1), jnp.array([-1, 0, -1]))
    cache = kv_cache.write_rows(layout, cache, rows, jnp.array([1, -1, 1]))
    for layer, new, old in zip(cache.layers, rows, rows_of(16, rows=1), strict=True):
        for found, row, kept in zip(as_tokens(layout, layer), new, old, strict=True):
            for slot in (0, 2):
                np.testing.assert_array_equal(found[slot, :length], row[1])
                assert not found[slot, length:].any()
            np.testing.assert_array_equal(found[1], kept[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_is_written_at_its_position_and_outside_nowhere(layout):
    key, value = jnp.arange(1.0, 1 + 2 * S * K * H).reshape(2, S, K, H)
    layer = layout.with_token(empty(layout).layers[0], key, value, jnp.array([4, 5, 16]), 8)
    keys, values = as_tokens(layout, layer)
    for found, new in ((keys, key), (values, value)):
        np.testing.assert_array_equal(found[0, 4], new[0])
        np.testing.assert_array_equal(found[1, 5], new[1])
        found[0, 4] = found[1, 5] = 0
        assert not found.any()


@pytest.mark.parametrize("layout", [HEADS_FIRST, TOKENS_FIRST, CacheLayout("skhc", "skch")])
@pytest.mark.parametrize("attended", [5, 8, 10, 16])
def test_attention_over_pieces_is_attention_over_one(layout, attended):
    query = jax.random.normal(jax.random.key(0), (S, 2 * K, H))
    key, value = jax.random.normal(jax.random.key(1), (2, S, 16, K, H))
    positions = jnp.array([0, 4, attended - 1])
    found, expected = (
        decode_attention(
            query,
            kernels.cache.of_rows(key, value, like=empty(kernels.cache).layers[0]),
            positions,
            attended=attended,
            kernels=kernels,
        )
        for kernels in (PLAIN, dataclasses.replace(PLAIN, cache=layout))
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_there_is_a_piece_per_bucket_where_the_layout_has_pieces():
    assert [IN_PIECES.length(piece) for piece in empty(IN_PIECES).layers[1]] == [5, 3, 8]
    assert [HEADS_FIRST.length(piece) for piece in empty(HEADS_FIRST).layers[1]] == [16]
