"""A server whose heads are split over several devices is the server on one: tokens, log-probabilities, swaps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import compilation
from areal_jax.generation import placement
from areal_jax.generation.engine import Engine, EngineOptions, Weights, empty_requests
from areal_jax.models.transformer import TransformerConfig, init_params

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = TransformerConfig(
    vocab_size=32, d_model=16, layers=2, heads=8, kv_heads=4, head_size=8, d_ff=32, qk_norm=True, qkv_bias=True
)
TIED = TransformerConfig(
    vocab_size=30,
    padded_vocab=32,
    d_model=16,
    layers=1,
    heads=4,
    kv_heads=4,
    head_size=8,
    d_ff=32,
    tied_embeddings=True,
)
WIDE = dataclasses.replace(TIED, heads=8, kv_heads=8)
PROMPTS = [np.array([1, 2, 3], np.int32), np.arange(4, 15, dtype=np.int32)]


def engine_of(tensor: int, config: TransformerConfig = CONFIG, **options) -> Engine:
    sizes = {"slots": 4, "max_length": 48, "decode_steps": 4, "prefill_rows": 2, "length_buckets": (16, 48)}
    return Engine(config, EngineOptions(**sizes | options, tensor=tensor))


def weights_of(engine: Engine, version: int, *, dtype=np.float32, scale=1) -> Weights:
    params = init_params(engine.config, jax.random.key(version))
    return engine.load({name: np.asarray(scale * array).astype(dtype) for name, array in params.items()}, version)


def run(engine: Engine, **weights) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of two slots: eight under the first weights, eight more after a recompute."""
    old, new = (weights_of(engine, version, **weights) for version in (1, 2))
    requests = empty_requests(engine.options.slots)
    for row, slot in enumerate((2, 0)):
        requests.row[slot], requests.uid[slot], requests.limit[slot] = row, row, 48
        requests.length[slot] = requests.prompt_length[slot] = len(PROMPTS[row])
    state = engine.start(engine.init_decode_state(), engine.prefill_rows(old, PROMPTS), requests)
    made = []
    for weights, longest in ((old, 16), (old, 20), (new, 24), (new, 28)):
        if longest == 24:
            state = engine.recompute(new, state, [0, 2], [20, 20])
        state, decoded = engine.decode(weights, state, longest)
        made.append(decoded)
    return (
        np.concatenate([np.asarray(decoded.tokens)[[0, 2]] for decoded in made], axis=1),
        np.concatenate([np.asarray(decoded.logprobs)[[0, 2]] for decoded in made], axis=1),
    )


# At scale 3 most log-probabilities are near 0 or below -5: logits are some ten times as large, and so is rounding.
@pytest.mark.parametrize(
    ("config", "tensor", "scale", "atol"),
    [(CONFIG, 2, 1, 1e-5), (CONFIG, 2, 3, 1e-4), (CONFIG, 4, 1, 1e-5), (TIED, 2, 3, 1e-4), (WIDE, 8, 1, 1e-5)],
)
def test_more_devices_give_the_same_tokens_and_logprobs_across_a_swap(config, tensor, scale, atol):
    tokens, logprobs = run(engine_of(1, config), scale=scale)
    split_tokens, split_logprobs = run(engine_of(tensor, config), scale=scale)
    np.testing.assert_array_equal(split_tokens, tokens)
    np.testing.assert_allclose(split_logprobs, logprobs, atol=atol)


def collectives(text: str) -> dict[str, list[tuple[int, ...]]]:
    """Kind -> shapes of the results of the collectives in a compiled program."""
    found: dict[str, list[tuple[int, ...]]] = {}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line):
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found.setdefault(match[2], []).append(tuple(int(n) for n in shape.split(",") if n))
    return found


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_a_decode_step_sums_twice_per_layer_and_gathers_its_logits_only(config):
    engine = engine_of(2, config)
    weights, state = weights_of(engine, 1), engine.init_decode_state()
    slots = np.arange(engine.options.slots, dtype=np.int32)
    compiled = engine._decode.lower(weights.params, state, slots, attended=16, steps=4).compile()
    found = collectives(compiled.as_text())
    S, V, D = engine.options.slots, config.vocab_rows, config.d_model
    assert [int(np.prod(shape)) for shape in found.pop("all-reduce")] == [S * D] * (2 * config.layers + 1)
    assert {tuple(sorted(shape)) for shape in found.pop("all-gather")} == {tuple(sorted((S, V)))}
    assert not found
    alias = compiled.memory_analysis().alias_size_in_bytes
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert alias >= 0.9 * held  # donated: the cache stays in its place


