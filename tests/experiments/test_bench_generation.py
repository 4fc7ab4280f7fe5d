"""The arithmetic of the generation benchmark: its tail, its bound, its turns; and what it asks of the engine."""

import dataclasses

import numpy as np
import pytest

from areal_jax.models.transformer import TransformerConfig
from experiments import bench_bound, bench_generation, bench_products, bench_swap
from experiments.bench_workload import SMOLLM2_135M, long_tailed, make_bench, serve, serving, tail, take_turns


def test_lengths_are_log_normal_with_the_tail_that_is_claimed():
    lengths = long_tailed(10_001, 100, 1.0)
    assert np.median(lengths) == 100
    assert tail(lengths) == pytest.approx(np.exp(2.326), rel=0.01)  # p99 / p50 = exp(sigma * 2.326) = 10.2
    assert tail(long_tailed(192, 24, 1.0)) >= 8 and tail(long_tailed(512, 5, 1.0)) >= 8


def test_bound_is_the_larger_of_bytes_and_products():
    config = TransformerConfig(
        vocab_size=10, d_model=4, layers=1, heads=2, kv_heads=1, head_size=2, d_ff=3, tied_embeddings=True
    )
    # kernels: query 4*4, key 4*2, value 4*2, out 4*4, gate, up, down 3*12 = 84; head 40; norms 3*4
    assert bench_bound.weight_counts(config) == (124, 136)
    assert bench_bound.cache_bytes(config, "float32") == 2 * 1 * 1 * 2 * 4
    slow_memory = bench_bound.Rates(bytes_per_s=1.0, flops_per_s=1e9)
    assert bench_bound.bound(config, "float32", 2, 5, slow_memory) == 136 * 4 + 2 * 5 * 16
    slow_products = bench_bound.Rates(bytes_per_s=1e9, flops_per_s=1.0)
    assert bench_bound.bound(config, "float32", 2, 5, slow_products) == 2 * 2 * 124 + 4 * 2 * 5 * 1 * 2 * 2


def test_recomputes_leave_the_time_that_they_do_not_take_at_the_matmul_rate():
    config = TransformerConfig(
        vocab_size=10, d_model=4, layers=1, heads=2, kv_heads=1, head_size=2, d_ff=3, tied_embeddings=True
    )
    # 84 weights, twice each, for 5 of 10 tokens a second
    assert bench_swap.recompute_at_most(config, 5.0, 10 * 2 * 84.0) == 0.5
    assert bench_swap.recompute_at_most(config, 50.0, 10 * 2 * 84.0) == 0.0


def test_the_shape_is_that_of_smollm2_135m():
    assert bench_bound.weight_counts(SMOLLM2_135M)[1] == 134_515_008  # its parameters, as transformers counts them
    assert bench_bound.cache_bytes(SMOLLM2_135M, "float32") == 46_080


def test_settings_take_turns_at_least_twice():
    order = []
    found = take_turns({"a": lambda: order.append("a") or 1.0, "b": lambda: order.append("b") or 2.0}, 0.0)
    assert order == ["a", "b", "a", "b"] and found == {"a": [1.0, 1.0], "b": [2.0, 2.0]}


def test_every_request_ends_at_its_length_and_nowhere_before():
    bench = dataclasses.replace(make_bench("default", "float32"), requests=12, slots=4)
    with serving(bench, bench.slots, bench.longest) as scheduler:
        answers = serve(bench, scheduler, range(12))
    assert {uid: len(tokens) for uid, tokens in answers.items()} == dict(enumerate(bench.lengths))


def test_memory_agrees_with_arithmetic(monkeypatch):
    bench = make_bench("default", "float32")
    found = bench_bound.check_memory(bench)
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head size, bytes
    assert found["cache_bytes_per_token"] == found["cache_bytes_per_token_expected"] == per_token
    assert found["cache_bytes_per_slot"] == found["cache_bytes_per_slot_expected"] == 128 * per_token
    monkeypatch.setattr(bench_bound, "cache_bytes", lambda config, dtype: per_token - 1)
    with pytest.raises(AssertionError, match="cache_bytes_per_token_expected': 1023"):
        bench_bound.check_memory(bench)


def test_a_table_shows_what_was_measured_and_nothing_else():
    static = {"vs_static": 2.5, "vs_static_narrow": 2.0, "static": {"slots": 4}}
    cache = {"cache_bytes_per_token": 1024.0, "cache_bytes_per_slot": 131072.0}
    memory = {
        "cache_dtype": "float32",
        "slot_tokens": 128,
        **cache,
        **{f"{k}_expected": int(v) for k, v in cache.items()},
    }
    measured = {"memory": memory, **static}
    results = {"default": {"dtype": "float32", "vs_static": 2.5, "float32": measured}}
    assert bench_generation.table(results).splitlines()[1:] == [
        "default, float32",
        "  cache, float32: 1,024 bytes per token, computed 1,024",
        "  cache, float32: 131,072 bytes per slot of 128 tokens, computed 131,072",
        "  over static batching 2.50 (4 slots; 2.00 over waves that end in the narrow step)",
    ]


def test_a_model_is_rated_by_the_best_of_both_sides():
    rates = {
        "float32": {"ours": 60.0, "arrival": 20.0, "length": 40.0},
        "bfloat16": {"ours": 90.0, "arrival": 25.0, "length": 30.0},
    }
    found = {
        dtype: {
            "vs_huggingface": of["ours"] / of["arrival"],
            "huggingface": {"tokens_per_second": of},
            "over_bound": {"8": place},
        }
        for place, (dtype, of) in enumerate(rates.items())
    }
    ratios = {"vs_huggingface": 90 / 25, "vs_huggingface_sorted": 90 / 40, "over_bound": {"8": 1}}
    assert bench_generation.best(found) == {"dtype": "bfloat16", **ratios}
    assert bench_generation.best({"bfloat16": {"vs_static": 2.0}}) == {"dtype": "bfloat16", "vs_static": 2.0}
    found["float32"]["vs_static"] = 2.0  # which was measured in this dtype only
    assert bench_generation.best(found) == {"dtype": "bfloat16", **ratios, "vs_static": 2.0}


def test_other_libraries_are_given_every_product_of_a_step():
    bench = make_bench("default", "float32")
    kernels_IO = bench_products.kernels(bench.config, bench.params)
    assert sum(kernel_IO.size for kernel_IO in kernels_IO) == bench_bound.weight_counts(bench.config)[0]
    c = bench.config
    assert {kernel_IO.shape[0] for kernel_IO in kernels_IO} == {c.d_model, c.heads * c.head_size, c.d_ff}
