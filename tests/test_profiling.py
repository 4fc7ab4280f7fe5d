"""Traces of chosen steps."""

import threading

import jax
import jax.numpy as jnp
import pytest

from areal_jax import profiling


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the profiler, which does not run."""
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory, profiler_options: made.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


def test_a_trace_spans_the_steps_and_nothing_else(tmp_path, calls):
    profile, seen = profiling.Profile(tmp_path, range(10, 13)), []
    for step in (9, 10, 10, 11, 12, 13, 14):
        profile.at(step)
        seen.append(list(calls))
    profile.close()
    assert seen == [[], ["start"], ["start"], ["start"], ["start"], ["start", "stop"], ["start", "stop"]]
    assert calls == ["start", "stop"]


def test_a_run_that_goes_on_amid_the_steps_traces_the_rest_and_one_that_ends_there_what_it_has(tmp_path, calls):
    profile = profiling.Profile(tmp_path, range(10, 13))
    profile.at(11)
    profile.close()
    profile.close()
    assert calls == ["start", "stop"]
    never = profiling.Profile(tmp_path, range(0))
    never.at(1)
    never.close()
    assert calls == ["start", "stop"]


def test_the_profiler_leaves_a_trace_that_names_the_steps(tmp_path):
    step, seen = 3, threading.Event()

    def step_now():
        seen.set()
        return step

    with profiling.following(profiling.Profile(tmp_path / "generation-0", range(2, 5)), step_now):
        assert seen.wait(10)
        jnp.arange(8.0).sum().block_until_ready()
    (trace,) = (tmp_path / "generation-0").glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0
