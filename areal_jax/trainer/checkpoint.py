"""Checkpoints: one consistent cut of the trainer, written in the background and committed whole or not at all.

In: the train state after a step, the facts that it must be restored under (version, model, run) and the queue's
snapshot. Out: the newest committed one. Called by the loop between steps: device arrays are copied before `save`
returns, so that the next step may donate them; files are written while it runs. Waits only for the save before.

A checkpoint is a directory named by its version, with the items `state` (params and optimizer), `facts` (JSON) and
`queue` (columns of any length and dtype in one array of bytes, as Orbax stores no empty arrays). A directory that a
killed process left half written has another name and is removed at the next start.
"""

import dataclasses
import functools
import io
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from areal_jax.models.transformer import TransformerConfig, param_shapes
from areal_jax.trainer import lora
from areal_jax.trainer.state import TrainState

PADDED = "padded_vocab"  # of a model's facts: how many rows its vocabulary is filled up to
Facts = dict[str, Any]  # JSON: {"version": 3, "model": {...}, "run": {...}}


class Restored(NamedTuple):
    state: TrainState
    version: int
    queue: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` stay."""

    def __init__(self, directory: pathlib.Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        # Each shard is written by its first replica: sharing them out would compile a slice per array and device.
        whole_shards = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole_shards))
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            "facts": ocp.JsonCheckpointHandler(),
            "queue": ocp.StandardCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options, item_handlers=handlers)
        self._directory = directory

    @property
    def newest(self) -> int | None:
        """Version of the newest committed checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, facts: Facts, queue: Mapping[str, np.ndarray]) -> None:
        """Copies the state off the devices and returns; writing goes on in the background."""
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state._asdict()),
            facts=ocp.args.JsonSave(facts),
            queue=ocp.args.StandardSave({"npz": to_npz(queue)}),
        )
        self._manager.save(facts["version"], args=items)

    def restore(self, abstract: TrainState, facts: Facts) -> Restored:
        """The newest checkpoint, each array read straight into the sharding that `abstract` gives it.

        Rows that fill the vocabulary up, which tensor axes ask for, are added or dropped. Raises ValueError, naming
        every field that differs, when it was written for another model or run than `facts`.
        """
        version = self.newest
        assert version is not None, "nothing to restore; look at `newest` first"
        saved = self._manager.restore(version, args=ocp.args.Composite(facts=ocp.args.JsonRestore())).facts
        self._check_same("model", saved, facts)
        self._check_same("run", saved, facts)
        tree = abstract._asdict()
        places = ocp.checkpoint_utils.construct_restore_args(tree)
        if saved["model"].get(PADDED) != facts["model"].get(PADDED):
            fill_up = functools.partial(dataclasses.replace, strict=False)  # with zeros, or cuts
            places = jax.tree.map(fill_up, places, is_leaf=lambda place: isinstance(place, ocp.RestoreArgs))
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(tree, restore_args=places), queue=ocp.args.StandardRestore()
        )
        restored = self._manager.restore(version, args=items)
        return Restored(TrainState(**restored.state), saved["version"], from_npz(restored.queue["npz"]))

    def close(self) -> None:
        """Waits for the save in progress; raises what failed in the background."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check_same(self, what: str, saved: Facts, wanted: Facts) -> None:
        there, here = saved[what], wanted[what]
        names = [n for n in sorted((there.keys() | here.keys()) - {PADDED}) if there.get(n) != here.get(n)]
        if names:
            differences = "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names)
            raise ValueError(
                f"the checkpoint of version {saved['version']} in {self._directory} is of another {what}: "
                f"{differences}. Set these back to go on from it, choose another run.dir to start anew, or remove "
                "that directory"
            )


class SavedParams(Mapping[str, np.ndarray]):
    """The model in the checkpoint directory of one version, whole and on the host, each param read when asked for.

    A kernel with an adapter is given merged; `read` gives what the state has. Optimizer and queue are not read.
    `version`, `model_config` and `trainable` are what the checkpoint says it is of.
    """

    def __init__(self, directory: pathlib.Path):
        facts = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(directory.absolute() / "facts")
        self.version: int = facts["version"]
        self.model_config = TransformerConfig(**facts["model"])
        self.trainable = lora.of_facts(self.model_config, facts["run"])
        self._names = list(param_shapes(self.model_config))
        self._shapes = self.trainable.shapes(param_shapes(self.model_config))
        self._directory = directory.absolute() / "state"
        self._reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.trainable.adapted:
            return self.read(name)
        return self.trainable.merge(self.read(name), *map(self.read, lora.factors(name)))

    def read(self, name: str) -> np.ndarray:
        """A param of the state, adapters among them."""
        wanted = {"params": {name: self._shapes[name]}}
        places = {"params": {name: ocp.RestoreArgs(restore_type=np.ndarray)}}
        arguments = ocp.args.PyTreeRestore(wanted, restore_args=places, partial_restore=True)
        return self._reader.restore(self._directory, args=arguments)["params"][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def to_npz(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Columns of any length and dtype as one array of bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **columns)  # type: ignore[arg-type]
    return np.frombuffer(buffer.getvalue(), np.uint8)


def from_npz(npz: Any) -> dict[str, np.ndarray]:
    """Inverse of `to_npz`."""
    with np.load(io.BytesIO(np.asarray(npz).tobytes()), allow_pickle=False) as columns:
        return dict(columns)
