"""The trainer's processes as one JAX program: how they join, agree, hand bytes on, wait for one another and end.

In: the address of process 0, the number of processes, which of them this is; or `AUTO`, and the cluster says it. Out:
`Processes`, through which one of them knows the others. Called by `launch.roles` before anything touches a device, and
by `trainer.shared`. Waits for: process 0, without limit while it lives (it waits for batches); at a barrier for all,
with a limit.

A process alone joins nobody, and nothing here then does or costs anything.

What the devices compute together, their own network carries (Gloo on CPUs, NCCL, ICI). Short notes go through the store
of JAX's coordinator, which process 0 hosts: how long the next bytes are, that a process is asked to stop, or why one
failed. A thread of each process reads the latter every `POLL_S`, so that whoever waits inside a collective for a
process that failed ends, too, with that one's reason. One that is killed and tells nothing is missed by the collective
(Gloo: at once), or when its heartbeats have stayed away for `HEARTBEAT_S` (less where the limit is less); JAX then
aborts every process, with a text that names it.
"""

import atexit
import collections
import contextlib
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax import Array
from jax._src.clusters import ClusterEnv  # nor for what it finds out of a cluster before it connects
from jax._src.distributed import global_state  # JAX has no public name for the client that it has connected
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax import addresses
from areal_jax.config import AUTO

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20  # that one device sends another at a time: one size, so one program
HEARTBEAT_S = 100.0
POLL_S = 1.0
TOLD = "areal_jax/told/"  # ends with "stop", or with the number of a process that failed


class Processes:
    """The trainer's processes as process `index` of `count` sees them."""

    def __init__(self, index: int = 0, count: int = 1, timeout_s: float = 0.0):
        self.index, self.count = index, count
        self._timeout_s = timeout_s
        self._client: Any = global_state.client
        self._sent: collections.Counter[int] = collections.Counter()  # by the process that receives
        self._paths: dict[int, _Path] = {}
        self._barriers: collections.Counter[str] = collections.Counter()

    def barrier(self, name: str) -> None:
        """Returns when every process is here. Raises TimeoutError that names those which did not come in time."""
        if self.count == 1:
            return
        self._barriers[name] += 1
        key = f"areal_jax/barrier/{name}/{self._barriers[name]}"
        self._client.key_value_set(f"{key}/{self.index}", "")
        try:
            self._client.wait_at_barrier(key, round(self._timeout_s * 1000))
        except JaxRuntimeError as error:
            came = {int(arrival.rpartition("/")[2]) for arrival, _ in self._client.key_value_dir_get(f"{key}/")}
            missing = sorted(set(range(self.count)) - came)
            if not missing:
                raise
            raise TimeoutError(
                f"trainer process {self.index} waited {self._timeout_s:g} s at the barrier '{name}' for processes "
                f"{missing} of {self.count}; their logs say what they do. Raise trainer.distributed.timeout_s if they "
                "are only slow"
            ) from error

    def send(self, to: int, data: bytes) -> None:
        """Process 0 gives `data` to process `to`, and to no other: over the devices' network, in pieces."""
        self._client.key_value_set(self._next(to), str(len(data)))
        for start in range(0, len(data), CHUNK_BYTES):
            jax.block_until_ready(self._path(to).send(data[start : start + CHUNK_BYTES]))

    def coming(self) -> int:
        """Bytes that process 0 sends here next. Waits for process 0 as long as that lives.

        Raises RuntimeError when process 0 is gone, if JAX has not aborted this process before.
        """
        key = self._next(self.index)
        size = int(self._wait_for(key))
        self._client.key_value_delete(key)
        return size

    def receive(self, size: int) -> bytes:
        """What process 0 sends: the `size` bytes that were `coming`."""
        path = self._path(self.index)
        return b"".join(path.receive() for _ in range(0, size, CHUNK_BYTES))[:size]

    def of_first(self, mine: str) -> str:
        """What process 0 has, in every process."""
        if self.index:
            return self.receive(self.coming()).decode()
        for other in range(1, self.count):
            self.send(other, mine.encode())
        return mine

    def agree(self, what: str, mine: str) -> None:
        """Raises ValueError, with the lines that differ, where `mine` is not what process 0 has."""
        first = self.of_first(mine)
        if first != mine:
            lines = itertools.zip_longest(first.splitlines(), mine.splitlines(), fillvalue="nothing")
            differing = [f"{a.strip(' ,')} there and {b.strip(' ,')} here" for a, b in lines if a != b]
            raise ValueError(
                f"{what} of trainer process {self.index} is not that of process 0: {'; '.join(differing[:5])}. Start "
                "all of them with the same config, and run.dir in a file system that all of them share"
            )

    def tell(self, note: str, text: str = "") -> None:
        """Leaves a note for all the others: "stop", or the number of a process that failed and why."""
        self._client.key_value_set(f"{TOLD}{note}", text, allow_overwrite=True)

    def watch(self, stop: threading.Event, ended: threading.Event) -> None:
        """Until `ended`, passes on `stop`, from here and from others, and ends this process when another has failed."""
        while not ended.wait(POLL_S):
            if stop.is_set():
                self.tell("stop")
            try:
                told = self._client.key_value_dir_get(TOLD)
            except JaxRuntimeError as error:
                _end(f"process 0 of the trainer is gone, its log says why ({_first_line(error)})")
            for key, text in told:
                note = key.removeprefix(TOLD)
                if note == "stop":
                    stop.set()
                elif note != str(self.index):
                    _end(f"process {note} of the trainer failed: {text}")

    def _next(self, to: int) -> str:
        """The key under which the store has the length of what goes to a process next."""
        self._sent[to] += 1
        return f"areal_jax/sent/{to}/{self._sent[to]}"

    def _path(self, to: int) -> "_Path":
        if to not in self._paths:
            self._paths[to] = _Path(to)
        return self._paths[to]

    def _wait_for(self, key: str) -> str:
        while True:
            try:  # a second at a time: a signal's handler runs in between
                return self._client.blocking_key_value_get(key, round(POLL_S * 1000))
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise RuntimeError("process 0 of the trainer is gone; its log says why") from error


