"""The arithmetic of the trainer's benchmark, and all of it on a tiny model; torch (slow) computes the same loss."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from areal_jax.models.transformer import TransformerConfig, param_shapes
from experiments import bench_step_parts, bench_steps, bench_trainer
from experiments.bench_trainer import Bench
from tests.experiments.tiny import ROW, TINY


@pytest.fixture(scope="module")
def bench():
    return Bench("tiny", TINY, row=ROW, curve=(64, 96, 128))


def test_flops_of_a_step_by_hand():
    model = TransformerConfig(
        vocab_size=10, d_model=4, layers=1, heads=2, kv_heads=1, head_size=2, d_ff=3, tied_embeddings=True
    )
    rng = np.random.default_rng(0)
    work = bench_steps.Work([bench_steps.sequence(rng, length, 10) for length in (3, 5)], [])
    assert work.tokens == 8
    # 124 weights of products: query, key, value, out 48, feed-forward 36, head 40. Forward and backward: 6 each.
    # Attention: 3 * (2 for scores + 2 for values) * heads * head size over 1 + 2 + 3 and 1 + ... + 5 pairs.
    assert work.flops(model) == 6 * 124 * 8 + 3 * 4 * 2 * 2 * (6 + 15)


def test_rows_are_as_full_as_in_a_large_batch():
    work = bench_steps.rows_of_work(4, 2048, 100)
    assert [batch.tokens.shape for batch in work.batches] == [(1, 2048)] * 4
    assert 0.95 < work.tokens / (4 * 2048) <= 1
    assert sum(int(np.count_nonzero(batch.segment_ids)) for batch in work.batches) == work.tokens
    assert sum(int(batch.loss_mask.sum()) for batch in work.batches) == work.tokens - len(work.sequences)


def test_the_flops_of_the_parts_are_those_of_the_step(bench):
    model = dataclasses.replace(TINY, layers=3)
    params = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in param_shapes(model).items()}
    put = SimpleNamespace(put=lambda batch, names: {name: getattr(batch, name) for name in names})
    training = SimpleNamespace(model=model, programs=put, state=SimpleNamespace(params=params))
    parts = bench_step_parts.make_parts(training, bench.work.batches[0])
    assert sum(part.times * part.flops for part in parts.values()) == pytest.approx(bench.work.flops(model))
    assert parts["head"].flops == 6 * 32 * 16 * bench.work.tokens
    weights = 16 * 8 * 4 * 2 + 16 * 8 * 2 * 2 + 3 * 16 * 24  # query and out, key and value, feed-forward
    assert parts["layer products"].flops == 6 * weights * bench.work.tokens
    assert parts["layer products"].times == parts["attention"].times == 3


def test_what_no_part_takes_is_the_rest_and_what_no_flop_takes_is_lost():
    parts = {"a": bench_step_parts.Part(lambda: None, 3, 10.0), "b": bench_step_parts.Part(lambda: None, 1, 0.0)}
    found = bench_step_parts.compared(parts, {"a": 2.0, "b": 1.0}, 8.0, 10.0)
    assert found["a"] == {"seconds": 6.0, "at_the_matmul_rate": 3.0, "lost": 3.0, "share": 0.75}
    assert found["b"]["lost"] == 1.0
    assert found["rest"]["seconds"] == found["rest"]["lost"] == 1.0


def test_the_benchmark_runs(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_trainer, "matmul_rate", lambda: 1e9)
    results = {"default": {"parameters": 1, **bench_trainer.measure_utilisation(bench, 0)}}
    results["sizes"] = bench_trainer.measure_sizes({"tiny": TINY}, ROW, 0)
    monkeypatch.setattr(bench_trainer, "speed", lambda training, row, seconds: results["sizes"]["tiny"])
    results["default"] |= bench_trainer.measure_lengths(bench, 0)
    found = results["default"]["utilisation"]
    assert results["default"]["matmul_utilisation"] == pytest.approx(
        bench.work.flops(TINY) / found["step_seconds"] / 1e9
    )
    assert sum(part["seconds"] for part in found["parts"].values()) == pytest.approx(found["step_seconds"])
    assert list(results["default"]["lengths"]) == ["64", "96"]  # no time was left for the third
    json.dumps(results)
    bench_trainer.plot(tmp_path / "trainer.png", results)
    assert "utilisation" in bench_trainer.table(results)


@pytest.mark.slow
def test_torch_computes_the_same_step(bench):
    pytest.importorskip("torch", reason="pip install torch transformers")
    pytest.importorskip("transformers", reason="pip install torch transformers")
    _, found = bench_trainer.against_torch(bench, 2, 0)
    # The second loss is that after one update of each.
    np.testing.assert_allclose(found["losses"]["ours"], found["losses"]["theirs"], rtol=1e-5)
    assert found["padding_share"]["ours"] < found["padding_share"]["theirs"]