def test_every_device_holds_its_heads_of_cache_and_weights():
    engine = engine_of(4)
    weights, state = weights_of(engine, 1), engine.init_decode_state()
    shapes = {shard.data.shape for array in jax.tree.leaves(state.cache) for shard in array.addressable_shards}
    assert shapes == {(4, 1, 8, 16), (4, 1, 16, 8), (4, 1, 8, 32), (4, 1, 32, 8)}  # to token 16, and on to token 48
    assert {shard.data.shape for shard in state.tokens.addressable_shards} == {(4, 48)}
    shapes = {name: weights.params[name].addressable_shards[0].data.shape for name in weights.params}
    assert shapes["layers.0.attention.query.kernel"] == (16, 2, 8)
    assert shapes["layers.1.attention.key.kernel"] == (16, 1, 8)
    assert shapes["layers.1.feed_forward.down.kernel"] == (8, 16)
    assert shapes["embedding"] == (8, 16)
    assert {name: place.sharding for name, place in engine.places.items()} == {
        name: array.sharding for name, array in weights.params.items()
    }


def test_weights_that_are_in_their_places_are_taken_without_a_copy():
    engine = engine_of(2)
    placed = weights_of(engine, 1).params
    taken = engine.load(placed, 2).params
    for name, array in placed.items():
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        assert pointers == [shard.data.unsafe_buffer_pointer() for shard in taken[name].addressable_shards]


def test_nothing_compiles_after_warm_up_on_several_devices():
    engine = engine_of(2)
    engine.warm_up(weights_of(engine, 1))
    weights_of(engine, 2)
    warm = compilation.count()
    run(engine)
    assert compilation.count() == warm


@pytest.mark.parametrize("tensor", [1, 2])
def test_bfloat16_weights_give_logprobs_of_float32_logits(tensor):
    """In bfloat16 a log-probability of -3 has steps of 1/64; those of float32 logits lie between them."""
    engine = engine_of(tensor, dtype="bfloat16")
    assert {place.dtype for place in engine.places.values()} == {jnp.bfloat16.dtype}
    tokens, logprobs = run(engine, dtype=jnp.bfloat16)
    assert logprobs.dtype == np.float32
    assert (logprobs != logprobs.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.9
    exact_tokens, exact = run(engine_of(tensor))
    same = (tokens == exact_tokens).cumprod(axis=1).astype(bool)[:, :8]
    assert same[:, 0].all()
    np.testing.assert_allclose(logprobs[:, :8][same], exact[:, :8][same], atol=0.4)


@pytest.mark.parametrize(
    ("config", "tensor", "message"),
    [
        (CONFIG, 8, r"generation.tensor=8 must divide the model's 4 key/value heads.* split by 1, 2, 4"),
        (CONFIG, 3, r"generation.tensor=3 must divide the model's 8 attention heads"),
        (CONFIG, 16, r"generation.tensor=16 .* this process has 8; set it to at most 8"),
    ],
)
def test_a_split_that_cannot_be_is_refused(config, tensor, message):
    with pytest.raises(ValueError, match=message):
        engine_of(tensor, config)


def test_a_vocabulary_that_does_not_divide_is_named():
    uneven = TransformerConfig(vocab_size=31, d_model=16, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=32)
    with pytest.raises(ValueError, match="generation.tensor=2 must divide the model's 31 rows of the vocabulary"):
        placement.make_mesh(uneven, 2, jax.devices())
