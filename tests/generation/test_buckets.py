"""Which sequences share a prefill, and what it computes; by hand, and counted over log-normal lengths."""

import numpy as np
import pytest

from areal_jax.generation.buckets import PrefillShapes, default_buckets


def test_buckets_reach_the_limit():
    assert default_buckets(100) == (32, 64, 100)
    assert default_buckets(32) == (32,)
    assert default_buckets(20) == (20,)


@pytest.mark.parametrize(("length", "rows"), [(1, 8), (16, 8), (17, 4), (32, 4), (33, 2), (64, 2), (65, 1), (300, 1)])
def test_rows_are_what_the_token_budget_allows_of_the_bucket_and_at_least_one(length, rows):
    assert PrefillShapes((16, 32, 64, 128, 300), most_rows=8, most_tokens=130).rows(length) == rows


def test_groups_are_the_longest_together_each_within_the_budget():
    shapes = PrefillShapes((16, 32, 64), most_rows=4, most_tokens=64)
    lengths = [3, 40, 20, 5, 16, 31, 9, 64]
    # 64 | 40 | 31 20 | 16 9 5 3
    assert shapes.groups(lengths) == [[7], [1], [5, 2], [4, 6, 3, 0]]
    assert shapes.computed_tokens(lengths) == 64 + 64 + 2 * 32 + 4 * 16
    assert shapes.groups([]) == []


def test_rows_left_over_are_those_of_the_shortest():
    shapes = PrefillShapes((16, 64), most_rows=4, most_tokens=1000)
    assert shapes.groups([60, 3, 60, 60, 60]) == [[0, 2, 3, 4], [1]]
    assert shapes.computed_tokens([60, 3, 60, 60, 60]) == 4 * 64 + 4 * 16


def finer_buckets(max_length: int) -> tuple[int, ...]:
    powers = default_buckets(max_length)
    return tuple(sorted({*powers, *(3 * power // 2 for power in powers[:-1] if 3 * power // 2 < max_length)}))


@pytest.mark.parametrize(
    ("limit", "median", "computed_per_token", "saving", "programs"),
    [
        (512, 64, 1.72, 0.12, (5, 9)),
        (2048, 256, 1.72, 0.13, (7, 13)),
        (28672, 256, 2.01, 0.15, (11, 21)),
        (28672, 2000, 1.56, 0.15, (11, 21)),
    ],
)
def test_buckets_between_the_powers_would_save_an_eighth_and_double_the_programs(
    limit, median, computed_per_token, saving, programs
):
    """64 slots, log-normal lengths with p99/p50 = 8, 8 rows, 32,768 tokens: what `default_buckets` quotes."""
    rng = np.random.default_rng(0)
    houses = [np.clip(rng.lognormal(np.log(median), 0.9, 64), 1, limit).astype(int).tolist() for _ in range(200)]
    powers, finer = (
        sum(PrefillShapes(buckets, 8, 32768).computed_tokens(lengths) for lengths in houses)
        for buckets in (default_buckets(limit), finer_buckets(limit))
    )
    assert powers / sum(map(sum, houses)) == pytest.approx(computed_per_token, abs=0.03)
    assert 1 - finer / powers == pytest.approx(saving, abs=0.02)
    assert (len(default_buckets(limit)), len(finer_buckets(limit))) == programs
