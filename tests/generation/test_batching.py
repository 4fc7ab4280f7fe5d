"""Continuous batching, turn by turn: who decodes in which dispatch, what a prefill holds, what a step attends to."""

import numpy as np
import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.prefilled import Prefilled
from areal_jax.generation.tickets import Ticket, Waiting
from areal_jax.types import Completion, GenerateRequest, Sampling
from tests.generation.by_hand import CONFIG, PARAMS, ByHand, prompt_of

SLOTS = 4
OPTIONS = EngineOptions(slots=SLOTS, max_length=64, decode_steps=2, prefill_rows=2, length_buckets=(16, 32, 64))
ENGINE = Engine(CONFIG, OPTIONS)


class Watched(ByHand):
    """Notes, in order: rows of each prefill, uids and attended tokens of each dispatch, and when a chunk came."""

    def __init__(self, monkeypatch):
        super().__init__(ENGINE)
        self.events: list[str] = []
        self.prefills: list[int] = []
        self.decoding: list[set[int]] = []
        self.attended: list[int] = []
        prefill_rows, decode, collect = ENGINE.prefill_rows, ENGINE.decode, self.scheduler._collect

        def watched_prefill(weights, rows):
            self.events.append("prefill")
            self.prefills.append(len(rows))
            return prefill_rows(weights, rows)

        def watched_decode(weights, state, longest, running):
            self.events.append("decode")
            self.decoding.append({slot.ticket.request.uid for slot in self.scheduler._slots.values()})
            self.attended.append(ENGINE.bucket(longest))
            return decode(weights, state, longest, running)

        def watched_collect():
            self.events += ["collect"] * (self.scheduler._pending is not None)
            return collect()

        monkeypatch.setattr(ENGINE, "prefill_rows", watched_prefill)
        monkeypatch.setattr(ENGINE, "decode", watched_decode)
        monkeypatch.setattr(self.scheduler, "_collect", watched_collect)

    def ask(self, uid, length, max_new_tokens, **fields) -> int:
        ticket = super().ask(uid, length, max_new_tokens, **fields)
        take = self.scheduler._tickets[ticket].on_chunks
        self.scheduler._tickets[ticket].on_chunks = lambda chunks: (self.events.append("chunks"), take(chunks))
        return ticket


@pytest.fixture
def hand(monkeypatch) -> Watched:
    return Watched(monkeypatch)


def test_a_slot_that_ends_is_refilled_for_the_very_next_dispatch(hand):
    for uid, new in enumerate((2, 20, 20, 4)):
        hand.ask(uid, 3, new)
    hand.ask(4, 5, 6)
    hand.ask(5, 5, 6)
    hand.finish()
    # 0 ends in the first dispatch, 3 in the second; 4 and 5 wait for them
    assert hand.decoding[:3] == [{0, 1, 2, 3}, {1, 2, 3, 4}, {1, 2, 4, 5}]
    hand.assert_exact()


def test_a_slot_that_a_stop_token_ends_is_refilled_for_the_very_next_dispatch(hand):
    hand.ask(9, 3, 8)
    hand.finish()
    second = int(hand.joined(9, 0, "tokens")[1])
    hand.decoding.clear()
    hand.ask(9, 3, 8, stop=(second,))  # the same tokens again, as uid and sample are the same
    for uid in range(4):
        hand.ask(uid, 3, 8)
    hand.turn(2)
    assert hand.decoding == [{9, 0, 1, 2}, {0, 1, 2, 3}]


def test_a_queue_through_one_slot_idles_in_no_dispatch(hand):
    for uid in range(SLOTS - 1):
        hand.ask(uid, 1, 40)
    for uid in range(10, 15):
        hand.ask(uid, 2, 4)  # two dispatches each
    hand.turn(10)
    assert [uids - {0, 1, 2} for uids in hand.decoding] == [{uid} for uid in range(10, 15) for _ in range(2)]


def test_harvest_and_callbacks_run_beside_the_next_dispatch(hand):
    hand.ask(0, 3, 7)
    hand.finish()
    dispatched = ["prefill", "decode", "decode", "collect", "chunks"]
    assert hand.events == [*dispatched, *["decode", "collect", "chunks"] * 2, "collect", "chunks"]


def test_with_a_queue_only_the_reading_comes_before_the_next_dispatch(hand):
    for uid in range(SLOTS + 1):
        hand.ask(uid, 3, 4)
    hand.turn(2)
    first = ["prefill", "prefill", "decode", "prefill"]  # two by two, and behind the dispatch who is next
    assert hand.events == [*first, "collect", "decode", *["chunks"] * SLOTS]


def test_nothing_is_dispatched_for_slots_that_all_reach_their_limits(hand):
    hand.ask(0, 3, 4)
    hand.ask(1, 9, 2)
    hand.finish()
    assert len(hand.decoding) == 2 and hand.joined(0, 0, "tokens").size == 4


def test_the_samples_of_a_prompt_share_one_prefill_row(hand):
    hand.ask(0, 9, 4, samples=range(SLOTS))
    hand.finish()
    assert hand.prefills == [1]
    hand.assert_exact()


def test_the_samples_of_a_prompt_share_one_row_however_few_find_a_slot_at_a_time(hand):
    for uid in range(SLOTS):
        hand.ask(uid, 3, 2 + 4 * uid)  # end one after the other
    hand.ask(9, 9, 6, samples=range(SLOTS + 2))
    hand.finish()
    assert hand.prefills == [2, 2, 1]
    assert len({tuple(hand.joined(9, sample, "tokens")) for sample in range(SLOTS + 2)}) > 1
    hand.assert_exact()


