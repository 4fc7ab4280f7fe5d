"""Whether arrays that a process will hold to its end have room on its devices, told before any of them exists.

In: shapes and shardings. Out: nothing, or a ValueError. Called by the trainer and the generation server before they
load anything; waits for nobody.
"""

import collections
import math
import os
import pathlib
from typing import Any

import jax

CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup/memory.max")  # what a container on Linux may take; "max" = no bound


def check(arrays: Any, *, what: str, remedy: str) -> None:
    """ValueError where `arrays`, a tree of abstract arrays with shardings, are more than this process' devices have.

    What passes may still be too much, as programs need memory beside it, and on a CPU other processes do, too:
    `--dry_run` estimates both.
    """
    needed: collections.Counter[jax.Device] = collections.Counter()
    for leaf in jax.tree.leaves(arrays):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        needed.update(dict.fromkeys(leaf.sharding.addressable_devices, size))
    device, most = needed.most_common(1)[0]
    place, has = f"device {device.id}", device_bytes(device)
    if device.platform == "cpu":  # whose devices share the host's memory
        place, most, has = "this host", needed.total(), host_bytes()
    if most > has:
        raise ValueError(f"{what} take {most / 2**30:.2f} GiB, and {place} has {has / 2**30:.2f} GiB; {remedy}")


def device_bytes(device: jax.Device) -> float:
    """What JAX may take of an accelerator's memory; no bound where that is not known."""
    stats = device.memory_stats()
    return stats["bytes_limit"] if stats else math.inf


def host_bytes() -> float:
    """The host's memory, or what a container may take of it; no bound where that is not known."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return math.inf
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound = CONTROL_GROUP.read_text().strip() if CONTROL_GROUP.exists() else ""
    return min(has, int(bound)) if bound.isdigit() else has
