"""What a request's tokens depend on: seed, prompt uid, sample, position and weights; on company as far as shapes go.

Company decides in which shapes a token is computed: rows of a prefill and their length, attended tokens, slots of a
step. In other shapes XLA rounds otherwise, which in float32 moves log-probabilities in their last digits and in
bfloat16 can tip a draw. tests/models/test_batch_invariant.py shows the mode in which shapes move no bit either.
"""

import jax
import numpy as np
import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.models.transformer import TransformerConfig, init_params
from tests.generation.by_hand import ByHand

# Of a size at which other shapes do round otherwise.
WIDE = TransformerConfig(vocab_size=512, d_model=64, layers=1, heads=4, kv_heads=2, head_size=16, d_ff=128)
PARAMS = {name: np.asarray(2 * array) for name, array in init_params(WIDE, jax.random.key(0)).items()}
WANTED = {uid: 3 + 5 * uid for uid in range(6)}  # uid -> length of the prompt


def ask(hand: ByHand, uid: int) -> None:
    hand.ask(uid, WANTED[uid], 20, samples=(0, 1), temperature=0.9, top_p=0.95)


def in_a_crowd(engine: Engine) -> ByHand:
    """Each between others, in more samples than there are slots; some are cancelled in mid sequence."""
    hand, cancelled = ByHand(engine, PARAMS), []
    for uid in WANTED:
        cancelled.append(hand.ask(100 + uid, 2 + 7 * uid, 20))
        hand.ask(200 + uid, 44 - 7 * uid, 3 + 2 * uid, samples=range(3))
        ask(hand, uid)
    hand.turn(6)
    for ticket in cancelled:
        hand.scheduler.cancel(ticket)
    hand.finish()
    return hand


def test_in_other_shapes_float32_gives_the_same_tokens():
    """As by default: buckets of lengths and slots, prefills of several rows."""
    options = EngineOptions(slots=16, max_length=64, decode_steps=4, length_buckets=(16, 32, 64), slot_buckets=(4, 16))
    engine = Engine(WIDE, options)
    crowd, moved = in_a_crowd(engine), 0.0
    for uid in WANTED:
        alone = ByHand(engine, PARAMS)
        ask(alone, uid)
        alone.finish()
        for sample in (0, 1):
            np.testing.assert_array_equal(alone.joined(uid, sample, "tokens"), crowd.joined(uid, sample, "tokens"))
            logprobs, others = (hand.joined(uid, sample, "logprobs") for hand in (alone, crowd))
            np.testing.assert_allclose(logprobs, others, rtol=0, atol=1e-5)
            moved += np.abs(logprobs - others).max()
    assert moved > 0, "the shapes were others"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_programs_of_one_shape_company_moves_no_bit(dtype):
    options = EngineOptions(slots=8, max_length=64, decode_steps=4, prefill_rows=1, length_buckets=(64,), dtype=dtype)
    engine = Engine(WIDE, options)
    crowd = in_a_crowd(engine)
    for uid in WANTED:
        alone = ByHand(engine, PARAMS)
        ask(alone, uid)
        alone.finish()
        for sample in (0, 1):
            for field in ("tokens", "logprobs"):
                np.testing.assert_array_equal(alone.joined(uid, sample, field), crowd.joined(uid, sample, field))
