"""The most likely tokens in the place of each sampled one, for who asks for them."""

import dataclasses

import numpy as np
import pytest

from areal_jax import compilation
from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.types import GenerateRequest, Sampling
from tests.generation.by_hand import CONFIG, ByHand, forward_logits, prompt_of, slow_kept

OPTIONS = EngineOptions(
    slots=4, max_length=64, decode_steps=2, length_buckets=(64,), slot_buckets=(2, 4), top_logprobs=5
)
ENGINE = Engine(CONFIG, OPTIONS)
SAMPLING = Sampling(12, temperature=0.7, seed=7, top_k=4, top_p=0.9)


def ask(hand: ByHand, uid: int, sampling: Sampling, top_logprobs: int) -> None:
    request = GenerateRequest(uid, prompt_of(9), (0,), sampling, top_logprobs=top_logprobs)
    hand.scheduler.submit(request, hand.chunks[uid, 0].extend, hand.errors.append)


def joined(hand: ByHand, uid: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, log-probabilities and those of the alternatives."""
    chunks = hand.chunks[uid, 0]
    parts = [(c.tokens, c.logprobs, c.alternatives.tokens, c.alternatives.logprobs) for c in chunks]
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        (CONFIG, SAMPLING),
        (CONFIG, dataclasses.replace(SAMPLING, temperature=0.0)),
        (dataclasses.replace(CONFIG, kernels="batch_invariant"), SAMPLING),
    ],
    ids=["drawn", "greedy", "batch_invariant"],
)
def test_alternatives_are_the_most_likely_tokens_of_the_distribution_that_was_drawn_from(config, sampling):
    hand = ByHand(ENGINE if config is CONFIG else Engine(config, OPTIONS))
    ask(hand, 0, sampling, 5)
    hand.finish()
    tokens, logprobs, others, theirs = joined(hand, 0)
    assert others.shape == theirs.shape == (12, 5)
    logits_TV = forward_logits(0, np.concatenate([prompt_of(9), tokens]))[8:-1]
    for place, logits in enumerate(logits_TV):
        greedy = sampling.temperature == 0
        kept = np.full(len(logits), True) if greedy else slow_kept(logits, 0.7, 4, 0.9, 0.0)
        scaled = np.where(kept, logits.astype(np.float64) / (sampling.temperature or 1.0), -np.inf)
        expected = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
        count = min(5, int(kept.sum()))
        assert others[place, :count].tolist() == np.argsort(-expected, kind="stable")[:count].tolist()
        np.testing.assert_allclose(theirs[place, :count], np.sort(expected)[::-1][:count], atol=1e-5)
        assert np.isneginf(theirs[place, count:]).all()
        drawn = others[place] == tokens[place]
        assert not greedy or drawn[0]
        np.testing.assert_allclose(theirs[place, drawn], logprobs[place], atol=1e-6)


def test_who_asks_changes_no_bit_of_who_does_not_and_gets_no_more_than_asked():
    alone, beside = ByHand(ENGINE), ByHand(ENGINE)
    for hand in (alone, beside):
        hand.ask(1, 9, 12)
    ask(beside, 0, SAMPLING, 2)
    for hand in (alone, beside):
        hand.finish()
    assert joined(beside, 0)[2].shape == (12, 2)
    assert all(chunk.alternatives is None for chunk in beside.chunks[1, 0])
    for field in ("tokens", "logprobs"):
        np.testing.assert_array_equal(alone.joined(1, 0, field), beside.joined(1, 0, field))


def test_more_than_the_server_gives_is_refused_and_nothing_compiles_for_what_it_gives():
    hand = ByHand(ENGINE)
    with pytest.raises(ValueError, match="top_logprobs=6 must be at least 0 and at most generation.top_logprobs=5"):
        ask(hand, 0, SAMPLING, 6)
    ENGINE.warm_up(hand.scheduler._weights)
    warm = compilation.count()
    ask(hand, 0, SAMPLING, 5)
    hand.finish()
    assert compilation.count() == warm and len(joined(hand, 0)[0]) == 12
