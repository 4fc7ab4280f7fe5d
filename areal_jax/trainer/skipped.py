"""Minibatches that gave no finite gradient, as files for a person to look at.

In: a minibatch, what its update left, and the version from which its step started. Out: `skipped/VERSION.npz` in the
run's directory, of which the newest stay. Called by the journal; waits for nobody.

A file holds, for microbatch 0, 1, ..., the arrays [R, L] of its `TrainBatch` ("0/tokens", "0/loss_mask", ...), the
log-probabilities that the update computed of them ("0/logprobs") and, where there are any, those of the proximal policy
("0/prox_logprobs"). Once, "minibatch" is its place in the step: how many updates lie between the version and it.

Shapes: R packed rows, L tokens of a row.
"""

import os
import pathlib

import jax
import numpy as np

from areal_jax.trainer.step import Minibatch, Outcome
from areal_jax.types import ROW_ARRAYS

KEEP = 3  # files; a minibatch can be large, and what is wrong with the first is mostly wrong with the next


class SkippedMinibatches:
    """The files of one run."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory

    def save(self, version: int, place: int, minibatch: Minibatch, outcome: Outcome) -> pathlib.Path:
        """Writes the minibatch at `place` of the step from `version`, whole or not at all; returns its file."""
        path = self._directory / f"{version}.npz"
        if jax.process_index() > 0:
            return path  # process 0 has all rows, and writes them
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez_compressed(file, minibatch=place, **_columns(minibatch, outcome))  # type: ignore[arg-type]
        os.replace(temporary, path)
        self._remove_all_but_the_newest()
        return path

    def _remove_all_but_the_newest(self) -> None:
        # By time: a run that went on from an older checkpoint goes through the same versions again.
        files = sorted(self._directory.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-KEEP]:
            path.unlink()


def _columns(minibatch: Minibatch, outcome: Outcome) -> dict[str, np.ndarray]:
    """All arrays of a minibatch by microbatch and name."""
    columns: dict[str, np.ndarray] = {}
    for i, batch in enumerate(minibatch.batches):
        columns |= {f"{i}/{name}": getattr(batch, name) for name in ROW_ARRAYS}
        columns[f"{i}/logprobs"] = np.asarray(jax.device_get(outcome.logprobs[i]))
    for i, prox_RL in enumerate(minibatch.prox_logprobs):
        columns[f"{i}/prox_logprobs"] = np.asarray(jax.device_get(prox_RL))
    return columns
