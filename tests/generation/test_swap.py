"""Weight swaps in every situation that a slot can be in.

After a recompute every log-probability is that of a fresh forward of the whole sequence under the new weights, to 1e-5.
"""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import compilation
from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.models import decode, kv_cache
from areal_jax.models.kv_cache import IN_PIECES
from areal_jax.models.transformer import bind, graph
from areal_jax.types import Completion, Sampling
from tests.generation.by_hand import CONFIG, LENGTH, PARAMS, ByHand, forward_logprobs

pytestmark = pytest.mark.usefixtures("quickly_compiled")

OPTIONS = EngineOptions(slots=4, max_length=64, decode_steps=2, prefill_rows=2, length_buckets=(16, 32, 64))
ENGINE = Engine(CONFIG, OPTIONS)


@pytest.fixture
def hand() -> ByHand:
    return ByHand(ENGINE)


def ask_mixed(hand: ByHand) -> None:
    """A slot of one token beside one near the cache's end, and two between."""
    for uid, (length, new) in enumerate(((1, 20), (60, 4), (30, 9), (7, 30))):
        hand.ask(uid, length, new)


def test_recompute_is_exact_for_slots_of_very_different_lengths(hand):
    ask_mixed(hand)
    hand.turn()
    assert hand.update(1)
    hand.finish()
    hand.assert_exact()
    assert hand.versions(1) == [0, 0, 1, 1]
    assert hand.versions(0) == [0] * 2 + [1] * 18


def test_recompute_is_exact_between_prefill_and_the_first_token(hand):
    ask_mixed(hand)
    hand.admit()
    assert [hand.slot(uid).length for uid in range(4)] == [1, 60, 30, 7]  # the first one's cache is empty
    hand.update(1)
    hand.finish()
    hand.assert_exact()
    assert {version for uid in range(4) for version in hand.versions(uid)} == {1}


@pytest.mark.parametrize("first", ["request", "update"])
def test_recompute_is_exact_for_a_request_of_the_same_turn(hand, first):
    hand.ask(0, 9, 12)
    hand.turn()
    if first == "request":
        hand.ask(1, 20, 6)
        hand.update(1)
    else:
        hand.update(1)
        hand.ask(1, 20, 6)
    hand.finish()
    hand.assert_exact()
    assert hand.versions(1) == [1] * 6 and hand.versions(0) == [0] * 2 + [1] * 10


def test_recompute_is_exact_for_tempered_and_truncated_distributions(hand):
    limits = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.9, "min_p": 0.1}]
    for uid, each in enumerate(limits):
        hand.ask(uid, 5 + 10 * uid, 20, temperature=0.7, **each)
    hand.turn()
    hand.update(1)
    hand.finish()
    hand.assert_exact()
    for uid in range(4):
        assert hand.versions(uid) == [0] * 2 + [1] * 18
        tokens = np.concatenate([hand.known(uid, 0), hand.joined(uid, 0, "tokens")])
        whole = forward_logprobs(1, tokens, Sampling(20, temperature=0.7))[-18:]
        assert (hand.joined(uid, 0, "logprobs")[2:] - whole).min() > 0.01  # each of them had tokens that were barred


def test_recompute_is_exact_for_the_last_token_of_a_slot(hand):
    hand.ask(0, 61, 3)
    hand.ask(1, 5, 3)
    hand.turn()
    update = hand.update(1)
    hand.commands()
    assert update.done() and [hand.slot(uid).length for uid in (0, 1)] == [63, 7]  # one below their limits
    hand.finish()
    hand.assert_exact()
    assert hand.versions(0) == hand.versions(1) == [0, 0, 1]


def test_a_slot_whose_last_token_was_under_way_ends_under_the_old_weights(hand):
    hand.ask(0, 5, 2)
    hand.ask(1, 5, 6)
    hand.turn()
    assert hand.scheduler._pending is not None and not hand.chunks
    hand.update(1)
    hand.commands()
    assert hand.chunks[0, 0][-1].finish_reason == "length"
    assert hand.scheduler.status()["recomputed_tokens"] == 7  # of the other one
    waits, (swap,) = hand.scheduler.activity.take()
    assert not waits and (swap.version, swap.recomputed_tokens) == (1, 7) and 0 < swap.recompute_s <= swap.stall_s
    hand.finish()
    hand.assert_exact()
    assert hand.versions(0) == [0, 0] and hand.versions(1) == [0, 0, 1, 1, 1, 1]


