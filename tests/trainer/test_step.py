import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax import compilation
from areal_jax.algorithms import packing
from areal_jax.models import logprobs, transformer
from areal_jax.trainer import step
from areal_jax.trainer.state import copies, initial_state

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LENGTH, BUDGET = 32, 64  # two rows of 32 tokens on one device


def gradient_and_sums(programs, params, minibatch):
    """The accumulated gradient and the metric sums of a minibatch, without the optimizer."""
    grads, total = programs.zeros(), {}
    inverse = np.float32(1 / packing.loss_tokens(minibatch.batches))
    for batch in minibatch.batches:
        rows = programs.put(batch, step.TRAINED)
        rows["prox_logprobs"] = jax.device_put(batch.behav_logprobs, programs.rows_sharding)
        grads, sums, _ = programs.accumulate(params, grads, rows, inverse, programs.with_own_prox(False))
        total = {name: total.get(name, 0.0) + float(value) for name, value in sums.items()}
    return grads, total


def assert_same_gradient(got, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def trajectories(make_trajectories):
    return make_trajectories(9)


@pytest.fixture(scope="module")
def one_by_one(trajectories, params, model_config):
    """Slow twin: gradient and loss of every sequence by itself, whole logits and plain PPO, added up in Python."""

    @jax.jit
    @jax.value_and_grad
    def loss(params, tokens_L, behav_L, advantage, start, end):
        positions_L = jnp.arange(16)
        model = transformer.bind(transformer.graph(model_config), params)
        logits_LV = model.logits(model(tokens_L[None], positions_L[None], jnp.ones((1, 16), jnp.int32)))[0]
        logp_L = jnp.roll(jax.nn.log_softmax(logits_LV)[positions_L, jnp.roll(tokens_L, -1)], 1)
        ratio_L = jnp.exp(logp_L - behav_L)
        objective_L = jnp.minimum(ratio_L * advantage, jnp.clip(ratio_L, 0.8, 1.2) * advantage)
        return -jnp.sum(objective_L, where=(positions_L >= start) & (positions_L < end))

    tokens = sum(len(t.tokens) for t in trajectories)
    grads, total = {name: np.zeros_like(value) for name, value in params.items()}, 0.0
    for t in trajectories:
        start, end = len(t.prompt_tokens), len(t)
        padded = [
            np.pad(x, (0, 16 - end))
            for x in (np.append(t.prompt_tokens, t.tokens), np.pad(t.behav_logprobs, (start, 0)))
        ]
        value, more = loss(params, *padded, np.sin(3 * t.uid + 1), start, end)
        grads = {name: grads[name] + np.asarray(more[name]) / tokens for name in grads}
        total += float(value)
    return grads, total


def test_packed_gradient_is_that_of_each_sequence_by_itself(
    trajectories, params, one_by_one, make_programs, make_minibatch
):
    programs = make_programs()
    minibatch = make_minibatch(trajectories, LENGTH, BUDGET)
    assert len(minibatch.batches) > 1 and minibatch.batches[0].segment_ids.max() > 1
    grads, sums = gradient_and_sums(programs, params, minibatch)
    assert_same_gradient(grads, one_by_one[0])
    assert sums["loss"] == pytest.approx(one_by_one[1], rel=1e-5)
    assert sums["tokens"] == sum(len(t.tokens) for t in trajectories)
    assert sums["clipped"] > 0


def test_order_of_sequences_changes_nothing(trajectories, params, one_by_one, make_programs, make_minibatch):
    mixed = [trajectories[i] for i in np.random.default_rng(5).permutation(len(trajectories))]
    grads, sums = gradient_and_sums(make_programs(), params, make_minibatch(mixed, LENGTH, BUDGET))
    assert_same_gradient(grads, one_by_one[0])
    assert sums["loss"] == pytest.approx(one_by_one[1], rel=1e-5)


def test_one_large_microbatch_changes_nothing(trajectories, params, one_by_one, make_programs, make_minibatch):
    minibatch = make_minibatch(trajectories, LENGTH, 8 * LENGTH)
    assert len(minibatch.batches) == 1
    assert_same_gradient(gradient_and_sums(make_programs(), params, minibatch)[0], one_by_one[0])


def test_update_is_adamw_on_the_mean_gradient(
    trajectories, params, one_by_one, make_programs, make_minibatch, fresh_state
):
    programs = make_programs()
    minibatch = step.with_behav_as_prox([make_minibatch(trajectories, LENGTH, BUDGET)])[0]
    moved, outcome = step.update(programs, fresh_state(programs), minibatch)
    grads = one_by_one[0]
    norm = float(optax.tree.norm(grads))
    assert float(outcome.facts["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    assert float(outcome.facts["lr"]) == pytest.approx(1e-2)
    for name, value in params.items():
        clipped = np.asarray(grads[name]) / max(1.0, norm)
        decay = 0.0 if name.endswith("scale") else 0.05
        expected = value - 1e-2 * (clipped / (np.abs(clipped) + 1e-5) + decay * value)
        # Where a gradient is about eps, Adam turns its rounding into a large share of the step.
        firm = np.abs(clipped) > 1e-4
        np.testing.assert_allclose(np.asarray(moved.params[name])[firm], expected[firm], atol=1e-4, err_msg=name)


def row(*sequences):
    """One packed row of 8 tokens."""
    batch = packing.empty_batch(2, LENGTH)
    start = 0
    for segment, tokens in enumerate(sequences, start=1):
        span = slice(start, start + len(tokens))
        batch.tokens[0, span], batch.segment_ids[0, span] = tokens, segment
        batch.positions[0, span] = range(len(tokens))
        start = span.stop
    return batch


def logprobs_of(programs, params, batch):
    return programs.logprobs(params, programs.put(batch, step.CONTEXT), programs.scalars["temperature"])


def row_logprobs(programs, params, batch):
    return np.asarray(logprobs_of(programs, params, batch))[0]


def test_changing_one_sequence_moves_no_logprob_of_the_next(params, make_programs):
    programs = make_programs()
    first = row_logprobs(programs, params, row([3, 4, 5, 1], [6, 7]))
    other = row_logprobs(programs, params, row([9, 4, 5, 1], [6, 7]))
    assert (first[1:4] != other[1:4]).all()
    assert first[5] == other[5]  # E given D; D given the sequence before is in no loss
    alone = row_logprobs(programs, params, row([6, 7]))
    np.testing.assert_allclose(first[5], alone[1], rtol=1e-5)


def test_temperature_divides_the_logits(params, model_config, make_programs):
    programs = make_programs()
    batch = row([3, 4, 5, 6, 7])
    got = programs.logprobs(params, programs.put(batch, step.CONTEXT), np.float32(0.5))
    model = transformer.bind(transformer.graph(model_config), jax.tree.map(jnp.asarray, params))
    logits = model.logits(model(batch.tokens[:1, :5], batch.positions[:1, :5], batch.segment_ids[:1, :5]))[0]
    expected = jax.nn.log_softmax(logits / 0.5)[np.arange(4), batch.tokens[0, 1:5]]
    np.testing.assert_allclose(np.asarray(got)[0, 1:5], expected, rtol=1e-5, atol=1e-6)


def test_logits_of_the_worked_example_at_half_temperature():
    # [1, 0, -1, -2] / 0.5 = [2, 0, -2, -4]: 2 - log(e^2 + 1 + e^-2 + e^-4) = -0.1451.
    got, _ = logprobs.from_logits(jnp.array([1.0, 0, -1, -2]), jnp.array(0), temperature=0.5)
    assert float(got) == pytest.approx(-0.1451, abs=5e-5)


def run_step(programs, state, minibatches, prox):
    for minibatch in prox(minibatches):
        state, outcome = step.update(programs, state, minibatch)
    return state, outcome


def test_first_minibatch_needs_no_proximal_pass_bit_for_bit(
    make_trajectories, make_programs, make_minibatch, fresh_state
):
    programs = make_programs()
    parts = [make_minibatch(make_trajectories(6, seed=seed), LENGTH, BUDGET) for seed in range(3)]
    state = fresh_state(programs)

    def full_recomputation(minibatches):
        return [
            dataclasses.replace(m, prox_logprobs=[logprobs_of(programs, state.params, batch) for batch in m.batches])
            for m in minibatches
        ]

    expected, _ = run_step(programs, state, parts, full_recomputation)
    state = fresh_state(programs)
    spared = step.with_prox_logprobs(programs, state.params, parts)
    assert [len(m.prox_logprobs) for m in spared] == [0, len(parts[1].batches), len(parts[2].batches)]
    got, outcome = run_step(programs, state, spared, list)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert float(outcome.sums[0]["ratio"]) != float(outcome.sums[0]["tokens"])  # later minibatches have moved off prox


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_proximal_pass_is_made_of_all_minibatches_but_the_first(
    count, make_trajectories, make_programs, make_minibatch, fresh_state
):
    programs, passes = make_programs(), []
    parts = [make_minibatch(make_trajectories(3 + 3 * seed, seed=seed), LENGTH, BUDGET) for seed in range(count)]

    def counted_pass(params, rows, temperature):
        passes.append(programs.logprobs(params, rows, temperature))
        return passes[-1]

    counted = copy.copy(programs)
    counted.logprobs = counted_pass
    state = fresh_state(programs)
    expected = [[np.asarray(logprobs_of(programs, state.params, b)) for b in part.batches] for part in parts]
    minibatches = step.with_prox_logprobs(counted, state.params, parts)
    outcomes = []
    for minibatch in minibatches:
        state, outcome = step.update(counted, state, minibatch)
        outcomes.append(outcome)
    assert len(passes) == sum(len(part.batches) for part in parts[1:])
    got = [outcomes[0].logprobs, *(minibatch.prox_logprobs for minibatch in minibatches[1:])]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), expected)


def test_with_one_minibatch_the_ratio_is_exactly_one(trajectories, make_programs, make_minibatch, fresh_state):
    programs = make_programs()
    state = fresh_state(programs)
    (minibatch,) = step.with_prox_logprobs(programs, state.params, [make_minibatch(trajectories, LENGTH, BUDGET)])
    _, outcome = step.update(programs, state, minibatch)
    for sums in outcome.sums:
        assert sums["ratio"] == sums["tokens"] and sums["clipped"] == 0 and sums["approx_kl"] == 0
        assert sums["behav_weight"] != sums["tokens"]


def test_naive_mode_takes_behav_as_prox(trajectories, make_programs, make_minibatch, fresh_state):
    programs = make_programs()
    (minibatch,) = step.with_behav_as_prox([make_minibatch(trajectories, LENGTH, BUDGET)])
    _, outcome = step.update(programs, fresh_state(programs), minibatch)
    for sums in outcome.sums:
        assert sums["behav_weight"] == sums["tokens"] and sums["behav_weight_max"] == 1
        assert sums["ratio"] != sums["tokens"]


def test_gradient_that_is_not_finite_changes_nothing(trajectories, make_programs, make_minibatch, fresh_state):
    programs = make_programs()
    minibatch = make_minibatch(trajectories, LENGTH, BUDGET)
    minibatch.batches[0].advantages[:] = np.where(minibatch.batches[0].loss_mask > 0, np.inf, 0)
    before = jax.device_get(fresh_state(programs))
    after, outcome = step.update(programs, fresh_state(programs), minibatch)
    assert bool(outcome.facts["skipped"]) and not np.isfinite(outcome.facts["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)


def test_minibatch_without_a_trainable_token_is_finite(trajectories, make_programs, make_minibatch, fresh_state):
    programs = make_programs()
    minibatch = make_minibatch(trajectories, LENGTH, BUDGET)
    for batch in minibatch.batches:
        batch.loss_mask[:] = 0
    _, outcome = step.update(programs, fresh_state(programs), minibatch)
    assert float(outcome.facts["grad_norm"]) == 0 and not bool(outcome.facts["skipped"])


def test_zero_learning_rate_moves_no_bit(trajectories, params, make_programs, make_minibatch, fresh_state):
    programs = make_programs(lr=0.0)
    minibatch = make_minibatch(trajectories, LENGTH, BUDGET)
    state, first = step.update(programs, fresh_state(programs), minibatch)
    for _ in range(3):
        state, last = step.update(programs, state, minibatch)
    for name, value in params.items():
        np.testing.assert_array_equal(state.params[name], value)
    jax.tree.map(np.testing.assert_array_equal, last.logprobs, first.logprobs)


def test_exported_copy_outlives_the_donated_state(trajectories, params, make_programs, make_minibatch, fresh_state):
    programs = make_programs()
    state = fresh_state(programs)
    copy = programs.export(state.params)
    moved, _ = step.update(programs, state, make_minibatch(trajectories, LENGTH, BUDGET))
    assert all(value.is_deleted() for value in state.params.values())
    for name, value in params.items():
        np.testing.assert_array_equal(copy[name], value)
        assert not np.array_equal(moved.params[name], value)


def test_params_handed_in_outlive_the_donated_state(trajectories, params, make_programs, make_minibatch):
    programs = make_programs()
    given = jax.device_put(params, jax.devices()[0])
    state = initial_state(copies(given, programs.abstract.params), programs.abstract, programs.optimizer)
    step.update(programs, state, make_minibatch(trajectories, LENGTH, BUDGET))
    for name, value in params.items():
        np.testing.assert_array_equal(given[name], value)


def test_bfloat16_computes_with_float32_masters(
    trajectories, params, one_by_one, make_programs, make_minibatch, fresh_state
):
    programs = make_programs(dtype="bfloat16", export="bfloat16")
    grads, sums = gradient_and_sums(programs, params, make_minibatch(trajectories, LENGTH, BUDGET))
    assert {value.dtype.name for value in grads.values()} == {"float32"}
    assert sums["loss"] == pytest.approx(one_by_one[1], rel=0.05) and sums["loss"] != pytest.approx(
        one_by_one[1], rel=1e-6
    )
    state, _ = step.update(programs, fresh_state(programs), make_minibatch(trajectories, LENGTH, BUDGET))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert {value.dtype.name for value in programs.export(state.params).values()} == {"bfloat16"}


def test_bfloat16_is_only_inside_the_forward_pass(make_programs):
    programs = make_programs(dtype="bfloat16", export="bfloat16")
    params, number = programs.abstract.params, jax.ShapeDtypeStruct((), np.float32)
    rows, scalars = programs._abstract_rows((2, LENGTH)), programs.with_own_prox(False)
    results = jax.eval_shape(programs.accumulate, params, params, rows, number, scalars)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(results)} == {"float32"}  # gradient, loss and sums, logprobs
    state, facts = jax.eval_shape(programs.apply, programs.abstract, results[0])
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    assert {leaf.dtype.name for leaf in jax.tree.leaves([state.params, moments])} == {"float32"}
    assert facts["grad_norm"].dtype == "float32"


def test_nothing_compiles_after_warmup_whatever_lengths_come(make_trajectories, make_programs, fresh_state):
    programs = make_programs(beta1=0.8)  # programs of its own
    state = fresh_state(programs)
    layout = packing.make_layout((), max_length=64, token_budget=128)
    programs.compile(layout.shapes)
    compiled, seen = compilation.count(), []
    for seed, longest in enumerate([8, 30, 60, 12, 20, 45]):
        trajectories = make_trajectories(1 + 7 * (seed % 3), seed=seed, longest=longest)
        advantages = np.ones(len(trajectories), np.float32)
        minibatch = step.Minibatch.of(packing.pack(trajectories, advantages, layout, version=1, max_staleness=9))
        seen.append(minibatch.batches)
        without_gradient = step.Minibatch.of([], gradless_tokens=5)
        minibatches = step.with_prox_logprobs(programs, state.params, [minibatch, without_gradient, minibatch])
        for m in [*minibatches, *step.with_behav_as_prox([minibatch])]:
            state, outcome = step.update(programs, state, m)
        jax.device_get((outcome, programs.export(state.params)))
    assert {batch.tokens.shape for batches in seen for batch in batches} == set(layout.shapes) == {(4, 32), (2, 64)}
    assert len({len(batches) for batches in seen}) > 2
    assert compilation.count() == compiled
