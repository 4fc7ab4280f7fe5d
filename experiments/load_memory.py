"""How much host memory it takes to load a model of 1.5 billion parameters, at its peak.

    python -m experiments.load_memory --out=DIR

In: nothing. Out: DIR/results.json and DIR/memory.png. A random model in the shape of Qwen2.5-1.5B is written to
DIR/model in bfloat16 (3 GB, removed in the end) and loaded by a fresh process for each measurement: what the generation
server and the trainer do, and, to compare, the whole model as numpy arrays first and onto the device then. On a CPU the
device's memory is the host's, so that the loaded parameters themselves count too. Needs 12 GB of memory.

A peak is VmHWM of /proc/self/status, less what the process held before it began to load. `getrusage` would not do: its
ru_maxrss begins with what the parent process held.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import ml_dtypes
import numpy as np
from absl import app, flags

from areal_jax.models import safetensors_files, transformer
from experiments import runs

mpl.use("Agg")
import matplotlib.pyplot as plt

_OUT = runs.OUT
_KEEP_MODEL = flags.DEFINE_bool("keep_model", False, "Leave DIR/model there.")
_MEASURE = flags.DEFINE_string("measure", "", "Do this one measurement of DIR/model, and print it.")

QWEN2P5_1P5B = transformer.TransformerConfig(
    vocab_size=151936,
    d_model=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_size=128,
    d_ff=8960,
    rope_theta=1e6,
    qkv_bias=True,
    tied_embeddings=True,
    family="qwen2",
)
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: who loads, onto how many devices, in what dtype."""

    name: str
    devices: int
    load: Callable[[pathlib.Path], Mapping[str, Any]]


class RandomParams(Mapping[str, np.ndarray]):
    """Parameters that exist while they are written."""

    def __init__(self, config: transformer.TransformerConfig):
        self._shapes = transformer.param_shapes(config)
        self._random = np.random.default_rng(0)

    def __getitem__(self, name: str) -> np.ndarray:
        values = self._random.standard_normal(self._shapes[name].shape, np.float32)
        values *= 0.02
        return values.astype(ml_dtypes.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value).absolute()
    if _MEASURE.value:
        print(json.dumps(measure(CASES[_MEASURE.value], out / "model")))
        return
    with safetensors_files.new_directory(out / "model") as directory:
        params = RandomParams(QWEN2P5_1P5B)
        files = safetensors_files.write_params(directory, QWEN2P5_1P5B, params, dtype="bfloat16", shard_bytes=10**9)
    parameters = transformer.param_count(QWEN2P5_1P5B)
    loads = [in_a_fresh_process(case, out) for case in CASES.values()]
    if not _KEEP_MODEL.value:
        shutil.rmtree(out / "model")
    print(table(loads))
    plot(out / "memory.png", loads)
    runs.write(out, {"parameters": parameters, "files": len(files), "file_gb": 2 * parameters / GB, "loads": loads})


def in_a_fresh_process(case: Case, out: pathlib.Path) -> runs.Line:
    command = [sys.executable, "-m", "experiments.load_memory", f"--out={out}", f"--measure={case.name}"]
    devices = f"--xla_force_host_platform_device_count={case.devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(printed.splitlines()[-1])


def measure(case: Case, directory: pathlib.Path) -> runs.Line:
    import jax

    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[-1]))  # the devices are there before it begins
    before, began = runs.memory("VmRSS") / GB, time.monotonic()
    params = jax.block_until_ready(case.load(directory))
    seconds = time.monotonic() - began
    held = sum(array.nbytes for array in params.values()) / GB
    peak = runs.memory("VmHWM") / GB - before
    return {
        "load": case.name,
        "devices": case.devices,
        "params_gb": round(held, 2),
        "peak_gb": round(peak, 2),
        "over_params_gb": round(peak - held, 2),
        "seconds": round(seconds, 1),
    }


# What is measured.


def generator(directory: pathlib.Path) -> Mapping[str, Any]:
    engine = make_engine()
    return engine.load(safetensors_files.read_params(directory, QWEN2P5_1P5B, engine.places), 0).params


def generator_through_numpy(directory: pathlib.Path) -> Mapping[str, Any]:
    return make_engine().load(safetensors_files.load_model(directory)[1], 0).params


def make_engine():
    from areal_jax.generation.engine import Engine, EngineOptions

    return Engine(QWEN2P5_1P5B, EngineOptions(slots=1, max_length=32, dtype="bfloat16"))


def trainer(directory: pathlib.Path) -> Mapping[str, Any]:
    return safetensors_files.read_params(directory, QWEN2P5_1P5B, places())


def trainer_through_numpy(directory: pathlib.Path) -> Mapping[str, Any]:
    from areal_jax.trainer.state import copies

    return copies(safetensors_files.load_model(directory)[1], places())


def places():
    """The trainer's parameters over all devices, fsdp."""
    from areal_jax.config import OptimizerConfig
    from areal_jax.models import sharding
    from areal_jax.trainer import state

    config = OptimizerConfig()
    optimizer = state.make_optimizer(config, state.learning_rate(config, 1))
    mesh = sharding.make_mesh({"data": 1, "fsdp": -1, "tensor": 1})
    return state.abstract_state(QWEN2P5_1P5B, optimizer, mesh).params


CASES = {
    case.name: case
    for case in (
        Case("generator", 1, generator),
        Case("generator through numpy", 1, generator_through_numpy),
        Case("trainer", 1, trainer),
        Case("trainer, fsdp=8", 8, trainer),
        Case("trainer through numpy", 1, trainer_through_numpy),
    )
}


# What is shown.


def table(loads: Sequence[runs.Line]) -> str:
    columns = ("load", "devices", "params_gb", "peak_gb", "over_params_gb", "seconds")
    rows = [columns, ["---"] * len(columns), *([str(line[column]) for column in columns] for line in loads)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(path: pathlib.Path, loads: Sequence[runs.Line]) -> None:
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    names = [line["load"] for line in loads]
    axes.barh(names, [line["peak_gb"] for line in loads], label="peak while loading")
    axes.barh(names, [line["params_gb"] for line in loads], height=0.4, label="the parameters themselves")
    axes.invert_yaxis()
    axes.set(xlabel="GB of host memory", title="Loading 1.5 billion parameters from bfloat16 files")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
