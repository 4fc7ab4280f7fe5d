"""How well the trainer uses its devices: model FLOPs per second, their share of the peak, and memory.

In: the packed minibatches of a step and the seconds that they took. Out: entries of the step's line. Called by the
journal; asks the devices for counters only, and waits for nothing. How FLOPs are counted: `models.flops`.

Peaks are those of dense matrix products as the makers print them (never the doubled ones of sparsity), in the precision
that JAX gives float32 by default there: TF32 on NVIDIA's tensor cores, one bfloat16 pass on a TPU. A setting of
`jax_default_matmul_precision` that asks for more lowers what can be reached, not the peak that is reported against.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from areal_jax.models import flops
from areal_jax.models.transformer import TransformerConfig
from areal_jax.trainer.step import Minibatch, Programs

TERA, GIGA = 1e12, 1e9

# TFLOP/s of one device as JAX counts them, by `device_kind`: (bfloat16, float32).
# NVIDIA's data sheets of A100, H100 and H200; Google Cloud's pages on TPU v4 to v6e. What is not here is unknown, as
# the CPUs are: then nothing is reported that needs a peak.
PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "NVIDIA A100-SXM4-40GB": (312.0, 156.0),
    "NVIDIA A100-SXM4-80GB": (312.0, 156.0),
    "NVIDIA A100-PCIE-40GB": (312.0, 156.0),
    "NVIDIA A100 80GB PCIe": (312.0, 156.0),
    "NVIDIA H100 80GB HBM3": (989.4, 494.7),
    "NVIDIA H100 NVL": (835.5, 417.5),
    "NVIDIA H100 PCIe": (756.5, 378.0),
    "NVIDIA H200": (989.4, 494.7),
    "TPU v4": (275.0, 275.0),
    "TPU v5 lite": (197.0, 197.0),
    "TPU v5e": (197.0, 197.0),
    "TPU v5": (459.0, 459.0),
    "TPU v5p": (459.0, 459.0),
    "TPU v6 lite": (918.0, 918.0),
    "TPU v6e": (918.0, 918.0),
}


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """TFLOP/s of one device in matrix products of "bfloat16" or "float32"; None for a kind that is not known."""
    peaks = PEAK_TFLOPS.get(device_kind)
    return None if peaks is None else peaks[("bfloat16", "float32").index(dtype)]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step of a model costs, and the devices of the mesh that it is spread over."""

    model: TransformerConfig
    dtype: str  # of the forward pass
    devices: Sequence[jax.Device]
    frozen: frozenset[str] = frozenset()  # params that do not train

    def figures(
        self, minibatches: Sequence[Minibatch], times: Mapping[str, float], *, recomputed_prox: bool
    ) -> dict[str, float]:
        """Model FLOPs of a step's updates and of its proximal pass, and how fast they were done in the time of both.

        The first minibatch has no proximal pass: see `step.with_prox_logprobs`. `mfu` is left out without a known peak,
        both rates when nothing was computed.
        """
        lengths_S = _lengths(minibatches)
        again_S = _lengths(minibatches[1:] if recomputed_prox else [])
        update = flops.train_flops(self.model, lengths_S, frozen=self.frozen)
        prox = flops.forward_flops(self.model, again_S)
        line = {"model_tflops/update": update / TERA, "model_tflops/prox": prox / TERA}
        seconds = times["update_s"] + times["prox_s"]
        if not update or not seconds:
            return line
        rate = (update + prox) / TERA / seconds
        peak = peak_tflops(self.devices[0].device_kind, self.dtype)
        line["model_tflops_per_s"] = rate
        return line if peak is None else line | {"mfu": rate / (peak * len(self.devices))}

    def memory(self) -> dict[str, float]:
        """GB (1e9 bytes) in use now and at most so far, on the fullest device of this process; nothing on a CPU."""
        mine = [device for device in self.devices if device.process_index == jax.process_index()]
        told = [stats for device in mine if (stats := device.memory_stats())]
        names = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use"}
        return {
            f"device_memory_gb/{name}": max(stats[key] for stats in told) / GIGA
            for name, key in names.items()
            if told and all(key in stats for stats in told)
        }


def work_of(programs: Programs, model: TransformerConfig, dtype: str) -> Work:
    """The work of these programs, which compute in `dtype`; all processes of a trainer see all of it."""
    return Work(model, dtype, tuple(programs.mesh.devices.flat), programs.trainable.frozen)


def _lengths(minibatches: Sequence[Minibatch]) -> np.ndarray:
    """Tokens of each sequence that is computed, [S]."""
    of_rows = [flops.sequence_lengths(batch.segment_ids) for m in minibatches for batch in m.batches]
    return np.concatenate([np.zeros(0, np.int64), *of_rows])