@contextlib.contextmanager
def joined(
    coordinator: str, *, index: int | None, count: int, timeout_s: float, stop: threading.Event
) -> Iterator[Processes]:
    """The processes, for the time of the block, at whose end each waits for the others.

    Call it before anything touches a device. An `index` of None is the cluster's where the coordinator is `AUTO`, and
    else 0. A block that ends by an error takes the other processes with it, and this one then exits with status 1.
    `stop` is set when any process is asked to stop. Raises ValueError for a coordinator or an index that cannot be;
    exits with status 1, too, when not all have come within `timeout_s`.
    """
    if coordinator == AUTO and count > 1:
        coordinator, index = _of_cluster(index, count, timeout_s)
    index = index or 0
    _check(coordinator, index, count)
    if count == 1:
        yield Processes()
        return
    ended = threading.Event()
    try:
        _initialize(coordinator, index, count, timeout_s)
        processes = Processes(index, count, timeout_s)
        watcher = threading.Thread(target=processes.watch, args=(stop, ended), daemon=True)
        watcher.start()
        yield processes
        processes.barrier("the end of training")
    except BaseException as error:
        if isinstance(error, JaxRuntimeError) or "Gloo" in str(error):  # of a connection; a ValueError, too
            time.sleep(2 * POLL_S)  # by then the reason of a process that told why has ended this one
            error.add_note("If a connection was closed or reset, another process ended first: its log says why.")
        atexit.register(_leave, index)
        if global_state.client is not None:
            with contextlib.suppress(JaxRuntimeError):  # process 0 is gone, and all the others know it
                Processes(index, count).tell(str(index), f"{type(error).__name__}: {error}")
        log.error("process %d of the trainer fails, and the others end with it", index)
        raise
    finally:
        ended.set()
    watcher.join()
    jax.distributed.shutdown()


