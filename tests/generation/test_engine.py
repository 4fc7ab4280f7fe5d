"""The engine's numbers: what it samples, records and rebuilds, against a fresh forward pass of the whole sequence."""

import jax
import numpy as np
import pytest

from areal_jax import compilation
from areal_jax.generation.engine import DecodeState, Engine, EngineOptions, Weights, empty_requests
from areal_jax.models.transformer import TransformerConfig, init_params
from tests.full_forward import full_logprobs

CONFIG = TransformerConfig(vocab_size=32, d_model=16, layers=2, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True)
OPTIONS = EngineOptions(slots=4, max_length=48, decode_steps=4, prefill_rows=2, length_buckets=(16, 48))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(CONFIG, OPTIONS)


def weights_of(engine: Engine, seed: int) -> Weights:
    params = init_params(CONFIG, jax.random.key(seed))
    return engine.load({name: 3 * array for name, array in params.items()}, version=seed)  # sharp: errors show


def admit(engine: Engine, weights: Weights, state: DecodeState, prompts, slots, *, limit=48, temperature=1.0, stop=-1):
    requests = empty_requests(OPTIONS.slots)
    for row, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        requests.row[slot], requests.length[slot], requests.prompt_length[slot] = row, len(prompt), len(prompt)
        requests.limit[slot], requests.temperature[slot] = limit, temperature
        requests.uid[slot], requests.stop_tokens[slot, 0] = row, stop
    return engine.start(state, engine.prefill_rows(weights, prompts), requests)


PROMPTS = [np.array([1, 2, 3], np.int32), np.arange(4, 15, dtype=np.int32)]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_recorded_logprobs_are_those_of_a_full_forward(engine, temperature):
    weights = weights_of(engine, 1)
    state = admit(engine, weights, engine.init_decode_state(), PROMPTS, [2, 0], temperature=temperature)
    made: dict[int, list[float]] = {0: [], 2: []}
    for longest in (16, 20, 24):
        state, decoded = engine.decode(weights, state, longest)
        for slot in made:
            made[slot] += list(np.asarray(decoded.logprobs)[slot, : decoded.count[slot]])
    for prompt, slot in zip(PROMPTS, [2, 0], strict=True):
        tokens = np.asarray(state.tokens)[slot, : len(prompt) + 12]
        np.testing.assert_allclose(
            made[slot], full_logprobs(CONFIG, weights.params, tokens, temperature)[len(prompt) - 1 :], atol=2e-5
        )


def test_recompute_gives_the_cache_of_the_new_weights(engine):
    old, new = weights_of(engine, 1), weights_of(engine, 2)
    state = admit(engine, old, engine.init_decode_state(), PROMPTS, [1, 3])
    state, _ = engine.decode(old, state, 16)
    before = np.asarray(state.length)
    state = engine.recompute(new, state, [1, 3], [15, 15])
    state, decoded = engine.decode(new, state, 20)
    for slot in (1, 3):
        tokens = np.asarray(state.tokens)[slot, : before[slot] + 4]
        expected = full_logprobs(CONFIG, new.params, tokens)[before[slot] - 1 :]
        np.testing.assert_allclose(np.asarray(decoded.logprobs)[slot], expected, atol=2e-5)


def test_without_recompute_the_old_cache_shows(engine):
    old, new = weights_of(engine, 1), weights_of(engine, 2)
    state = admit(engine, old, engine.init_decode_state(), PROMPTS, [1, 3])
    state, _ = engine.decode(old, state, 16)
    before = int(state.length[3])
    state, decoded = engine.decode(new, state, 20)
    expected = full_logprobs(CONFIG, new.params, np.asarray(state.tokens)[3, : before + 4])[before - 1 :]
    assert np.abs(np.asarray(decoded.logprobs)[3] - expected).max() > 1e-3


def test_recompute_leaves_other_slots_alone(engine):
    weights = weights_of(engine, 1)
    state = admit(engine, weights, engine.init_decode_state(), PROMPTS, [1, 3])
    kept = [np.asarray(array)[[0, 1, 2]] for array in jax.tree.leaves(state.cache)]
    state = engine.recompute(weights_of(engine, 2), state, [3], [12])
    for array, expected in zip(jax.tree.leaves(state.cache), kept, strict=True):
        np.testing.assert_array_equal(np.asarray(array)[[0, 1, 2]], expected)


