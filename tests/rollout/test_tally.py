"""Counts by hand."""

import numpy as np
import pytest

from areal_jax.rollout.tally import Tally
from areal_jax.rollout.workflow import Judged, RolloutFailed
from areal_jax.types import Completion

TOO_LONG = RolloutFailed(5, "too_long", ValueError("9 tokens"))
BAD = RolloutFailed(5, "prompt", ValueError("bad"))


def group(*verdicts: float) -> list[Judged]:
    tokens = np.zeros(1, np.int32)
    completion = Completion(tokens, np.zeros(1, np.float32), tokens, "stop")
    return [Judged(completion, "", verdict) for verdict in verdicts]


def test_ten_rollouts_six_right_two_wrong_two_failed():
    tally = Tally(group_size=2, max_failures=16, max_filtered=8, max_too_long=9)
    for _ in range(5):
        tally.start()
    for verdicts in [(1, 1), (1, 0), (0, 1), (1, 1)]:
        tally.finish(group(*verdicts))
    tally.fail(4, RolloutFailed(4, "reward_timeout", ValueError("late")))
    for _ in range(5):
        tally.end()
    assert tally.line() == {
        "started": 10,
        "finished": 8,
        "failed": {"reward_timeout": 2},
        "filtered": 0,
        "right": 6,
        "in_flight": 0,
        "verdict_mean": 0.75,  # 6 / 8: over all finished
        "right_of_finished": 0.75,
        "right_of_settled": 0.6,  # 6 / 10: the failed count
    }


def test_a_share_of_nothing_is_absent():
    line = Tally(group_size=2, max_failures=16, max_filtered=8, max_too_long=9).line()
    assert (line["verdict_mean"], line["right_of_finished"], line["right_of_settled"]) == (None, None, None)


def test_filtered_groups_stay_in_the_shares():
    tally = Tally(group_size=2, max_failures=16, max_filtered=8, max_too_long=9)
    tally.finish(group(0, 0))
    tally.filter(0)
    tally.finish(group(1, 0))
    assert (tally.line()["right_of_finished"], tally.line()["filtered"]) == (0.25, 2)


def test_partial_credit_is_no_right_answer():
    tally = Tally(group_size=2, max_failures=16, max_filtered=8, max_too_long=9)
    tally.finish(group(0.5, 1.0))
    assert (tally.line()["right"], tally.line()["verdict_mean"]) == (1, 0.75)


def test_groups_are_numbered_in_the_order_of_starting():
    tally = Tally(group_size=4, max_failures=3, max_filtered=3, max_too_long=9)
    assert [tally.start() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("order", [[4, 5, 6], [6, 4, 5], [4, 6, 5]])
def test_failures_in_a_row_end_the_run_in_whatever_order_they_come(order):
    tally = Tally(group_size=2, max_failures=3, max_filtered=3, max_too_long=9)
    failure = RolloutFailed(5, "prompt", ValueError("bad"))
    for number in (0, 1, 8, 9, 11, *order[:2]):  # rows of two, one and two
        tally.fail(number, failure)
    with pytest.raises(RuntimeError, match="3 prompts in a row failed .*'prompt': 16") as error:
        tally.fail(order[2], failure)
    assert error.value.__cause__ is failure


def test_many_failures_among_slow_good_groups_do_not():
    tally = Tally(group_size=2, max_failures=3, max_filtered=3, max_too_long=9)
    for number in range(300):
        if number % 3:  # the others are still in flight
            tally.fail(number, RolloutFailed(number, "too_long", ValueError("bad")))


def test_prompts_that_are_too_long_neither_count_as_failures_in_a_row_nor_interrupt_the_row():
    tally = Tally(group_size=2, max_failures=3, max_filtered=3, max_too_long=9)
    for number in (0, 1, 3, 4, 6, 7):
        tally.skip(number, TOO_LONG)
    tally.fail(2, BAD)
    tally.fail(5, BAD)
    assert tally.line()["failed"] == {"too_long": 12, "prompt": 4}
    with pytest.raises(RuntimeError, match="3 prompts in a row failed"):
        tally.fail(8, BAD)


def test_nor_do_they_count_as_filtered():
    tally = Tally(group_size=2, max_failures=3, max_filtered=3, max_too_long=9)
    for number in (0, 1, 3, 4):
        tally.skip(number, TOO_LONG)
    tally.filter(2)
    tally.filter(5)
    with pytest.raises(RuntimeError, match="3 prompts in a row were left out, since the rewards"):
        tally.filter(6)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_nothing_but_prompts_that_are_too_long_ends_the_run(order):
    tally = Tally(group_size=2, max_failures=9, max_filtered=9, max_too_long=3)
    for number in (*order[:2], 4, 5):
        tally.skip(number, TOO_LONG)
    with pytest.raises(
        RuntimeError, match="3 prompts in a row were too long .*nothing to train on; the last: prompt 5"
    ):
        tally.skip(order[2], TOO_LONG)


def test_the_first_prompt_that_is_too_long_is_logged_and_not_each(caplog):
    tally = Tally(group_size=2, max_failures=9, max_filtered=9, max_too_long=9)
    for number in range(5):
        tally.skip(number, TOO_LONG)
    assert len(caplog.records) == 1 and "skipped.jsonl" in caplog.text


def test_filtered_groups_in_a_row_end_the_run_failed_ones_among_them_too():
    tally = Tally(group_size=2, max_failures=3, max_filtered=4, max_too_long=9)
    for number in (0, 1, 2, 4, 5):
        tally.finish(group(1, 1))
        tally.filter(number)
    tally.fail(6, RolloutFailed(6, "prompt", ValueError("bad")))
    tally.finish(group(1, 1))
    with pytest.raises(RuntimeError, match="4 prompts in a row were left out, .*; 12 of 12 finished .*, 2 failed"):
        tally.filter(7)