def test_recompute_is_exact_after_two_updates_with_nothing_decoded_between(hand):
    ask_mixed(hand)
    hand.turn()
    first, second = hand.update(1), hand.update(2)
    hand.finish()
    assert first.done() and second.done() and hand.scheduler.status()["swaps"] == 2
    hand.assert_exact()
    assert set(hand.versions(0)) == {0, 2}


def test_recompute_is_exact_after_two_updates_before_the_first_token(hand):
    ask_mixed(hand)
    hand.admit()
    hand.update(1)
    hand.update(2)
    hand.finish()
    hand.assert_exact()
    assert set(hand.versions(3)) == {2}


@pytest.mark.parametrize("when", ["after its prefill", "in its turn"])
def test_recompute_is_exact_for_a_sample_that_goes_on_from_another_server(hand, when):
    tokens = np.array([5, 6, 7, 8, 9], np.int32)
    partial = {1: Completion(tokens, np.zeros(5, np.float32), np.zeros(5, np.int32), "")}
    hand.ask(0, 11, 9, samples=(0, 1, 2), partial=partial)
    if when == "after its prefill":
        hand.admit()
    hand.update(1)
    hand.finish()
    hand.assert_exact()
    assert hand.versions(0, 1) == [1] * 4 and hand.versions(0, 0) == [1] * 9


@pytest.mark.parametrize("first", ["cancel", "update"])
def test_recompute_is_exact_beside_a_cancelled_slot_and_in_it(hand, first):
    cancelled = hand.ask(0, 40, 20)
    hand.ask(1, 8, 20)
    hand.turn()
    index = next(i for i, slot in hand.scheduler._slots.items() if slot.ticket.request.uid == 0)
    if first == "cancel":
        hand.scheduler.cancel(cancelled)
        hand.update(1)
    else:
        hand.update(1)
        hand.scheduler.cancel(cancelled)
    hand.commands()
    assert hand.scheduler.status()["recomputed_tokens"] == (10 if first == "cancel" else 10 + 42)
    hand.ask(2, 3, 10, samples=range(3))
    hand.turn()
    assert hand.scheduler._slots[index].ticket.request.uid == 2
    hand.finish()
    hand.assert_exact()
    assert set(hand.versions(1)) == {0, 1} and set(hand.versions(2)) == {1}
    assert not hand.errors


def mixed_cache_logprobs(tokens: np.ndarray, under_old: int) -> np.ndarray:
    """The slow twin of `keep`: `under_old` tokens in the cache from version 0, the rest fed one by one to version 1."""
    old, new = (bind(graph(CONFIG), jax.tree.map(jnp.asarray, PARAMS[version])) for version in (0, 1))
    rows = jax.jit(functools.partial(decode.prefill, old))(tokens[None, :under_old])
    cache = decode.init_cache(CONFIG, 1, (LENGTH,), "float32")
    cache = kv_cache.write_rows(IN_PIECES, cache, rows, jnp.zeros(1, jnp.int32))
    step = jax.jit(functools.partial(decode.decode_step, new, attended=LENGTH))
    logprobs = []
    for place in range(under_old, len(tokens) - 1):
        logits, cache = step(tokens[place : place + 1], np.array([place]), cache)
        logprobs.append(np.asarray(jax.nn.log_softmax(logits[0]))[tokens[place + 1]])
    return np.array(logprobs)


def test_keep_records_the_logprobs_of_the_mixed_cache_that_it_samples_from(hand):
    hand.ask(0, 20, 12)
    hand.turn()
    hand.update(1, "keep")
    hand.finish()
    assert hand.versions(0) == [0] * 2 + [1] * 10 and hand.scheduler.status()["recomputed_tokens"] == 0
    tokens = np.concatenate([hand.known(0, 0), hand.joined(0, 0, "tokens")])
    recorded = hand.joined(0, 0, "logprobs")[2:]
    # 22 tokens are known at the swap, and the cache holds 21 of them.
    np.testing.assert_allclose(recorded, mixed_cache_logprobs(tokens, under_old=21), atol=1e-5, rtol=0)
    assert np.abs(recorded - forward_logprobs(1, tokens)[21:]).max() > 0.01  # no version tag describes them


def test_drain_ends_what_runs_under_the_old_weights_and_begins_the_rest_under_the_new(hand):
    for uid in range(6):  # two more than there are slots
        hand.ask(uid, 4 + 5 * uid, 5)
    hand.turn()
    update = hand.update(1, "drain")
    hand.ask(6, 3, 5)
    hand.turn()
    assert not update.done() and len(hand.scheduler._slots) == 4
    hand.finish()
    hand.assert_exact()
    assert update.done() and [set(hand.versions(uid)) for uid in range(7)] == [{0}] * 4 + [{1}] * 3