def _of_cluster(index: int | None, count: int, timeout_s: float) -> tuple[str, int]:
    """Address of process 0 and index of this one as the cluster has it that started them (see jax.distributed)."""
    address, started, found, _ = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, math.ceil(timeout_s)
    )
    if address is None or started is None or found is None:
        raise ValueError(
            f"config.trainer.distributed.coordinator={AUTO} is for processes that Slurm, Open MPI, Kubernetes or the "
            "hosts of a TPU slice start, and JAX finds none of them here; give host:port of process 0, and --process"
        )
    if started != count or index not in (None, found):
        given = "" if index is None else f" and --process={index}"
        raise ValueError(
            f"config.trainer.distributed.processes={count}{given}, and the cluster says that this is process {found} "
            f"of {started}; give these numbers, and leave --process out"
        )
    return address, found


def _check(coordinator: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"--process={index} must be 0 to {count - 1}, for trainer.distributed.processes={count}")
    _, port = addresses.parse(coordinator) or ("", 0)
    if count > 1 and not port:
        raise ValueError(
            f"config.trainer.distributed.coordinator={coordinator!r} must be host:port of process 0, as the other "
            f"processes reach it, or {AUTO}; only a run whose processes `main` starts may leave the port 0"
        )


def _initialize(coordinator: str, index: int, count: int, timeout_s: float) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    log.info("process %d of %d of the trainer meets the others at %s", index, count, coordinator)
    reason = (
        f"trainer process {index} did not meet all {count} processes at {coordinator} within {timeout_s:g} s; start "
        f"each with --role=trainer --process=N, N from 0 to {count - 1}, where that address reaches process 0, or "
        "raise trainer.distributed.timeout_s"
    )
    late = threading.Timer(timeout_s, _end, [reason])  # JAX's own limit aborts with a stack trace
    late.start()
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=index,
            coordinator_bind_address=coordinator if addresses.is_loopback(coordinator) else None,  # None: every address
            initialization_timeout=2 * math.ceil(timeout_s),
            heartbeat_timeout_seconds=math.ceil(min(timeout_s, HEARTBEAT_S)),
            shutdown_timeout_seconds=math.ceil(timeout_s),
        )
        jax.devices()  # which all of them make together, so before anyone waits for anything else
        _check_devices(index)
    finally:
        late.cancel()


def _check_devices(index: int) -> None:
    """The hosts of a TPU slice have numbers of their own, by which JAX then goes."""
    if jax.process_index() != index:
        raise ValueError(
            f"--process={index}, and the accelerators of this host belong to process {jax.process_index()}; give the "
            f"number that they have, or config.trainer.distributed.coordinator={AUTO} and no --process"
        )


class _Path:
    """From a device of process 0 to one of process `to`: a program that these two run, and no other process."""

    def __init__(self, to: int):
        firsts = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([firsts[0], firsts[to]]), ("process",))
        self._mine, self._sharding = firsts[jax.process_index()], NamedSharding(mesh, PartitionSpec("process"))
        self._program = jax.jit(
            jax.shard_map(
                lambda piece: jax.lax.ppermute(piece, "process", [(0, 1)]),
                mesh=mesh,
                in_specs=PartitionSpec("process"),
                out_specs=PartitionSpec("process"),
            )
        )
        self._nothing = self._placed(b"")

    def send(self, data: bytes) -> Array:
        """At most `CHUNK_BYTES`; wait for what is returned."""
        return self._program(self._placed(data))

    def receive(self) -> bytes:
        """`CHUNK_BYTES` that begin with what was sent."""
        return np.asarray(self._program(self._nothing).addressable_data(0)).tobytes()

    def _placed(self, data: bytes) -> Array:
        """This process' part of what the program takes, [2, CHUNK_BYTES]: a row of each of the two."""
        piece = np.zeros((1, CHUNK_BYTES), np.uint8)
        piece[0, : len(data)] = np.frombuffer(data, np.uint8)
        placed = jax.device_put(piece, self._mine)
        return jax.make_array_from_single_device_arrays((2, CHUNK_BYTES), self._sharding, [placed])


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _end(reason: str) -> NoReturn:
    """Ends this process, whatever it waits for."""
    print(f"error: {reason}", file=sys.stderr)
    _exit()


def _leave(index: int) -> None:
    """Exits without JAX's own farewell, which waits for processes that wait for this one."""
    if index == 0:
        time.sleep(2 * POLL_S)  # the note that says why is read from this process
    _exit()


def _exit() -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
