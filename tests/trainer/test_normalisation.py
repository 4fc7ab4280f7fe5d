"""Loss, gradient and every figure of an update are the same, whichever way its sequences lie in memory.

Every arrangement goes through `step.update` up to the optimizer; the one compared with is that of `packing.pack`, which
test_step.py holds against each sequence by itself.
"""

import copy
import dataclasses

import numpy as np
import optax
import pytest

from areal_jax.algorithms import packing
from areal_jax.trainer import journal, step
from areal_jax.trainer.state import TrainState

pytestmark = pytest.mark.usefixtures("quickly_compiled")

VERSION, MAX_STALENESS = 1, 0  # tokens of version 0 do not train
EXACT = 1e-6  # relative; a log-probability of -4 is rounded by 2.4e-7, and so is the weight that its exp is


def advantages_of(trajectories):
    """In this file the reward of a trajectory is its advantage."""
    return np.array([t.reward for t in trajectories], np.float32)


def prox_twin(t):
    """The trajectory with log-probabilities of a proximal policy in the place of the behaviour policy's."""
    noise = np.random.default_rng(t.uid).normal(0.0, 0.3, len(t.tokens))
    return dataclasses.replace(t, behav_logprobs=(t.behav_logprobs + noise).astype(np.float32))


def with_prox(arrange, trajectories, **counts):
    """The minibatch that `arrange` makes of trajectories, each token's proximal log-probability beside it."""
    prox = arrange([prox_twin(t) for t in trajectories])
    return step.Minibatch.of(arrange(trajectories), prox_logprobs=[batch.behav_logprobs for batch in prox], **counts)


def packed(trajectories):
    layout = packing.Layout((32,), token_budget=64)
    advantages = advantages_of(trajectories)
    return packing.pack(trajectories, advantages, layout, version=VERSION, max_staleness=MAX_STALENESS)


def scattered(rows, length, microbatches, *, seed):
    """An arrangement in which each sequence, in random order, goes to a random row that has room for it."""

    def arrange(trajectories):
        rng, advantages = np.random.default_rng(seed), advantages_of(trajectories)
        batches = [packing.empty_batch(rows, length) for _ in range(microbatches)]
        ends = np.zeros((microbatches, rows), int)
        segments = np.zeros((microbatches, rows), int)
        for i in rng.permutation(len(trajectories)):
            m, r = place = tuple(rng.choice(np.argwhere(ends + len(trajectories[i]) <= length)))
            span = slice(ends[place], ends[place] + len(trajectories[i]))
            ends[place], segments[place] = span.stop, segments[place] + 1
            packing._write(
                batches[m], r, span, segments[place], trajectories[i], advantages[i], VERSION - MAX_STALENESS
            )
        return batches

    return arrange


def gradient_and_figures(programs, params, minibatch):
    """What an update comes to before its optimizer: the gradient, and the figures of its line in the log."""
    unmoved = copy.copy(programs)
    unmoved.apply = lambda state, grads: (state, {"grads": grads, "grad_norm": 0.0, "lr": 0.0})
    _, outcome = step.update(unmoved, TrainState(params, None), minibatch)
    return outcome.facts["grads"], journal.update_figures([minibatch], [outcome])


def assert_same(got, expected):
    """The gradient as a whole, and no parameter's far from it; every figure."""
    off = {name: np.asarray(got[0][name]) - value for name, value in expected[0].items()}
    assert optax.tree.norm(off) < EXACT * optax.tree.norm(expected[0])
    for name, value in expected[0].items():
        assert np.abs(off[name]).max() < 5 * EXACT * np.abs(value).max(), name
    assert got[1] == pytest.approx(expected[1], rel=EXACT)


@pytest.fixture(scope="module")
def trajectories(make_trajectories):
    """Advantages are about 1 on average, so that the loss is no difference of large sums."""
    made = make_trajectories(20, versions=(0, 3))
    return [
        dataclasses.replace(t, versions=np.minimum(t.versions, VERSION), reward=1 + np.sin(3 * t.uid + 1)) for t in made
    ]


@pytest.fixture(scope="module")
def expected(trajectories, params, make_programs):
    """Gradient and figures as the trainer packs them, on one device; everything that could go wrong is at work."""
    minibatch = with_prox(packed, trajectories)
    assert len(minibatch.batches) > 2 and minibatch.batches[0].segment_ids.max() > 1
    assert packing.loss_tokens(minibatch.batches) < sum(len(t.tokens) for t in trajectories)
    grads, figures = gradient_and_figures(make_programs(), params, minibatch)
    assert 0.1 < figures["ratio/clipped"] < 0.9 and figures["approx_kl"] > 0.01
    assert figures["behav_weight/mean"] != 1 and figures["entropy"] > 1 and abs(figures["loss"]) > 0.1
    assert all(np.abs(value).max() > 1e-4 for value in grads.values())
    return grads, figures


@pytest.mark.parametrize(
    ("rows", "length", "microbatches"),
    [(2, 32, 5), (8, 32, 2), (8, 32, 1)],
)
def test_rows_and_microbatches_change_nothing(
    rows, length, microbatches, trajectories, params, expected, make_programs
):
    minibatch = with_prox(scattered(rows, length, microbatches, seed=microbatches), trajectories)
    assert_same(gradient_and_figures(make_programs(), params, minibatch), expected)


@pytest.mark.parametrize(
    ("mesh", "rows", "length"),
    [
        ((2, 1, 1), 4, 64),
        ((4, 1, 1), 8, 32),
        ((8, 1, 1), 8, 32),
        ((1, 4, 1), 8, 32),
        ((2, 2, 2), 8, 32),
    ],
)
def test_shards_of_rows_and_params_and_longer_rows_change_nothing(
    mesh, rows, length, trajectories, params, expected, make_programs
):
    """Rows are split over data and fsdp, params and their gradient over fsdp (and tensor) as well."""
    programs = make_programs(mesh)
    minibatch = with_prox(scattered(rows, length, 2, seed=mesh[0] * mesh[1]), trajectories)
    assert_same(gradient_and_figures(programs, params, minibatch), expected)


def test_leaving_out_what_has_no_gradient_changes_neither_gradient_nor_loss(trajectories, params, make_programs):
    """A third of the trajectories has the advantage 0; the other figures are over the tokens that were computed."""
    gradless = [dataclasses.replace(t, reward=0.0) for t in trajectories[::3]]
    moving = [t for i, t in enumerate(trajectories) if i % 3]
    tokens = packing.loss_tokens(packed(gradless))
    programs = make_programs()

    def of(trajectories, **counts):
        return gradient_and_figures(programs, params, with_prox(packed, trajectories, **counts))

    everything, left_out, alone = of(gradless + moving), of(moving, gradless_tokens=tokens), of(moving)
    assert_same((left_out[0], {"loss": left_out[1]["loss"]}), (everything[0], {"loss": everything[1]["loss"]}))
    assert abs(alone[1]["loss"]) > 1.1 * abs(left_out[1]["loss"])
    assert {**left_out[1], "loss": 0} == {**alone[1], "loss": 0}
