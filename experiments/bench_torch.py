"""torch's side of the trainer's benchmark, in a process of its own: neither side's memory lies between the other's.

In: a model of ours, and its sequences. Out: seconds of an update, and its loss. Called by `bench_trainer`. Waits for
the process, which waits for its next update while ours are timed.
"""

import contextlib
import multiprocessing
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jax import Array

from areal_jax import host_memory
from areal_jax.config import OptimizerConfig
from areal_jax.models import safetensors_files
from areal_jax.models.transformer import TransformerConfig

Step = Callable[[Sequence[np.ndarray], int], tuple[float, float]]  # as `TorchTraining.step`


@contextlib.contextmanager
def torch_training(model: TransformerConfig, params: Mapping[str, Array], settings: OptimizerConfig) -> Iterator[Step]:
    """Updates of the same weights in transformers. RuntimeError when its process ends, whose stderr says why."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch) / "model"
        safetensors_files.save_model(directory, model, params)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, directory, settings), daemon=True)
        process.start()
        theirs.close()

        def step(*asked: Any) -> tuple[float, float]:
            try:
                ours.send(asked)
                return ours.recv()
            except (EOFError, BrokenPipeError) as error:
                raise RuntimeError("the process of torch has ended; what it printed says why") from error

        try:
            yield step
        finally:
            ours.close()
            process.join()


def _serve(asked: Connection, directory: pathlib.Path, settings: OptimizerConfig) -> None:
    host_memory.keep_freed()  # as our side does
    from experiments.torch_training import TorchTraining

    training = TorchTraining(directory, settings)
    with contextlib.suppress(EOFError):  # the other end is closed
        while True:
            asked.send(training.step(*asked.recv()))
