"""The gate under scripted and random orders of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.rollout.gate import StalenessGate


def starts(gate: StalenessGate, trajectories: int) -> int:
    """How many groups the gate lets start now."""
    count = 0
    while gate.may_start(trajectories):
        gate.start(trajectories)
        count += 1
    return count


def test_staleness_0_admits_exactly_one_batch_per_version():
    gate = StalenessGate(batch_size=4, max_staleness=0)
    assert starts(gate, 2) == 2  # 2 groups of 2: a batch of 4
    gate.advance(1, lost=0)
    assert starts(gate, 2) == 2
    gate.advance(3, lost=0)
    assert starts(gate, 2) == 4


def test_eta_admits_that_many_batches_ahead():
    gate = StalenessGate(batch_size=4, max_staleness=2)
    assert starts(gate, 1) == 12  # (version 0 + eta 2 + 1) * 4


def test_a_group_is_admitted_as_a_whole():
    gate = StalenessGate(batch_size=4, max_staleness=0, counted=2)
    assert gate.may_start(2) and not gate.may_start(3)


def test_what_is_lost_is_topped_up():
    gate = StalenessGate(batch_size=4, max_staleness=0)
    assert starts(gate, 2) == 2
    gate.advance(0, lost=2)
    assert starts(gate, 2) == 1
    gate.advance(0, lost=4)
    assert starts(gate, 2) == 1


def test_after_a_resume_it_opens_no_wider():
    # Two prompts per step, groups of 3: B = 6. One step done, two groups waiting, 9 trajectories once failed.
    gate = StalenessGate(batch_size=6, max_staleness=1, counted=6 + 6, version=1, lost=9)
    assert starts(gate, 3) == 2  # (1 + 1 + 1) * 6 = 18 = 12 + 2 * 3
    gate.advance(1, lost=12)  # only what is lost from now on
    assert starts(gate, 3) == 1


@pytest.mark.parametrize(("version", "lost"), [(4, 7), (5, 6)])
def test_a_trainer_that_went_back_is_noticed(version, lost):
    gate = StalenessGate(batch_size=4, max_staleness=0, version=5, lost=7)
    with pytest.raises(ValueError, match="restart the rollout controller"):
        gate.advance(version, lost)


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.one_of(st.just("start"), st.just("lose"), st.just("step")), max_size=60),
)
def test_no_schedule_breaks_the_papers_inequality(groups_per_batch, group_size, eta, events):
    batch_size = groups_per_batch * group_size
    gate = StalenessGate(batch_size=batch_size, max_staleness=eta)
    live, trained, version, lost = 0, 0, 0, 0  # live: trajectories started and neither lost nor trained
    for event in events:
        if event == "start" and gate.may_start(group_size):
            gate.start(group_size)
            live += group_size
            request = trained + live
            assert (request - 1) // batch_size <= version + eta
        elif event == "lose" and live >= group_size:
            live, lost = live - group_size, lost + group_size
            gate.advance(version, lost)
        elif event == "step" and live >= batch_size:
            live, trained, version = live - batch_size, trained + batch_size, version + 1
            gate.advance(version, lost)
        if not gate.may_start(group_size):
            assert live >= batch_size  # it never starves the trainer: a whole batch is on its way
