"""Where arrays live: the mesh, and one table from a parameter's name to its axes on it.

`data` holds copies of the model, `fsdp` splits every parameter along its model axis, `tensor` splits heads,
feed-forward and vocabulary. Rows of a batch are split over data and fsdp together. One device is the mesh 1 x 1 x 1.
No axis splits the tokens of a row: attention's memory grows with a row and not with its square, so that what bounds the
length of a row on one device is its activations, of which `trainer.remat` keeps as few as one per layer and token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
ROWS = PartitionSpec(ROW_AXES)
REPLICATED = PartitionSpec()

# Logical axis of a parameter -> mesh axis.
MESH_AXIS = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor", None: None}

# Last parts of a parameter's name -> its logical axes.
LOGICAL_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"^embedding$", ("vocab", "embed")),
    (r"head\.kernel$", ("embed", "vocab")),
    (r"query\.kernel$", ("embed", "heads", None)),
    (r"(key|value)\.kernel$", ("embed", "kv_heads", None)),
    (r"query\.bias$", ("heads", None)),
    (r"(key|value)\.bias$", ("kv_heads", None)),
    (r"out\.kernel$", ("heads", None, "embed")),
    (r"(gate|up)\.kernel$", ("embed", "ffn")),
    (r"down\.kernel$", ("ffn", "embed")),
    (r"norm\.scale$", (None,)),
    # LoRA: A has the axes that the kernel's projection contracts, B those that it yields, both the rank.
    (r"(query|key|value|gate|up)\.lora_a$", ("embed", None)),
    (r"out\.lora_a$", ("heads", None, None)),
    (r"down\.lora_a$", ("ffn", None)),
    (r"query\.lora_b$", (None, "heads", None)),
    (r"(key|value)\.lora_b$", (None, "kv_heads", None)),
    (r"(gate|up)\.lora_b$", (None, "ffn")),
    (r"(out|down)\.lora_b$", (None, "embed")),
)


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes data, fsdp, tensor; an axis of -1 takes the devices that the others leave.

    Raises ValueError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [shape[axis] for axis in AXES]
    fixed = int(np.prod([s for s in sizes if s != -1]))
    given = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(f"trainer.mesh is {given}: sizes must be positive, and at most one may be -1 (= the rest)")
    if len(devices) % fixed or (-1 not in sizes and fixed != len(devices)):
        raise ValueError(
            f"trainer.mesh is {given}, which does not divide the {len(devices)} device(s) of this process; "
            f"the sizes must multiply to {len(devices)}: try data=-1"
        )
    sizes = [len(devices) // fixed if s == -1 else s for s in sizes]
    return Mesh(np.array(devices).reshape(sizes), AXES)


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Parts that the rows of a batch are split into."""
    return int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))


def param_spec(name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The partition of one parameter. Raises ValueError when a mesh axis does not divide it."""
    logical = next((axes for pattern, axes in LOGICAL_AXES if re.search(pattern, name)), None)
    assert logical is not None and len(logical) == len(shape), f"no sharding rule for {name} of shape {tuple(shape)}"
    spec = [MESH_AXIS[axis] for axis in logical]
    for size, axis, word in zip(shape, spec, logical, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{name} has {size} along its {word} axis, which the mesh axis {axis}={mesh.shape[axis]} must divide; "
                f"choose trainer.mesh.{axis} among the divisors of {size}"
            )
    return PartitionSpec(*spec)


def param_shardings(params: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
    """Canonical name -> sharding, for arrays or shapes."""
    return {name: NamedSharding(mesh, param_spec(name, value.shape, mesh)) for name, value in params.items()}
