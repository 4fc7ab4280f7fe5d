"""Weights on their way from the trainer to generation servers in other processes.

In: a copy of the parameters after a step, as `{canonical name: array}`. Out: one safetensors file per version, named by
version and checksum, that appears whole or not at all; servers map it (same host) or fetch its bytes (other hosts).
The trainer's loop calls `Publisher.publish` and waits only for the publish before; a thread copies, writes, pushes and
announces. Servers call `map_weights` or `parse_weights`, and refuse bytes whose checksum is another.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import mmap
import os
import pathlib
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import xxhash

PIECE_BYTES = 1 << 19  # written and summed at a time: the second pass over a piece finds it in the processor's cache
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system; a writer gets none either
KEPT = 3  # files of a sender: the newest, the one before, and the one whose place the next version takes
ALIGNMENT = 64  # bytes; jax takes an array that begins at a multiple of them as it is, and copies any other

# Names of the safetensors format.
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}

_maps: dict[tuple[int, int, int], tuple[int, mmap.mmap]] = {}  # of `map_weights`: by device, inode and size
_maps_lock = threading.Lock()

# Hands the parameters of a version to every server; returns the seconds that its stages took, by name.
Send = Callable[[Mapping[str, Any], int], Mapping[str, float] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFile:
    """A version's file. `checksum` is that of all its bytes (`checksum_of`), `size` their number."""

    path: str
    version: int
    checksum: int
    size: int


