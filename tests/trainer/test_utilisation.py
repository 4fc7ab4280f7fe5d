"""Model FLOPs per second, their share of the peak, and device memory, as a step's line has them."""

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.algorithms.packing import empty_batch
from areal_jax.models import flops
from areal_jax.trainer.step import Minibatch
from areal_jax.trainer.utilisation import Work, peak_tflops, work_of
from tests.trainer.conftest import MODEL

TIMES = {"update_s": 3.0, "prox_s": 1.0}


@dataclasses.dataclass(frozen=True)
class Device:
    """What is asked of a device."""

    device_kind: str = "NVIDIA H200"
    process_index: int = 0
    stats: dict | None = None

    def memory_stats(self):
        return self.stats


def minibatch(*lengths):
    """One row that holds sequences of these lengths, and padding."""
    batch = empty_batch(1, 32)
    ids = np.concatenate([np.full(length, i) for i, length in enumerate(lengths, start=1)])
    batch.segment_ids[0, : len(ids)] = ids
    return Minibatch.of([batch])


def test_peaks_are_those_of_the_dtype_and_unknown_elsewhere():
    assert peak_tflops("NVIDIA H200", "bfloat16") == 989.4 and peak_tflops("NVIDIA H200", "float32") == 494.7
    assert peak_tflops("TPU v5 lite", "bfloat16") == 197.0
    assert peak_tflops(jax.devices("cpu")[0].device_kind, "float32") is None


def test_a_token_costs_six_in_the_update_and_two_in_the_proximal_pass():
    work = Work(MODEL, "bfloat16", [Device(), Device()])
    line = work.figures([minibatch(5, 9), minibatch(7)], TIMES, recomputed_prox=True)
    update, prox = 3 * flops.forward_flops(MODEL, [5, 9, 7]), flops.forward_flops(MODEL, [7])  # not of the first one
    assert line["model_tflops/update"] == pytest.approx(update / 1e12)
    assert line["model_tflops/prox"] == pytest.approx(prox / 1e12)
    assert line["model_tflops_per_s"] == pytest.approx((update + prox) / 4.0 / 1e12)
    assert line["mfu"] == pytest.approx((update + prox) / 4.0 / (2 * 989.4e12))


def test_without_a_proximal_pass_a_known_peak_or_anything_computed_its_figures_are_absent_or_zero():
    work = Work(MODEL, "float32", [Device("cpu")])
    naive = work.figures([minibatch(5), minibatch(7)], TIMES, recomputed_prox=False)
    assert naive["model_tflops/prox"] == 0 < naive["model_tflops_per_s"] and "mfu" not in naive
    still = work.figures([Minibatch.of([])], TIMES, recomputed_prox=True)
    assert still == {"model_tflops/update": 0, "model_tflops/prox": 0}


def test_the_work_of_programs_is_on_their_mesh_and_leaves_out_what_is_frozen(make_programs):
    programs = make_programs(mesh=(2, 1, 1))
    work = work_of(programs, MODEL, "float32")
    assert list(work.devices) == jax.devices()[:2] and work.frozen == programs.trainable.frozen == frozenset()
    some = dataclasses.replace(work, frozen=frozenset({"head.kernel"}))
    updates = [
        each.figures([minibatch(5)], TIMES, recomputed_prox=True)["model_tflops/update"] for each in (work, some)
    ]
    assert updates[0] - updates[1] == pytest.approx(2 * 5 * MODEL.d_model * MODEL.vocab_size / 1e12)


def test_memory_is_that_of_the_fullest_device_of_this_process():
    devices = [
        Device(stats={"bytes_in_use": 2e9, "peak_bytes_in_use": 7e9}),
        Device(stats={"bytes_in_use": 3e9, "peak_bytes_in_use": 5e9}),
        Device(stats={"bytes_in_use": 9e9, "peak_bytes_in_use": 9e9}, process_index=1),
    ]
    work = Work(MODEL, "float32", devices)
    assert work.memory() == {"device_memory_gb/in_use": 3.0, "device_memory_gb/peak": 7.0}
    assert Work(MODEL, "float32", [Device("cpu")]).memory() == {}  # a backend that does not tell
