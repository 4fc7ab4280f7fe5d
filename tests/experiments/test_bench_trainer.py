"""The arithmetic of the trainer's benchmark, and all of it on a tiny model; torch (slow) computes the same loss."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from areal_jax.models.huggingface import load_config
from areal_jax.models.tiled_attention import Tile
from areal_jax.models.transformer import TransformerConfig, param_shapes
from areal_jax.trainer import utilisation
from experiments import (
    bench_bound,
    bench_memory,
    bench_packing,
    bench_prox,
    bench_step_parts,
    bench_steps,
    bench_trainer,
)
from experiments.bench_trainer import Bench
from tests.experiments.tiny import ROW, TINY


@pytest.fixture(scope="module")
def bench():
    return Bench(TINY, {ROW: "none"})


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
    programs = bench_steps.make_programs(TINY, bench.trainer)
    state = SimpleNamespace(params=params)
    training = SimpleNamespace(model=model, config=bench.trainer, programs=programs, state=state)
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


def test_the_proximal_pass_computes_what_it_must_and_no_other_number(bench):
    work = bench_steps.rows_of_work(4, ROW, TINY.vocab_size)
    before = np.asarray(bench.training(ROW).state.params["embedding"])
    found = bench_prox.proximal_pass(bench.training(ROW), work.batches, 0)
    assert {n: of["calls"] for n, of in found.items()} == {"1": 0, "2": 2, "4": 3}  # of 4 microbatches
    assert all(of["own_difference"] < 1e-6 and of["pass_difference"] == 0 for of in found.values())
    assert np.any(np.asarray(bench.training(ROW).state.params["embedding"]) != before)  # the steps are real
    assert all(len(of["seconds"]["updates"]) == 2 for of in found.values())


def test_medians_of_steps_are_compared():
    steps = [bench_prox.Step(4.0, 2.0, 10.0, 2, 0.0, 0.0), bench_prox.Step(8.0, 2.0, 10.0, 2, 1e-7, 0.0)]
    found = bench_prox.described(steps, 4)
    assert found["over_whole_pass"] == 2 / 6 and found["over_updates"] == 2 / 10
    assert bench_prox.compared(found) == "first within 1.0e-07 nats, others bit-equal"


def test_rows_of_a_gpu_fit_by_the_plan():
    """Qwen2.5-1.5B in bfloat16, by hand of 16,384 tokens: W weights, 57,088 numbers of activations per token and layer.

    4 W + 4 W (gradients) + 8 W (moments) + 4 W (of a microbatch) + 2 W (cast), W = 1,543,714,304: 34.0 GB; activations
    without remat 16,384 * 28 * 57,088 * 2 bytes: 52.4 GB; logits 2 * 4 * 16,384 * 8,192 bytes: 1.1 GB.
    """
    model, config = load_config(bench_packing.QWEN2P5_1P5B), dataclasses.replace(bench_steps.TRAINER, dtype="bfloat16")
    config = dataclasses.replace(config, vocab_block=8192)
    planned = bench_memory.planned(model, config, 16_384)
    by_hand = 22 * 1_543_714_304 + 16_384 * (28 * 57_088 * 2 + 2 * 4 * 8192)
    assert sum(planned.values()) == pytest.approx(by_hand, rel=1e-6)
    allowed = bench_memory.LEAST_FIRST
    of_80_gb, of_141_gb = (bench_memory.SHARE * 0.92 * size for size in (80e9, 141e9))
    remats = [bench_memory.choose_remat(model, config, row, allowed, of_80_gb) for row in (4096, 8192, 16_384)]
    assert remats == ["none", "none", "dots"]
    assert bench_memory.choose_remat(model, config, 16_384, allowed, of_141_gb) == "none"
    with pytest.raises(ValueError, match=r"--rows has 16384, .* takes 41.0 GB with --remat=layers; .* 30.0 GB"):
        bench_memory.choose_remat(model, config, 16_384, allowed, 30e9)


def test_the_benchmark_runs(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_bound, "matmul_rate", lambda dtype: 1e9)
    monkeypatch.setitem(utilisation.PEAK_TFLOPS, "cpu", (0.004, 0.002))
    tiny = {"parameters": 1, "dtype": "float32"}
    tiny |= bench_trainer.measure_utilisation(bench, 0) | bench_trainer.measure_lengths(bench, 0)
    monkeypatch.setattr(bench_trainer, "TILES", (Tile(64, 64),))
    tiny |= bench_trainer.measure_tiles(bench, 0)
    results = {"tiny": tiny, "sizes": bench_trainer.measure_sizes({"tiny": TINY}, ROW, 0)}
    found = tiny["utilisation"]
    assert tiny["matmul_utilisation"] == pytest.approx(bench.work.flops(TINY) / found["step_seconds"] / 1e9)
    assert tiny["mfu"] == pytest.approx(tiny["matmul_utilisation"] / 2)
    assert sum(part["seconds"] for part in found["parts"].values()) == pytest.approx(found["step_seconds"])
    assert list(tiny["lengths"]) == [str(ROW)] and tiny["lengths"][str(ROW)]["peak_bytes"] > 1e8
    assert list(results["sizes"]) == ["tiny"]
    json.dumps(results)
    bench_trainer.plot(tmp_path / "trainer.png", results)
    table = bench_trainer.table(results)
    assert "MFU" in table
    assert (
        f"a row of {ROW}, by tile of queries x keys: 64 x 64 {tiny['tiles'][str(ROW)]['seconds']['64 x 64']:.3f} s"
        in table
    )
    assert "(chosen)" in table


@pytest.mark.slow
def test_torch_computes_the_same_step(bench):
    pytest.importorskip("torch", reason="pip install torch transformers")
    pytest.importorskip("transformers", reason="pip install torch transformers")
    _, found = bench_trainer.against_torch(bench, 2, 0)
    # The second loss is that after one update of each.
    np.testing.assert_allclose(found["losses"]["ours"], found["losses"]["theirs"], rtol=1e-5)
    assert found["padding_share"]["ours"] < found["padding_share"]["theirs"]
