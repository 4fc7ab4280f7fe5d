"""Failures keep their cause; a TaskGroup's error comes out plain."""

import asyncio

import pytest

from areal_jax.rollout.evaluation import evaluate
from areal_jax.rollout.workflow import RolloutFailed, failing_as, first_error
from areal_jax.types import Sampling
from tests.rollout.fakes import FakeScorer, FakeServers, FakeTokenizer, Numbers


def test_a_failure_names_prompt_cause_and_error():
    with (
        pytest.raises(RolloutFailed, match=r"prompt 7 failed \(generation\): OSError: gone") as failure,
        failing_as(7, "generation"),
    ):
        raise OSError("gone")
    assert (failure.value.uid, failure.value.cause) == (7, "generation")
    assert isinstance(failure.value.__cause__, OSError)


def test_a_cancellation_is_no_failure():
    with pytest.raises(asyncio.CancelledError), failing_as(7, "generation"):
        raise asyncio.CancelledError


def test_the_first_error_of_a_group_comes_out_with_its_cause():
    cause = KeyError("why")
    error = ValueError("what")
    error.__cause__ = cause
    with pytest.raises(ValueError, match="what") as raised, first_error():
        raise ExceptionGroup("several", [error, OSError("later")])
    assert raised.value.__cause__ is cause


def score(source, *, prompts, servers=None, samples=1, in_flight=3, max_prompt_tokens=8):
    return asyncio.run(
        evaluate(
            source,
            prompts=prompts,
            samples=samples,
            in_flight=in_flight,
            sampling=Sampling(max_new_tokens=4),
            max_prompt_tokens=max_prompt_tokens,
            generate=servers or FakeServers(),
            scorer=FakeScorer(lambda text, answer: float(answer in ("0", "1", "2"))),
            tokenizer=FakeTokenizer(),
        )
    )


def test_evaluation_counts_and_skips_prompts_that_are_too_long():
    figures = score(Numbers(too_long=(1, 3)), prompts=5).figures()
    assert (figures["prompts"], figures["too_long"]) == (3, 2)
    assert figures["accuracy"] == 2 / 3  # 0 and 2 of 0, 2 and 4


def test_evaluation_of_nothing_but_long_prompts_is_an_error():
    with pytest.raises(ValueError, match="data.max_prompt_tokens=8 leaves out all 2 held-out prompts"):
        score(Numbers(too_long=(0, 1)), prompts=2)


def test_evaluation_takes_each_prompt_of_a_short_file_once():
    class Short(Numbers):
        def __len__(self):
            return 4

    servers = FakeServers()
    assert score(Short(), prompts=100, servers=servers, samples=2).figures()["accuracy"] == 0.75  # 0, 1, 2 of 0 to 3
    assert sorted(request.uid for request in servers.asked) == [0, 1, 2, 3]
    assert all(request.evaluation for request in servers.asked)
    assert servers.most_evaluations == 3


def test_evaluation_with_a_failed_generation_is_no_score():
    servers = FakeServers()
    servers.answer = lambda request, sample: ConnectionError("gone")
    with pytest.raises(RolloutFailed, match="generation"):
        score(Numbers(), prompts=4, servers=servers)
