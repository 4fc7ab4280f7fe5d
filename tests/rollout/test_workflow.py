"""Failures keep their cause; a TaskGroup's error comes out plain."""

import asyncio

import pytest

from areal_jax.rollout.workflow import RolloutFailed, failing_as, first_error


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
