"""The engine with the kernels of a GPU, interpreted on the CPU: its cache lies otherwise, and a swap rebuilds it."""

import dataclasses

import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.models import attention_kernels
from tests.generation.by_hand import CONFIG, ByHand
from tests.models.test_attention import TRITON

pytestmark = pytest.mark.usefixtures("quickly_compiled")

OPTIONS = EngineOptions(
    slots=4, max_length=64, decode_steps=2, prefill_rows=2, length_buckets=(32, 64), slot_buckets=(2, 4), tensor=2
)


def test_every_logprob_is_exact_across_a_swap(monkeypatch):
    monkeypatch.setattr(attention_kernels, "kernels_for", lambda _, mesh: dataclasses.replace(TRITON, mesh=mesh))
    hand = ByHand(Engine(CONFIG, OPTIONS))
    ((keys, _),) = hand.scheduler._state.cache.layers[0]  # one piece, heads first
    assert keys.shape == (4, CONFIG.kv_heads, 64, CONFIG.head_size)
    for uid, (length, new) in enumerate(((1, 20), (58, 6), (30, 9), (7, 30))):
        hand.ask(uid, length, new)
    hand.turn(2)
    hand.update(1)
    hand.finish()
    hand.assert_exact()
    assert [set(hand.versions(uid)) for uid in range(4)] == [{0, 1}] * 4
    assert hand.scheduler.status()["recomputed_tokens"] > 0