def run_directory(parent: str, run_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Where a run keeps its weight files: under `parent`, or in shared memory, or (where there is none) in `run_dir`.

    The same run finds the same directory again, also after a kill; another run on this machine gets another one.
    """
    own = f"areal_jax-{zlib.crc32(os.path.realpath(run_dir).encode()):08x}"
    if not parent:
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else os.fspath(run_dir)
    return pathlib.Path(parent) / own


def remove_directory(directory: pathlib.Path) -> None:
    """Removes a run's weight files. A server that has mapped one keeps it."""
    if directory.exists():
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


def checksum_of(pieces: Iterable[Any]) -> int:
    """Of these bytes, one after the other (anything with the buffer interface): the lower 32 bits of their XXH3_64.

    Against torn files, not against forged ones; chosen because it reads memory nearly as fast as memory can be read.
    """
    total = xxhash.xxh3_64()
    for piece in pieces:
        total.update(piece)
    return total.intdigest() & 0xFFFFFFFF


def write_weights(params: Mapping[str, np.ndarray], version: int, directory: str | os.PathLike[str]) -> WeightFile:
    """Writes `weights-<version>-<checksum>.safetensors`: under another name first, so that no reader sees half of it.

    It is not synced to the disk: it is for readers that run now, and a checkpoint is what survives the machine.
    """
    return _Writer(directory).write(params, version)


class _Writer:
    """Writes versions as `write_weights` does and keeps the files of the newest `KEPT`.

    The next takes the place of the oldest, in memory that is there and mapped already: new pages cost several times the
    copy into them. Only when nobody holds the oldest (`open_weights`): else that stays with its readers, without a
    name, and the next gets a new file.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        self._kept: list[tuple[WeightFile, mmap.mmap]] = []

    def write(self, params: Mapping[str, np.ndarray], version: int) -> WeightFile:
        temporary = self._directory / f".weights-{version}.{os.getpid()}"
        header = _header(params, version)
        size = len(header) + sum(array.nbytes for array in params.values())
        pieces = _serialize(header, params)
        with contextlib.ExitStack() as until_written:
            mapped = self._take_oldest(temporary, size, until_written)
            if mapped is not None:
                mapped.seek(0)
                checksum = checksum_of(_written(pieces, mapped))
            else:
                temporary.unlink(missing_ok=True)  # not cut: it belongs to its readers
                new = until_written.enter_context(open(temporary, "x+b", buffering=0))
                checksum = checksum_of(_written(pieces, new))
                mapped = mmap.mmap(new.fileno(), size)
        path = self._directory / f"weights-{version}-{checksum:08x}.safetensors"
        os.replace(temporary, path)
        file = WeightFile(str(path), version, checksum, size)
        self._kept.append((file, mapped))
        return file

    def _take_oldest(self, temporary: pathlib.Path, size: int, until_written: contextlib.ExitStack) -> mmap.mmap | None:
        """The oldest file's map; the file has a name that no reader knows, and a lock. None: write a new one."""
        if len(self._kept) < KEPT:
            return None
        file, mapped = self._kept.pop(0)
        os.replace(file.path, temporary)
        lock = until_written.enter_context(temporary.open("r+b"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a reader holds it, or this file system has no locks
            return None
        return mapped if size == len(mapped) == os.fstat(lock.fileno()).st_size else None


def _written(pieces: Iterable[memoryview], target: Any) -> Iterator[memoryview]:
    for piece in pieces:
        target.write(piece)
        yield piece


def _header(params: Mapping[str, np.ndarray], version: int) -> bytes:
    """What comes before the arrays in the safetensors format: the length of a text, and the text in JSON.

    It is padded so that they begin aligned, which the format lets a writer do (it asks for 8 bytes). On a CPU a server
    then decodes with the mapped file itself. An array whose size is no multiple misaligns those behind it.
    """
    header: dict[str, Any] = {"__metadata__": {"version": str(version)}}
    end = 0
    for name, array in params.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _serialize(header: bytes, params: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    yield memoryview(header)
    for array in params.values():
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        yield from (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))


def open_weights(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a version's file. Until it is closed, no other version is written in its place (`_Writer`).

    Raises FileNotFoundError when the trainer has removed it, or has begun to write another version in its place.
    """
    with contextlib.ExitStack() as unless_held:
        file = unless_held.enter_context(open(path, "rb", buffering=0))
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileNotFoundError(errno.ENOENT, "another version takes the place of", os.fspath(path)) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        _check_same(os.stat(path), file, path)  # the name goes before the file is overwritten: it was locked in time
        unless_held.pop_all()
    return file


def _check_same(status: os.stat_result, file: BinaryIO, path: str | os.PathLike[str]) -> None:
    if not os.path.samestat(status, os.fstat(file.fileno())):
        raise FileNotFoundError(errno.ENOENT, "a newer file has the name", os.fspath(path))


def read_weights(path: str | os.PathLike[str], checksum: int) -> tuple[int, dict[str, np.ndarray]]:
    """Version and parameters of a file, read-only and mapped, not copied; the map outlives the file's name.

    As long as any of the arrays is referred to, also by a device that took it as it is, its bytes stay what they are.
    Raises ValueError for a torn file, FileNotFoundError for one that the trainer has removed already.
    """
    version, params, check = map_weights(path, checksum)
    check()
    return version, params


def map_weights(path: str | os.PathLike[str], checksum: int) -> tuple[int, dict[str, np.ndarray], Callable[[], None]]:
    """As `read_weights`, with the check of the bytes left to the caller, who may do something else meanwhile.

    The check raises the ValueError for a torn file; where even the header is torn, this does.
    """
    with contextlib.ExitStack() as until_read:
        file = until_read.enter_context(open_weights(path))
        data = np.frombuffer(_map(path, os.fstat(file.fileno())), np.uint8)  # what all the arrays are views of
        weakref.finalize(data, until_read.pop_all().close).atexit = False
    check = functools.partial(_check, data, checksum, str(path))
    try:
        return *_parse(data), check
    except (ValueError, KeyError, TypeError):
        check()
        raise


def _map(path: str | os.PathLike[str], status: os.stat_result) -> mmap.mmap | bytes:
    """The map of a file that the caller holds, kept for versions that take its place: their pages are mapped then."""
    key = status.st_dev, status.st_ino, status.st_size
    with _maps_lock:
        for other, (descriptor, _) in list(_maps.items()):
            if os.fstat(descriptor).st_nlink == 0:  # removed: no version will take its place
                del _maps[other]
                os.close(descriptor)
        if key not in _maps and status.st_size:
            # Opened again: a map keeps open what it is made of, and what the caller has open is the lock.
            with open(path, "rb") as file:
                _check_same(status, file, path)
                _maps[key] = os.dup(file.fileno()), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _maps[key][1] if status.st_size else b""


def parse_weights(data: Any, checksum: int, source: str) -> tuple[int, dict[str, np.ndarray]]:
    """The same from bytes in memory (anything with the buffer interface); `source` is for the error's text."""
    _check(data, checksum, source)
    return _parse(data)


def _check(data: Any, checksum: int, source: str) -> None:
    found = checksum_of([data])
    if found != checksum:
        raise ValueError(
            f"the weights from {source} are torn: checksum {found:08x}, announced was {checksum:08x}; nothing was "
            "loaded, and the version before is still served; publish again"
        )


def _parse(data: Any) -> tuple[int, dict[str, np.ndarray]]:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    version = int(header.pop("__metadata__")["version"])
    params = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data, np.uint8, end - begin, start + begin).view(_DTYPES[entry["dtype"]])
        params[name] = flat.reshape(entry["shape"])
    return version, params


def aligned_memory(size: int) -> np.ndarray:
    """New memory of so many bytes, [size] uint8, that begins where jax takes it as it is."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]


def find_weights(directory: str | os.PathLike[str], version: int | None = None) -> WeightFile | None:
    """The file of a version, or of the newest; None when there is none."""
    files = [file for file in _weight_files(directory) if version is None or file.version == version]
    return max(files, key=lambda file: file.version, default=None)


def _weight_files(directory: str | os.PathLike[str]) -> Iterable[WeightFile]:
    for path in pathlib.Path(directory).glob("weights-*-*.safetensors"):
        _, version, checksum = path.stem.split("-")
        yield WeightFile(str(path), int(version), int(checksum, 16), path.stat().st_size)


def shared_memory_sender(directory: str | os.PathLike[str], push: Callable[[WeightFile], object]) -> Send:
    """A `send` that writes the file and calls `push` with it, which tells every server.

    Keeps the newest file and the one before, for servers that come late, and one for the next version to overwrite.
    Files left by an earlier process are removed: the directory (`run_directory`) belongs to this trainer alone, which
    removes it in the end (`remove_directory`).
    """
    for path in pathlib.Path(directory).glob("*weights-*"):
        path.unlink()
    writer = _Writer(directory)

    def send(params: Mapping[str, Any], version: int) -> dict[str, float]:
        began = time.monotonic()
        for leaf in params.values():
            if hasattr(leaf, "copy_to_host_async"):  # all copies start before the first is waited for
                leaf.copy_to_host_async()
        host = {name: np.asarray(leaf) for name, leaf in params.items()}
        copied = time.monotonic()
        os.makedirs(directory, mode=0o700, exist_ok=True)  # not before: one that ends while it compiles leaves none
        file = writer.write(host, version)
        written = time.monotonic()
        push(file)
        return {"copy": copied - began, "write": written - copied, "push": time.monotonic() - written}

    return send


class Publisher:
    """The trainer's side: sends each version in a thread of its own, at most one at a time, and then announces it.

    `last` holds the seconds of the newest finished publish: "total", and what `send` reported by stage.
    """

    def __init__(
        self,
        send: Send,
        announce: Callable[[int], object],
        failed: Callable[[], object] = lambda: None,
        record: Callable[[dict[str, float]], object] = lambda line: None,
    ):
        """`failed` is called when a version could not be sent, so that nobody waits for what it would unblock.

        `record` takes a line for each version once it is announced: when, and the seconds of each stage.
        """
        self._send, self._announce, self._failed, self._record = send, announce, failed, record
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._running: Future[None] | None = None
        self.last: dict[str, float] = {}

    def publish(self, export: Callable[[], Mapping[str, Any]], version: int) -> None:
        """Waits for the last publish or its error, and then starts to send what `export` gives.

        That is a copy of the params which nobody will donate: made only now, so that there is one of them at a time.
        """
        self._wait()
        self._running = self._thread.submit(self._run, export(), version)

    def close(self) -> None:
        """Waits for the publish under way and raises its error."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _run(self, params: Mapping[str, Any], version: int) -> None:
        began = time.monotonic()
        try:
            stages = self._send(params, version)
        except Exception:
            self._failed()  # the error itself is raised by the next `publish` or `close`
            raise
        self._announce(version)
        self.last = {**(stages or {}), "total": time.monotonic() - began}
        seconds = {f"{stage}_s": spent for stage, spent in self.last.items()}
        self._record({"version": version, "time": time.time(), **seconds})