def test_tokens_do_not_depend_on_slot_or_company(engine):
    weights = weights_of(engine, 1)
    alone = admit(engine, weights, engine.init_decode_state(), PROMPTS[:1], [0])
    alone, _ = engine.decode(weights, alone, 48)
    together = admit(engine, weights, engine.init_decode_state(), PROMPTS, [3, 1])
    together, _ = engine.decode(weights, together, 48)
    np.testing.assert_array_equal(alone.tokens[0, :7], together.tokens[3, :7])


def test_a_sequence_ends_at_its_limit_and_makes_not_one_token_more(engine):
    weights = weights_of(engine, 1)
    state = admit(engine, weights, engine.init_decode_state(), PROMPTS[:1], [0], limit=5)
    state, decoded = engine.decode(weights, state, 16)
    assert decoded.count[0] == 2 and not decoded.active[0] and state.length[0] == 5
    assert (np.asarray(state.tokens)[0, 5:] == 0).all()


def test_a_dispatch_ends_with_the_step_in_which_its_last_sequence_does(engine):
    weights = weights_of(engine, 1)
    prompts = [np.arange(9, dtype=np.int32), np.arange(11, dtype=np.int32)]
    state = admit(engine, weights, engine.init_decode_state(), prompts, [0, 3], limit=12)
    state, decoded = engine.decode(weights, state, 16)
    assert decoded.count.tolist() == [3, 0, 0, 1] and not np.asarray(decoded.active).any()
    drawn_T = (np.asarray(decoded.logprobs) != 0).any(axis=0)  # each step that runs draws a token for every slot
    assert drawn_T.tolist() == [True, True, True, False]


def test_a_sequence_may_fill_its_cache_to_the_last_token(engine):
    weights = weights_of(engine, 1)
    prompt = np.arange(46, dtype=np.int32) % 32
    state = admit(engine, weights, engine.init_decode_state(), [prompt], [0], limit=48)
    state, decoded = engine.decode(weights, state, 48)
    assert decoded.count[0] == 2
    expected = full_logprobs(CONFIG, weights.params, np.asarray(state.tokens)[0])[45:]
    np.testing.assert_allclose(np.asarray(decoded.logprobs)[0, :2], expected, atol=2e-5)


def test_a_stop_token_ends_the_sequence_and_is_part_of_it(engine):
    weights = weights_of(engine, 1)
    state = admit(engine, weights, engine.init_decode_state(), PROMPTS[:1], [0], temperature=0.0)
    state, decoded = engine.decode(weights, state, 16)
    greedy = list(np.asarray(decoded.tokens)[0])
    state = admit(engine, weights, engine.init_decode_state(), PROMPTS[:1], [0], temperature=0.0, stop=greedy[1])
    state, decoded = engine.decode(weights, state, 16)
    assert decoded.count[0] == greedy.index(greedy[1]) + 1 and not decoded.active[0]


def test_nothing_compiles_after_warm_up():
    engine = Engine(CONFIG, OPTIONS)
    weights, reported = weights_of(engine, 1), []
    engine.warm_up(weights, lambda *counts: reported.append(counts))
    assert reported == [(0, 2), (1, 2), (2, 2)]  # of length buckets
    state = engine.init_decode_state()
    warm = compilation.count()
    state = admit(engine, weights, state, PROMPTS, [2, 0])
    state, _ = engine.decode(weights, state, 16)
    state = engine.recompute(weights, state, [2], [9])
    state, _ = engine.decode(weights, state, 48)
    state = admit(engine, weights, engine.deactivate(state, [0]), PROMPTS[:1], [0])
    state, _ = engine.decode(weights, state, 16)
    jax.block_until_ready(state)
    assert compilation.count() == warm


def test_buckets_that_end_below_the_longest_sequence_are_refused():
    with pytest.raises(ValueError, match="add a bucket of at least 48"):
        Engine(CONFIG, EngineOptions(slots=1, max_length=48, length_buckets=(16, 32)))


def test_more_alternatives_than_there_are_tokens_are_refused():
    with pytest.raises(ValueError, match=f"top_logprobs={CONFIG.vocab_size + 1} is more than the {CONFIG.vocab_size} "):
        Engine(CONFIG, EngineOptions(slots=1, max_length=48, top_logprobs=CONFIG.vocab_size + 1))