def test_every_update_may_have_its_own_policy(hand):
    for uid, length in enumerate((3, 17, 30)):
        hand.ask(uid, length, 30)
    hand.turn()
    hand.update(1, "recompute")
    hand.turn(2)
    hand.update(2, "keep")
    hand.turn(2)
    hand.update(3)  # the scheduler's own: recompute
    hand.turn(2)
    drained = hand.update(4, "drain")
    hand.ask(3, 9, 4)
    hand.finish()
    assert drained.done() and set(hand.versions(3)) == {4}
    assert [sorted(set(hand.versions(uid))) for uid in range(3)] == [[0, 1, 2, 3]] * 3
    assert_exact_but_for(hand, version=2)  # what `keep` sampled; all else is exact, also after it


def assert_exact_but_for(hand: ByHand, version: int) -> None:
    for uid, sample in hand.chunks:
        known = hand.known(uid, sample)
        tokens = np.concatenate([known, hand.joined(uid, sample, "tokens")])
        versions = hand.joined(uid, sample, "versions")
        errors = {
            int(v): np.abs(hand.joined(uid, sample, "logprobs") - forward_logprobs(int(v), tokens)[len(known) - 1 :])
            for v in np.unique(versions)
        }
        for other in errors.keys() - {version}:
            assert errors[other][versions == other].max() < 1e-5
        if version in errors:
            assert errors[version][versions == version].max() > 0.01


def wrong(change) -> dict[str, np.ndarray]:
    params = dict(PARAMS[2])
    change(params)
    return params


REFUSED = {
    "held": (1, lambda params: None, "version 1 is not newer than version 1"),
    "older": (0, lambda params: None, "version 0 is not newer than version 1"),
    "name missing": (2, lambda params: params.pop("norm.scale"), r"norm.scale: given nothing, needed \(16,\)"),
    "name unknown": (2, lambda params: params.update(extra=np.zeros(3)), r"extra: given \(3,\), needed nothing"),
    "shape": (2, lambda params: params.update({"norm.scale": np.ones(17, np.float32)}), r"given \(17,\), needed \(16,"),
    "dtype": (2, lambda params: params.update({"norm.scale": np.ones(16)}), "given float64, needed float32"),
    "numbers": (2, lambda params: params.update({"norm.scale": np.ones(16, np.int32)}), "given int32, needed float32"),
}


