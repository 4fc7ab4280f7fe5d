"""A decode step's products with weights by other libraries than XLA: what one of them would gain.

In: a model, a batch size. Out: seconds per step of numpy and, where it is installed, torch. Called by `bench_bound`,
which times XLA's own.

Every product of the step is computed once, each layer's with weights of its own, so that they come from memory as they
do in a step. numpy has no product of bfloat16 numbers, so it takes part in float32 only. torch has the weights as
transformers has them, [outputs, inputs]. "onednn" is oneDNN through torch, which was given the weights beforehand and
keeps them in the order that its kernels read: the most that a library gains that may lay the weights out as it likes.

Shapes: S slots, I inputs, O outputs.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from areal_jax.models.transformer import Params, TransformerConfig
from experiments.bench_workload import Bench, medians, take_turns, timed


def kernels(config: TransformerConfig, params: Params) -> list[np.ndarray]:
    """The weights [I, O] of every product of a step in float32, the LM head's last."""
    found = [
        np.asarray(array, np.float32).reshape(math.prod(array.shape[: _contracted(name)]), -1)
        for name, array in params.items()
        if name.endswith("kernel") and name != "head.kernel"
    ]
    return [*found, np.asarray(params["embedding"]).T if config.tied_embeddings else np.asarray(params["head.kernel"])]


def elsewhere(bench: Bench, batch: int, seconds: float) -> dict[str, float]:
    """Seconds for all products of a step of `batch` rows, by library."""
    kernels_IO = kernels(bench.config, bench.params)
    calls: dict[str, Callable[[], float]] = {}
    if bench.dtype == "float32":
        calls["numpy"] = functools.partial(timed, functools.partial(by_numpy, kernels_IO, batch))
    if importlib.util.find_spec("torch"):
        calls["torch"] = functools.partial(timed, by_torch(kernels_IO, batch, bench.dtype))
        calls["onednn"] = functools.partial(timed, by_onednn(kernels_IO, batch, bench.dtype))
    for call in calls.values():
        call()  # starts threads
    return medians(take_turns(calls, seconds)) if calls else {}


def by_numpy(kernels_IO: list[np.ndarray], batch: int) -> None:
    rows = {size: np.ones((batch, size), np.float32) for size in {len(kernel_IO) for kernel_IO in kernels_IO}}
    for kernel_IO in kernels_IO:
        np.matmul(rows[len(kernel_IO)], kernel_IO)


def by_torch(kernels_IO: list[np.ndarray], batch: int, dtype: str) -> Callable[[], None]:
    import torch

    kernels_OI, rows = _for_torch(kernels_IO, batch, dtype)

    def products() -> None:
        with torch.inference_mode():
            for kernel_OI in kernels_OI:
                torch.nn.functional.linear(rows[kernel_OI.shape[1]], kernel_OI)

    return products


def by_onednn(kernels_IO: list[np.ndarray], batch: int, dtype: str) -> Callable[[], None]:
    import torch

    kernels_OI, rows = _for_torch(kernels_IO, batch, dtype)
    ops = torch.ops.mkldnn
    laid_out = [(kernel.shape[1], ops._reorder_linear_weight(kernel, batch)) for kernel in kernels_OI]

    def products() -> None:
        with torch.inference_mode():
            for inputs, kernel in laid_out:
                ops._linear_pointwise(rows[inputs], kernel, None, "none", [], "")

    return products


def _for_torch(kernels_IO: list[np.ndarray], batch: int, dtype: str) -> tuple[list[Any], Mapping[int, Any]]:
    """Weights [O, I] as torch's arrays, and rows by their length."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kernels_OI = [torch.from_numpy(np.array(kernel.T, order="C")).to(getattr(torch, dtype)) for kernel in kernels_IO]
    return kernels_OI, {k.shape[1]: torch.ones(batch, k.shape[1], dtype=k.dtype) for k in kernels_OI}


def _contracted(name: str) -> int:
    return 2 if name.endswith("attention.out.kernel") else 1
