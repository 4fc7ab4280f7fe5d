"""The benchmark of publishing with a tiny model: both transports run, and what is compared moves the same bytes."""

import json

import numpy as np
import pytest

from areal_jax import weights
from experiments import bench_weights
from tests.experiments.tiny import TINY


def test_a_plain_socket_brings_all_bytes():
    data = np.arange(300_001, dtype=np.uint8)
    with bench_weights.sending(data) as port:
        for _ in range(2):
            np.testing.assert_array_equal(bench_weights.receive(port, len(data)), data)
        with pytest.raises(AssertionError, match="ended after 300001 of 300002 bytes"):
            bench_weights.receive(port, len(data) + 1)


def test_copies_are_of_all_arrays():
    arrays = [np.ones(3), np.arange(4.0)]
    copies = bench_weights.Copies(arrays)
    arrays[1] += 1
    copies.into_old_arrays()
    arrays[1] += 1
    assert copies.into_old_arrays() > 0 and copies.into_new_arrays() > 0
    np.testing.assert_array_equal(copies._old[1], arrays[1])


def test_the_benchmark_runs(tmp_path):
    with bench_weights.both_sides(TINY) as sides:
        found = bench_weights.measure_shared_memory(sides, 0) | bench_weights.measure_stream(sides, 0)
        uncounted, turns = 2 * weights.KEPT, 2  # each; and one for the socket's bytes
        assert sides.version == sides.file.version == 2 * (uncounted + turns) + 1
        assert sides.file.size > found["stream"]["bytes"]
    for part in bench_weights.PARTS:
        assert set(found[part]["stages"]) == set(bench_weights.STAGES)
        assert sum(found[part]["stages"].values()) <= 1.5 * found[part]["publish_seconds"]
    assert found["vs_memcpy"] < 1 and found["vs_socket"] > 0
    results = {"default": found}
    json.dumps(results)
    bench_weights.plot(tmp_path / "stages.png", results)
    assert len(bench_weights.table(results).splitlines()) == 2 + 2 * 3
