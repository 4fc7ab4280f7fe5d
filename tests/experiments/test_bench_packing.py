"""The arithmetic of the packing benchmark, and all of it at a small size."""

import json

import numpy as np
import pytest

from areal_jax.algorithms.packing import make_layout, pack, padding_share
from areal_jax.models import flops
from areal_jax.models.transformer import TransformerConfig
from experiments import bench_packing, bench_steps
from experiments.bench_packing import cost, fixed, fixed_sorted, packed
from tests.experiments.tiny import ROW, TINY

BY_HAND = TransformerConfig(
    vocab_size=10, d_model=4, layers=1, heads=2, kv_heads=1, head_size=2, d_ff=3, tied_embeddings=True
)


def test_lengths_are_those_of_the_paper():
    lengths = bench_steps.paper_lengths(np.random.default_rng(0), 100_000)
    assert lengths.min() == 1024 and lengths.max() == 28672
    assert np.median(lengths) == pytest.approx((1024 * 28672) ** 0.5, rel=0.01)
    # Either end lies two standard deviations from the middle: 2.3 % are beyond and cut off.
    assert np.mean(lengths == 28672) == pytest.approx(0.0228, abs=0.002)
    scaled = bench_steps.paper_lengths(np.random.default_rng(0), 100_000, 64)
    np.testing.assert_array_equal(scaled, lengths // 64)


def test_fixed_microbatches_by_hand():
    lengths = np.array([5, 3, 4, 9, 2])
    planned = fixed(lengths, sequences=2)
    assert planned.shapes == [(2, 5), (2, 9), (1, 2)]
    assert planned.pairs == 2 * 15 + 2 * 45 + 3
    found = cost([lengths], lambda lengths: fixed(lengths, sequences=2))
    assert (found.tokens, found.computed, found.largest) == (23, 10 + 18 + 2, 18)
    assert found.pairs == planned.pairs
    assert found.padding_share == pytest.approx(7 / 30)
    assert fixed_sorted(lengths, sequences=2).shapes == [(2, 3), (2, 5), (1, 9)]


@pytest.mark.parametrize("shards", [1, 3])
def test_packed_shapes_are_those_of_the_trainer(shards):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 40, 30)
    layout = make_layout((), max_length=40, token_budget=130, shards=shards)
    sequences = [bench_steps.sequence(rng, int(length), 10) for length in lengths]
    batches = pack(sequences, np.ones(30), layout, version=0, max_staleness=0)
    assert packed(lengths, layout=layout).shapes == [batch.tokens.shape for batch in batches]
    assert cost([lengths], lambda lengths: packed(lengths, layout=layout)).padding_share == pytest.approx(
        padding_share(batches)
    )


def test_without_padding_the_computed_flops_are_the_models():
    lengths = np.array([3, 5])
    pairs = float(bench_packing.causal(lengths).sum())
    assert pairs == 6 + 15
    # 124 weights of products: query, key, value, out 48, feed-forward 36, head 40; 4 * heads * head size = 16.
    assert bench_packing.computed_flops(BY_HAND, 8, pairs) == 3 * (2 * 124 * 8 + 16 * 21)
    assert bench_packing.computed_flops(BY_HAND, 8, pairs) == flops.train_flops(BY_HAND, lengths)


def test_padding_is_under_five_percent_at_the_papers_scale():
    minibatch = bench_packing.paper_minibatches(seed=0)[0]
    assert len(minibatch) == 2048
    costs = {name: cost([minibatch], plan) for name, plan in bench_packing.plans().items()}
    assert costs["packed"].padding_share < 0.05 and costs["packed"].distinct_shapes == 1
    assert costs["packed"].largest == 32768
    assert costs["packed, 16 shards"].padding_share < 0.05  # the rows that fill the last microbatch up among it
    assert costs["packed, 16 shards"].largest == 16 * 32768
    assert costs["fixed"].padding_share > 0.3


def test_a_padded_microbatch_has_a_row_for_each_sequence():
    rng = np.random.default_rng(0)
    sequences = [bench_steps.sequence(rng, length, 10) for length in (4, 2, 7)]
    batch = bench_steps.padded(sequences)
    assert batch.tokens.shape == (3, 7)
    assert batch.segment_ids.sum(axis=1).tolist() == [4, 2, 7]
    assert batch.loss_mask.sum(axis=1).tolist() == [3, 1, 6]  # all but the first


def test_the_papers_part_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_packing, "BATCHES", 1)
    monkeypatch.setattr(bench_packing, "BATCH", 64)
    monkeypatch.setattr(bench_packing, "MINIBATCH_SIZES", (16,))
    results = bench_packing.measure_paper(0)
    assert 0 <= results["padding_share"] < 0.3
    ours = results["paper"]["plans"]["packed"]
    assert ours["tokens_over_packed"] == ours["flops_over_packed"] == 1
    json.dumps(results)
    bench_packing.plot(tmp_path / "packing.png", results)
    assert len(bench_packing.table(results).splitlines()) == 1 + len(bench_packing.plans())


@pytest.mark.slow
def test_both_ways_have_one_loss(monkeypatch):
    monkeypatch.setattr(bench_packing, "MODEL", TINY)
    monkeypatch.setattr(bench_packing, "SCALES", (bench_steps.TOKEN_BUDGET // ROW,))
    monkeypatch.setattr(bench_packing, "MEASURED_SEQUENCES", 4)  # one fixed microbatch
    results = bench_packing.measure_measured(0)
    losses = results["measured"][str(ROW)]["first_loss"]
    assert losses["packed"] == pytest.approx(losses["fixed"], rel=1e-5)
    assert losses["packed"] > 0.9 * np.log(TINY.vocab_size)
    assert results["vs_fixed"] > 0
    assert bench_packing.table(results).startswith("packed over fixed")