@pytest.mark.parametrize("double_buffer", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_an_update_that_does_not_fit_is_refused_and_nothing_changes(case, double_buffer):
    version, change, message = REFUSED[case]
    hand = ByHand(ENGINE, double_buffer=double_buffer)
    ask_mixed(hand)
    hand.update(1)
    hand.turn()
    hand.commands()
    scheduler = hand.scheduler
    weights, state = scheduler._weights, jax.device_get(scheduler._state)
    before = (scheduler.status(), [(i, slot.length) for i, slot in scheduler._slots.items()])
    with pytest.raises(ValueError, match=message):
        scheduler.update_weights(wrong(change), version)
    assert scheduler._commands.empty() and scheduler._weights is weights and not scheduler._updates
    for held, expected in zip(jax.tree.leaves(jax.device_get(scheduler._state)), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(held, expected)
    assert before == (scheduler.status(), [(i, slot.length) for i, slot in scheduler._slots.items()])
    hand.finish()
    hand.assert_exact()


@pytest.mark.parametrize("double_buffer", [True, False])
def test_an_update_that_another_one_overtook_is_refused_and_the_newer_weights_stay(double_buffer):
    hand = ByHand(ENGINE, double_buffer=double_buffer)
    ask_mixed(hand)
    hand.turn()
    newer = hand.scheduler.update_weights(PARAMS[2], 2)
    late = hand.scheduler.update_weights(PARAMS[1], 1)  # not older than what is held yet
    hand.finish()
    assert newer.done() and hand.scheduler.status()["version"] == 2
    with pytest.raises(ValueError, match="version 1 is not newer than version 2"):
        late.result(0)
    hand.assert_exact()


# The token budget of a prefill.

BUDGET = EngineOptions(
    slots=6, max_length=64, decode_steps=2, prefill_rows=4, prefill_tokens=64, length_buckets=(16, 32, 64)
)


def test_a_full_house_of_long_sequences_is_recomputed_under_the_token_budget(monkeypatch):
    engine = Engine(CONFIG, BUDGET)
    engine.warm_up(engine.load(PARAMS[0], 0))
    warm = compilation.count()
    shapes = []
    prefill = engine._prefill
    watched = lambda params, tokens: shapes.append(tokens.shape) or prefill(params, tokens)  # noqa: E731
    monkeypatch.setattr(engine, "_prefill", watched)
    hand = ByHand(engine)
    for uid, length in enumerate((40, 6, 50, 28, 36, 30)):
        hand.ask(uid, length, 10)
    hand.admit()
    assert shapes == [(1, 64), (1, 16), (1, 64), (2, 32), (1, 64)]  # 40 | 6 | 50 | 28, 30 | 36
    hand.turn()
    shapes.clear()
    hand.update(1)
    hand.commands()
    # known tokens are 52, 42, 38 | 32, 30 | 8
    assert shapes == [(1, 64), (1, 64), (1, 64), (2, 32), (1, 16)]
    hand.finish()
    hand.assert_exact()
    assert compilation.count() == warm


# Memory.


class LoadWatch:
    """Sees who is alive whenever an engine loads weights."""

    def __init__(self, engine: Engine, monkeypatch):
        self.old_alive: list[bool] = []
        self.held: list[weakref.ref] = []
        self.load = engine.load
        monkeypatch.setattr(engine, "load", self)

    def __call__(self, params, version):
        self.old_alive.append(any(ref() is not None for ref in self.held))
        copies = {name: np.array(array) for name, array in params.items()}  # nothing else holds these
        weights = self.load(copies, version)
        self.held = [weakref.ref(array) for array in weights.params.values()]
        return weights


@pytest.mark.parametrize(("double_buffer", "two_sets"), [(True, True), (False, False)])
def test_without_double_buffer_the_old_weights_are_gone_before_the_new_ones_are_placed(
    monkeypatch, double_buffer, two_sets
):
    watch = LoadWatch(ENGINE, monkeypatch)
    hand = ByHand(ENGINE, double_buffer=double_buffer)
    ask_mixed(hand)
    hand.turn()
    for version, policy in ((1, "recompute"), (2, "keep"), (3, "recompute"), (4, "drain")):
        update = hand.update(version, policy)
        hand.turn()
        assert update.done() or policy == "drain"
    hand.finish()
    assert watch.old_alive == [False, *[two_sets] * 4]
    assert hand.scheduler.status()["version"] == 4


def test_both_ways_of_loading_give_the_same_tokens():
    made = []
    for double_buffer in (True, False):
        hand = ByHand(ENGINE, double_buffer=double_buffer)
        ask_mixed(hand)
        hand.turn()
        hand.update(1)
        hand.update(2)
        hand.turn()
        hand.update(3, "drain")
        hand.ask(4, 6, 5)
        hand.finish()
        made.append({key: [list(hand.joined(*key, field)) for field in ("tokens", "versions")] for key in hand.chunks})
        assert made[-1] == made[0]
        hand.assert_exact()


def test_a_server_whose_new_weights_cannot_be_placed_ends_and_says_so(monkeypatch):
    def lost(params, version):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    hand = ByHand(ENGINE, double_buffer=False)
    hand.ask(0, 5, 20)
    hand.turn()
    monkeypatch.setattr(ENGINE, "load", lost)
    update = hand.update(1)
    with pytest.raises(RuntimeError, match=r"version 1 could not be placed .* version 0 were freed before"):
        hand.scheduler._run()  # the engine's thread
    assert "RESOURCE_EXHAUSTED" in str(hand.scheduler.failure.__cause__)
    with pytest.raises(RuntimeError, match="were not swapped in.*could not be placed"):
        update.result(0)
    assert len(hand.errors) == 1 and hand.versions(0) == [0, 0]  # those of the dispatch before the swap
    with pytest.raises(RuntimeError, match="serves no more"):
        hand.ask(1, 5, 5)


@pytest.mark.parametrize("double_buffer", [True, False])
def test_an_update_that_fails_in_the_recompute_hears_of_it(monkeypatch, double_buffer):
    def lost(*args):
        raise FloatingPointError("device lost")

    hand = ByHand(ENGINE, double_buffer=double_buffer)
    hand.ask(0, 5, 20)
    hand.turn()
    monkeypatch.setattr(ENGINE, "recompute", lost)
    update = hand.update(1)
    with pytest.raises(FloatingPointError):
        hand.scheduler._run()
    with pytest.raises(RuntimeError, match="were not swapped in: FloatingPointError"):
        update.result(0)


def test_a_failure_to_load_beside_the_old_weights_leaves_them_serving(monkeypatch, hand):
    def lost(params, version):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    hand.ask(0, 5, 6)
    hand.turn()
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        broken.setattr(ENGINE, "load", lost)
        hand.update(1)
    hand.finish()
    hand.assert_exact()
    assert hand.versions(0) == [0] * 6 and hand.scheduler.status()["version"] == 0
