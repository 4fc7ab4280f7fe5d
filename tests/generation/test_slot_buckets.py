"""Decoding of few slots by the narrow step gives what the wide one gives, and leaves every other slot as it is."""

import jax
import numpy as np
import pytest

from areal_jax import compilation
from areal_jax.generation.buckets import default_slot_buckets
from areal_jax.generation.engine import Engine, EngineOptions, empty_requests
from areal_jax.models.transformer import init_params
from tests.generation.by_hand import CONFIG, ByHand, prompt_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

OPTIONS = EngineOptions(slots=8, max_length=64, decode_steps=2, length_buckets=(24, 64), slot_buckets=(2, 8))


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, OPTIONS)


def test_the_narrow_step_gives_the_tokens_of_the_wide_one_and_changes_no_other_slot(engine):
    weights = engine.load(init_params(CONFIG, jax.random.key(0)), 1)
    requests = empty_requests(8)
    for slot in range(6):
        requests.row[slot], requests.uid[slot], requests.limit[slot] = slot, slot, 40
        requests.length[slot] = requests.prompt_length[slot] = 9 + slot
    made = []
    for running in ([5, 2], None):
        state = engine.start(
            engine.init_decode_state(), engine.prefill_rows(weights, [prompt_of(9 + n) for n in range(6)]), requests
        )
        state = engine.deactivate(state, [0, 1, 3, 4])
        before = jax.device_get(state)
        for longest in (17, 19):
            state, decoded = engine.decode(weights, state, longest, running)
        made.append((jax.device_get(state), jax.device_get(decoded)))
    (narrow, decoded), (wide, expected) = made
    np.testing.assert_array_equal(narrow.tokens, wide.tokens)
    np.testing.assert_array_equal(
        decoded.tokens * (decoded.count > 0)[:, None], expected.tokens * (expected.count > 0)[:, None]
    )
    for name in ("length", "active"):
        np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name))
    assert decoded.count.tolist() == expected.count.tolist() == [0, 0, 2, 0, 0, 2, 0, 0]
    np.testing.assert_allclose(decoded.logprobs[[2, 5]], expected.logprobs[[2, 5]], atol=1e-6)
    others = [0, 1, 3, 4, 6, 7]
    for found, kept in zip(jax.tree.leaves(narrow), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found[others], kept[others])


def test_the_longest_answers_go_on_in_the_narrow_step_and_nothing_compiles(monkeypatch, engine):
    engine.warm_up(engine.load(init_params(CONFIG, jax.random.key(0)), 0))
    warm, slots, decode = compilation.count(), [], engine._decode
    watched = lambda *a, **k: slots.append(len(a[2])) or decode(*a, **k)  # noqa: E731
    monkeypatch.setattr(engine, "_decode", watched)
    hand = ByHand(engine)
    for uid, tokens in enumerate((4, 40, 4, 4, 6, 40, 4, 4)):
        hand.ask(uid, 9 + uid, tokens)
    hand.finish()
    assert set(slots[:2]) == {8} and set(slots[4:]) == {2}
    assert compilation.count() == warm
    hand.assert_exact()


def test_slot_buckets_by_default():
    assert default_slot_buckets(32, "cpu") == (8, 32)
    assert default_slot_buckets(16, "cpu") == (16,)
    assert default_slot_buckets(64, "gpu") == (64,)


def test_slot_buckets_must_end_with_all_slots():
    with pytest.raises(ValueError, match=r"slot_buckets=\(2, 4\) .* add 8"):
        Engine(CONFIG, EngineOptions(slots=8, max_length=64, slot_buckets=(2, 4)))
