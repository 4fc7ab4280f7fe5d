"""Whether a trainer's update fits into the memory of its device, and what of it is computed again so that it does.

In: the shape of a model, the trainer's settings, the length of a row. Out: bytes, and rematerialisations. Called by
`bench_trainer` around what it measures; asks a device for its counters only, and waits for nothing.
"""

import ctypes
import dataclasses
import gc
import typing
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh

from areal_jax.config import Config, SftConfig, TrainerConfig
from areal_jax.launch import plan
from areal_jax.models.transformer import TransformerConfig
from areal_jax.room import device_bytes
from experiments import runs
from experiments.bench_steps import ONE_DEVICE, Remat

LEAST_FIRST: Sequence[Remat] = typing.get_args(Remat)
SHARE = 0.85  # of the memory that JAX may take; the plan's estimates may fall short by the rest


def planned(model: TransformerConfig, config: TrainerConfig, row: int) -> dict[str, int]:
    """Bytes on the device by purpose, as `--dry_run` says them, of updates of one row of `row` tokens."""
    config = dataclasses.replace(config, token_budget=row, row_buckets=(row,))
    of_run = Config(trainer=config, sft=SftConfig(data="random", max_length=row))
    parts = plan.trainer_bytes(of_run, model, AbstractMesh(tuple(ONE_DEVICE.values()), tuple(ONE_DEVICE)))
    del parts["copy to publish"]  # nothing is published here
    return parts


def choose_remat(
    model: TransformerConfig, config: TrainerConfig, row: int, allowed: Sequence[Remat], room: float
) -> Remat:
    """The first of `allowed` whose plan fits into `room` bytes. Raises ValueError where none does."""
    needed = {remat: sum(planned(model, dataclasses.replace(config, remat=remat), row).values()) for remat in allowed}
    for remat, size in needed.items():
        if size <= room:
            return remat
    least = min(needed, key=lambda remat: needed[remat])
    raise ValueError(
        f"--rows has {row}, and by its plan an update of one such row takes {needed[least] / 1e9:.1f} GB with "
        f"--remat={least}; there is room for {room / 1e9:.1f} GB, {SHARE:.0%} of what JAX may take of the device "
        "(XLA_PYTHON_CLIENT_MEM_FRACTION): leave that length out, give --remat=layers, or a smaller --model"
    )


def room() -> float:
    """Bytes that an update may be planned to take on the first device; without a bound where that is not known."""
    return SHARE * device_bytes(jax.devices()[0])


def give_back() -> None:
    """Hands free memory back to the kernel, which `host_memory.keep_freed` keeps: what comes next needs other sizes."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def peak() -> int:
    """Bytes in use at most so far, on the first device; of a CPU, by this process."""
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else runs.memory("VmHWM")
