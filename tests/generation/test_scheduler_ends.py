"""What meets at one boundary: a deadline and an admission, a stop and what was still under way; turn by turn."""

import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.types import GenerateRequest, Sampling
from tests.generation.by_hand import CONFIG, ByHand, prompt_of

OPTIONS = EngineOptions(slots=2, max_length=64, decode_steps=2, length_buckets=(64,))


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, OPTIONS)


def test_a_request_whose_time_is_over_before_it_is_queued_harms_nobody(engine):
    hand, errors = ByHand(engine), []
    hand.ask(0, 5, 20)
    hand.turn()
    # The engine's thread has seen no command; now the request comes, and then the thread looks at the deadlines.
    late = GenerateRequest(1, prompt_of(5), (0,), Sampling(4), timeout_s=1e-9)
    hand.scheduler.submit(late, lambda chunks: pytest.fail("tokens behind the error"), errors.append)
    hand.scheduler._expire()
    assert [type(error) for error in errors] == [TimeoutError]
    hand.finish()
    assert hand.joined(0, 0, "tokens").size == 20 and hand.scheduler.status()["waiting"] == 0
    assert len(errors) == 1 and not hand.errors


def test_a_stop_is_the_last_thing_that_a_request_hears(engine):
    hand = ByHand(engine)
    hand.ask(0, 5, 2)
    hand.ask(1, 5, 20)
    hand.turn()  # the last tokens of the first are on their way
    hand.scheduler._commands.put(hand.scheduler._end)
    hand.scheduler._turn()
    assert len(hand.errors) == 2 and not hand.chunks
    assert {reason: n for reason, n in hand.scheduler.telemetry.ended.items() if n} == {"failed": 2}


def test_an_update_that_waits_for_a_drain_is_not_made_by_a_server_that_stops(engine):
    hand = ByHand(engine)
    update = hand.update(1, "drain")
    hand.scheduler._commands.put(hand.scheduler._end)
    hand.scheduler._run()
    with pytest.raises(RuntimeError, match="the new weights were not swapped in"):
        update.result()
    assert hand.scheduler.status()["version"] == 0
