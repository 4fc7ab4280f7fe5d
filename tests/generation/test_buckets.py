"""Which sequences share a prefill, and what it computes; by hand, and counted over log-normal lengths."""

import numpy as np
import pytest

from areal_jax.generation.buckets import PrefillShapes, default_buckets


def test_buckets_reach_the_limit():
    assert default_buckets(100) == (32, 64, 100)
    assert default_buckets(32) == (32,)
    assert default_buckets(20) == (20,)


@pytest.mark.parametrize(("bucket", "rows"), [(16, 8), (32, 4), (64, 2), (128, 1), (300, 1)])
def test_rows_are_what_the_token_budget_allows_of_the_bucket_and_at_least_one(bucket, rows):
    shapes = PrefillShapes((16, 32, 64, 128, 300), most_rows=8, most_tokens=130)
    assert shapes.most(bucket) == rows
    assert shapes.shape([bucket] * 3) == (rows, bucket)
    assert shapes.shape([bucket - 1]) == (1, bucket)


def test_groups_are_the_longest_together_each_within_the_budget():
    shapes = PrefillShapes((16, 32, 64), most_rows=4, most_tokens=64)
    lengths = [3, 40, 20, 5, 16, 31, 9, 64]
    # 64 | 40 | 31 20 | 16 9 5 3
    assert shapes.groups(lengths) == [[7], [1], [5, 2], [4, 6, 3, 0]]
    assert shapes.computed_tokens(lengths) == 64 + 64 + 2 * 32 + 4 * 16
    assert shapes.groups([]) == []


def test_rows_go_alone_where_that_computes_less():
    shapes = PrefillShapes((16, 64), most_rows=4, most_tokens=1000)
    assert shapes.groups([60, 3, 60, 60, 60]) == [[0, 2, 3, 4], [1]]
    assert shapes.computed_tokens([60, 3, 60, 60, 60]) == 4 * 64 + 16
    assert shapes.groups([60, 60, 60, 3, 3]) == [[0], [1], [2], [3], [4]]
    assert shapes.computed_tokens([60, 60, 60, 3, 3]) == 3 * 64 + 2 * 16
    assert shapes.groups([60, 10, 9, 3, 3]) == [[0], [1, 2, 3, 4]]  # alone as little as together: together
    assert shapes.computed_tokens([60, 10, 9, 3, 3]) == 64 + 4 * 16


def finer_buckets(max_length: int) -> tuple[int, ...]:
    powers = default_buckets(max_length)
    return tuple(sorted({*powers, *(3 * power // 2 for power in powers[:-1] if 3 * power // 2 < max_length)}))


@pytest.mark.parametrize(
    ("limit", "median", "computed_per_token", "saving", "programs"),
    [
        (512, 64, 1.41, 0.15, (5, 9)),
        (2048, 256, 1.40, 0.16, (7, 13)),
        (28672, 256, 1.44, 0.17, (11, 21)),
        (28672, 2000, 1.42, 0.16, (11, 21)),
    ],
)
def test_buckets_between_the_powers_would_save_a_sixth_and_double_the_programs(
    limit, median, computed_per_token, saving, programs
):
    """64 slots, log-normal lengths with p99/p50 = 8, 8 rows, 32,768 tokens: what `default_buckets` quotes."""
    rng = np.random.default_rng(0)
    houses = [np.clip(rng.lognormal(np.log(median), 0.9, 64), 1, limit).astype(int).tolist() for _ in range(200)]
    powers, finer = (
        sum(PrefillShapes(buckets, 8, 32768).computed_tokens(lengths) for lengths in houses)
        for buckets in (default_buckets(limit), finer_buckets(limit))
    )
    assert powers / sum(map(sum, houses)) == pytest.approx(computed_per_token, abs=0.02)
    assert 1 - finer / powers == pytest.approx(saving, abs=0.02)
    assert (len(default_buckets(limit)), len(finer_buckets(limit))) == programs