def test_prompts_that_wait_share_a_prefill_beside_the_decoding_and_need_none_when_a_slot_is_free(hand):
    for uid in range(SLOTS):
        hand.ask(uid, 3, 2 + 4 * uid)
    for uid in range(SLOTS, SLOTS + 3):
        hand.ask(uid, 5, 6)
    hand.turn(4)
    assert hand.prefills == [2, 2, 2, 1]
    turns = " ".join(hand.events).split("decode")
    # Behind the first dispatch those of 4 and 5; when both have slots, behind the fourth, that of 6.
    assert ["prefill" in turn.split() for turn in turns] == [True, True, False, False, True]
    hand.finish()
    hand.assert_exact()


def test_evaluation_goes_before_prompts_that_were_prefilled_ahead_and_their_rows_stay(hand):
    for uid in range(SLOTS + 2):
        hand.ask(uid, 3, 4)
    hand.turn()
    hand.ask(9, 5, 4, samples=range(SLOTS), evaluation=True)
    hand.finish()
    assert hand.decoding == [{0, 1, 2, 3}, {0, 1, 2, 3}, {9}, {9}, {4, 5}, {4, 5}]
    assert hand.prefills == [2, 2, 2, 1]
    hand.assert_exact()


@pytest.mark.parametrize("on_update", ["recompute", "keep", "drain"])
def test_a_row_that_waits_is_prefilled_again_under_new_weights(hand, on_update):
    for uid in range(SLOTS):
        hand.ask(uid, 3, 2)
    hand.ask(9, 9, 4, samples=range(2))
    hand.turn()
    assert hand.prefills == [2, 2, 1]
    hand.update(1, on_update)
    hand.finish()
    assert hand.prefills == [2, 2, 1, 1]
    assert hand.versions(9, 0) == hand.versions(9, 1) == [1] * 4
    hand.assert_exact()


def test_rows_of_requests_that_are_gone_are_forgotten(hand):
    for uid in range(SLOTS):
        hand.ask(uid, 3, 20)
    tickets = [hand.ask(uid, 5, 4, samples=(0, 1)) for uid in (8, 9)]
    hand.turn()
    assert len(hand.scheduler._prefilled) == 2
    hand.scheduler.cancel(tickets[0])
    for sample in (0, 1):
        hand.scheduler.finish(tickets[1], sample)
    hand.turn()
    assert len(hand.scheduler._prefilled) == 0


def test_rows_that_wait_take_no_more_than_their_share_and_the_oldest_go_first():
    waiting, prefilled = Waiting(), Prefilled(ENGINE)
    weights = ENGINE.load(PARAMS[0], 0)

    def come(*numbers, evaluation):
        for number in numbers:
            request = GenerateRequest(number, prompt_of(40), (0,), Sampling(4), evaluation=evaluation)
            waiting.put(Ticket(number, request, print, print, [0], 0.0))
        prefilled.have_next(weights, waiting)

    come(0, 1, evaluation=False)
    come(2, 3, evaluation=True)
    assert ENGINE.shapes.most_waiting == 2 * 2 * 64  # both fit
    assert {admission.key for admission in waiting if admission.key in prefilled} == {(n, None) for n in range(4)}
    waiting.take(2, prefilled)
    come(4, 5, evaluation=True)
    assert [(n, None) in prefilled for n in range(6)] == [False, False, True, True, True, True]


def test_a_sample_that_goes_on_has_a_row_of_its_own_beside_its_groups(hand):
    tokens = np.array([5, 6, 7], np.int32)
    partial = {2: Completion(tokens, np.zeros(3, np.float32), np.zeros(3, np.int32), "")}
    hand.ask(0, 9, 6, samples=range(SLOTS), partial=partial)
    hand.finish()
    assert hand.prefills == [2]
    hand.assert_exact()


def test_two_groups_share_a_prefill_and_neither_row_is_twice_there(hand):
    hand.ask(0, 9, 4, samples=(0, 1))
    hand.ask(1, 5, 4, samples=(0, 1))
    hand.finish()
    assert hand.prefills == [2]
    hand.assert_exact()


def test_a_step_attends_to_what_the_longest_active_sequence_needs_and_falls_when_it_ends(hand):
    hand.ask(0, 40, 4)
    hand.ask(1, 3, 20)
    hand.finish()
    # Two dispatches with the long one; the short one then goes from 7 tokens past 16 to 23.
    assert hand.attended == [64, 64, 16, 16, 16, 16, 32, 32, 32, 32]
    hand.assert_exact()


def test_a_step_attends_to_no_more_than_it_needs_after_a_cancellation(hand):
    long = hand.ask(0, 40, 20)
    hand.ask(1, 3, 20)
    hand.turn(2)
    hand.scheduler.cancel(long)
    hand.turn()
    assert hand.attended == [64, 64, 16]


def test_a_step_attends_to_all_of_a_sequence_that_came_while_another_decoded(hand):
    hand.ask(0, 3, 10)
    hand.turn()
    hand.ask(1, 40, 2)  # ends in the one dispatch that it has
    hand.finish()
    assert hand.attended == [16, 64, 16, 16, 16]
    hand.assert_exact()
