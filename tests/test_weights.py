import errno
import os
import pathlib
import stat
import subprocess
import sys
import threading
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash

from areal_jax import weights
from areal_jax.weights import (
    KEPT,
    Publisher,
    map_weights,
    open_weights,
    read_weights,
    shared_memory_sender,
    write_weights,
)

ROOT = pathlib.Path(__file__).parents[1]


def some_params(seed=0):
    values = np.random.default_rng(seed)
    return {
        "embedding": values.normal(size=(7, 5)).astype(np.float32),
        "layers.0.kernel": values.normal(size=(3, 4, 2)).astype(ml_dtypes.bfloat16),
        "layers.0.transposed": values.normal(size=(4, 6)).astype(np.float32).T,
        "scale": np.array(2.5, np.float32),
        "steps": np.arange(3, dtype=np.int32),
        "flags": np.array([True, False, True]),
        "tail": values.normal(size=(2,)).astype(np.float16),
    }


def test_round_trip_keeps_names_values_types_shapes_and_version(tmp_path):
    params = some_params()
    file = write_weights(params, 12, tmp_path)
    assert file.version == 12
    version, read = read_weights(file.path, file.checksum)
    assert version == 12
    assert list(read) == list(params)
    for name, array in params.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array, strict=True)


def test_file_is_what_the_safetensors_package_reads(tmp_path):
    params = {name: array for name, array in some_params().items() if array.dtype != ml_dtypes.bfloat16}
    file = write_weights(params, 3, tmp_path)
    for name, array in safetensors.numpy.load_file(file.path).items():
        np.testing.assert_array_equal(array, params[name], strict=True)
    with safetensors.safe_open(file.path, "np") as opened:
        assert opened.metadata() == {"version": "3"}
        assert set(opened.keys()) == set(params)


def test_checksum_and_size_are_those_of_the_files_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 16)  # many pieces
    file = write_weights(some_params(), 1, tmp_path)
    data = pathlib.Path(file.path).read_bytes()
    assert (file.checksum, file.size) == (xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF, len(data))
    assert weights.find_weights(tmp_path, 1) == file


def test_a_mapped_file_is_checked_when_the_caller_says_so(tmp_path):
    file = write_weights({"a": np.arange(100, dtype=np.float32)}, 3, tmp_path)
    data = bytearray(pathlib.Path(file.path).read_bytes())
    data[-1] ^= 1
    pathlib.Path(file.path).write_bytes(data)
    version, params, check = map_weights(file.path, file.checksum)
    assert version == 3 and params["a"][:99].tolist() == list(range(99))
    with pytest.raises(ValueError, match="are torn"):
        check()


@pytest.mark.parametrize("tear", ["flip", "cut", "empty"])
def test_a_torn_file_is_refused_with_both_checksums(tmp_path, tear):
    file = write_weights(some_params(), 1, tmp_path)
    data = bytearray(pathlib.Path(file.path).read_bytes())
    if tear == "flip":
        data[-1] ^= 1
    torn = {"flip": data, "cut": data[:-10], "empty": b""}[tear]
    pathlib.Path(file.path).write_bytes(torn)
    found = weights.checksum_of([torn])
    with pytest.raises(ValueError, match=f"torn: checksum {found:08x}, announced was {file.checksum:08x}"):
        read_weights(file.path, file.checksum)


@pytest.mark.parametrize("version", [1, 10, 100, 1000])  # headers of different lengths
def test_arrays_are_aligned_in_the_file_so_that_devices_can_take_them_as_they_are(tmp_path, version):
    file = write_weights({"kernel": np.ones(3, np.float64)}, version, tmp_path)
    kernel = read_weights(file.path, file.checksum)[1]["kernel"]
    assert kernel.flags.aligned and kernel.ctypes.data % weights.ALIGNMENT == 0


def test_a_device_takes_mapped_arrays_as_they_are(tmp_path):
    params = {name: np.arange(64, dtype=np.float32) for name in ("first", "second")}
    file = write_weights(params, 1, tmp_path)
    read = read_weights(file.path, file.checksum)[1]
    assert [jax.device_put(array).unsafe_buffer_pointer() for array in read.values()] == [
        array.ctypes.data for array in read.values()
    ]


def test_new_memory_is_aligned():
    memory = [weights.aligned_memory(size) for size in (1, 100, 1 << 20)]
    assert [len(each) for each in memory] == [1, 100, 1 << 20]
    assert all(each.ctypes.data % weights.ALIGNMENT == 0 for each in memory)


def test_a_write_that_fails_midway_leaves_no_weights_to_read(tmp_path, monkeypatch):
    before = write_weights(some_params(), 1, tmp_path)

    def pieces(header, params):
        yield memoryview(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(weights, "_serialize", pieces)
    with pytest.raises(OSError, match="no space"):
        write_weights(some_params(), 2, tmp_path)
    assert weights.find_weights(tmp_path) == before
    assert weights.find_weights(tmp_path, 2) is None


def test_what_is_read_is_mapped_read_only_and_outlives_the_files_name(tmp_path):
    params = some_params()
    file = write_weights(params, 1, tmp_path)
    _, read = read_weights(file.path, file.checksum)
    os.unlink(file.path)
    np.testing.assert_array_equal(read["embedding"], params["embedding"])
    assert not read["embedding"].flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        read["embedding"][0, 0] = 1.0


def test_sender_writes_pushes_and_keeps_the_newest_files(tmp_path):
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "weights-9-0000abcd.safetensors").write_bytes(b"of a process that was killed")
    (directory / ".weights-9.123").write_bytes(b"half")
    pushed = []
    send = shared_memory_sender(directory, pushed.append)
    assert list(directory.iterdir()) == []
    for version in (1, 2, 3, 4):
        stages = send(some_params(version), version)
        assert set(stages) == {"copy", "write", "push"}
        assert all(seconds >= 0 for seconds in stages.values())
    assert [file.version for file in pushed] == [1, 2, 3, 4]
    assert sorted(path.name.split("-")[1] for path in directory.iterdir()) == ["2", "3", "4"]
    np.testing.assert_array_equal(
        read_weights(pushed[3].path, pushed[3].checksum)[1]["embedding"], some_params(4)["embedding"]
    )


# A version takes the place of the oldest file, but never under a reader.


def filled(version):
    """Parameters that say everywhere which version they are of."""
    return {"kernel": np.full((300, 7), version, np.float32), "bias": np.full(5, version, np.float32)}


def inode(file):
    return os.stat(file.path).st_ino


def assert_of_version(params, version):
    assert {float(value) for array in params.values() for value in np.unique(array)} == {version}


class Publishing:
    """Publishes the next version; `files` are all that were, whether they are there or not."""

    def __init__(self, directory):
        self.files = []
        self._send = shared_memory_sender(directory, self.files.append)

    def next(self):
        version = len(self.files) + 1
        self._send(filled(version), version)
        return self.files[-1]


@pytest.fixture
def publishing(tmp_path):
    return Publishing(tmp_path / "own")


def test_a_version_takes_the_place_of_the_oldest_file(publishing):
    inodes = []
    for version in range(1, 3 * KEPT):
        file = publishing.next()
        assert_of_version(read_weights(file.path, file.checksum)[1], version)
        inodes.append(inode(file))
    assert len(set(inodes)) == KEPT and inodes[KEPT:] == inodes[:-KEPT]
    with pytest.raises(FileNotFoundError):
        read_weights(publishing.files[0].path, publishing.files[0].checksum)


def test_parameters_of_another_size_get_a_new_file(tmp_path):
    send = shared_memory_sender(tmp_path, (files := []).append)
    for version in range(1, KEPT + 3):
        rows = 3 if version <= KEPT else 2
        send({"kernel": np.full((rows, 64), version, np.float32)}, version)
        assert read_weights(files[-1].path, files[-1].checksum)[1]["kernel"].shape == (rows, 64)
        assert files[-1].size == os.path.getsize(files[-1].path)


@pytest.mark.parametrize("place", [lambda array: array, jax.device_put], ids=["numpy", "device"])
def test_arrays_keep_their_bytes_until_the_last_of_them_is_gone(publishing, place):
    first = publishing.next()
    first_inode = inode(first)
    held = {name: place(array) for name, array in read_weights(first.path, first.checksum)[1].items()}
    later = [inode(publishing.next()) for _ in range(2 * KEPT)]
    assert first_inode not in later  # it was left to its reader, without a name
    assert_of_version(held, 1)

    newest = publishing.files[-1]
    held = {name: place(array) for name, array in read_weights(newest.path, newest.checksum)[1].items()}
    newest_inode, version = inode(newest), newest.version
    del held["bias"]
    later = [inode(publishing.next()) for _ in range(KEPT - 1)]
    assert_of_version(held, version)
    del held["kernel"]
    jax.block_until_ready(jax.device_put(0))  # jax lets go of what it took when it is called the next time
    assert inode(publishing.next()) == newest_inode


READER = """
import sys
from areal_jax.weights import read_weights
params = read_weights(sys.argv[1], int(sys.argv[2]))[1]
print("holds", flush=True)
sys.stdin.readline()
print(sorted({float(value) for array in params.values() for value in array.ravel()}), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_another_process_keeps_its_bytes_as_long_as_it_runs(publishing, end):
    for _ in range(KEPT - 1):
        publishing.next()
    file = publishing.next()
    file_inode = inode(file)
    command = [sys.executable, "-c", READER, file.path, str(file.checksum)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as reader:
        assert reader.stdout.readline() == "holds\n"
        if end == "finished":
            assert file_inode not in [inode(publishing.next()) for _ in range(2 * KEPT)]
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"[{float(file.version)}]\n"
            reader.communicate("\n")
        else:
            for _ in range(KEPT - 1):
                publishing.next()
            reader.kill()
            reader.wait()
            assert inode(publishing.next()) == file_inode


def test_a_reader_that_comes_while_a_version_is_written_finds_no_file(publishing, monkeypatch):
    first = publishing.next()
    for _ in range(KEPT - 1):
        publishing.next()
    serialize, met = weights._serialize, []

    def meanwhile(header, params):
        yield from serialize(header, params)
        hidden = next(pathlib.Path(first.path).parent.glob(".weights-*"))
        for path in (first.path, hidden):  # by its name, and as if it had been opened before that was gone
            with pytest.raises(FileNotFoundError):
                open_weights(path)
            met.append(path)

    monkeypatch.setattr(weights, "_serialize", meanwhile)
    assert_of_version(read_weights(publishing.next().path, publishing.files[-1].checksum)[1], KEPT + 1)
    assert len(met) == 2


def test_a_reader_whose_lock_comes_after_another_version_finds_no_file(publishing, monkeypatch):
    first = publishing.next()
    flock = weights.fcntl.flock

    def late(file, operation):
        monkeypatch.setattr(weights.fcntl, "flock", flock)
        for _ in range(KEPT):
            publishing.next()
        assert os.fstat(file.fileno()).st_ino == inode(publishing.files[-1])  # what it has opened is of that version
        flock(file, operation)

    monkeypatch.setattr(weights.fcntl, "flock", late)
    with pytest.raises(FileNotFoundError):
        open_weights(first.path)


@pytest.mark.parametrize(
    ("module", "name", "read"),
    [(weights.fcntl, "flock", lambda file: open_weights(file.path)),
     (weights, "_map", lambda file: read_weights(file.path, file.checksum))],
    ids=["opened", "mapped"],
)  # fmt: skip
def test_a_reader_never_takes_a_file_for_another_of_the_same_name(tmp_path, monkeypatch, module, name, read):
    file = Publishing(tmp_path).next()
    original = getattr(module, name)

    def restarted(*arguments):  # a trainer that resumes writes the same version again
        monkeypatch.setattr(module, name, original)
        assert Publishing(tmp_path).next() == file
        return original(*arguments)

    monkeypatch.setattr(module, name, restarted)
    with pytest.raises(FileNotFoundError, match="a newer file has the name"):
        read(file)
    assert_of_version(read_weights(file.path, file.checksum)[1], 1)


def test_where_there_are_no_locks_every_version_gets_a_new_file(publishing, monkeypatch):
    def refused(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(weights.fcntl, "flock", refused)
    held = []
    for version in range(1, 2 * KEPT + 1):
        file = publishing.next()
        held.append((version, read_weights(file.path, file.checksum)[1]))
    for version, params in held:
        assert_of_version(params, version)


FOLLOWER = """
import collections, sys
from areal_jax import weights
held, seen = collections.deque(maxlen=2), set()
print("follows", flush=True)
while not seen or max(seen) < int(sys.argv[2]):
    try:
        version, params = weights.read_weights(*[(f.path, f.checksum) for f in [weights.find_weights(sys.argv[1])]][0])
    except (FileNotFoundError, AttributeError):  # gone already, or not there yet
        continue
    held.append((version, params))
    seen.add(version)
    for version, params in held:
        assert {float(v) for array in params.values() for v in array.ravel()[::37]} == {version}, version
print(len(seen), flush=True)
"""


def test_readers_that_follow_the_newest_version_never_see_half_of_it_or_another(tmp_path):
    directory, versions = tmp_path / "own", 400
    command = [sys.executable, "-c", FOLLOWER, str(directory), str(versions)]
    publishing = Publishing(directory)
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "follows\n"
    inodes = [inode(publishing.next()) for _ in range(versions)]
    for reader in readers:
        seen, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0 and int(seen) > 1  # with a torn file or a wrong value it ends with an error
    assert KEPT < len(set(inodes))


def test_maps_of_removed_files_are_let_go(publishing, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_maps", {})
    for _ in range(KEPT):
        file = publishing.next()
        read_weights(file.path, file.checksum)
    assert len(weights._maps) == KEPT
    weights.remove_directory(tmp_path / "own")
    file = write_weights(filled(1), 1, tmp_path)
    read_weights(file.path, file.checksum)
    assert [key[1] for key in weights._maps] == [inode(file)]


def test_sender_makes_a_directory_that_others_cannot_read(tmp_path):
    shared_memory_sender(tmp_path / "own", lambda file: None)(some_params(1), 1)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700


def test_runs_have_directories_of_their_own_and_find_them_again(tmp_path):
    first = weights.run_directory("", tmp_path / "a")
    assert first == weights.run_directory("", tmp_path / "a" / ".." / "a")
    assert first != weights.run_directory("", tmp_path / "b")
    assert weights.run_directory("/elsewhere", tmp_path).parent.as_posix() == "/elsewhere"


def test_every_copy_to_the_host_starts_before_the_first_is_waited_for(tmp_path):
    events = []

    class OnDevice:
        def __init__(self, name):
            self.name = name

        def copy_to_host_async(self):
            events.append(("starts", self.name))

        def __array__(self, dtype=None, copy=None):
            events.append(("is waited for", self.name))
            return np.zeros(3, np.float32)

    shared_memory_sender(tmp_path, push=lambda file: None)({name: OnDevice(name) for name in "abc"}, 1)
    assert events == [(what, name) for what in ("starts", "is waited for") for name in "abc"]


def test_publish_returns_at_once_sends_one_at_a_time_and_announces_last():
    events, may_send, began = [], threading.Event(), time.time()

    def send(params, version):
        may_send.wait(10)
        events.append(("sent", version))
        return {"copy": 0.5}

    lines = []
    publisher = Publisher(send, lambda version: events.append(("announced", version)), record=lines.append)
    publisher.publish(dict, 1)
    assert events == lines == []
    threading.Timer(0.1, may_send.set).start()
    of_second = []
    publisher.publish(lambda: of_second.append(len(events)) or {}, 2)  # waits for the first
    assert of_second == [2]  # no copy is made beside the one that is still sent
    assert events[:2] == [("sent", 1), ("announced", 1)]
    publisher.close()
    assert events == [("sent", 1), ("announced", 1), ("sent", 2), ("announced", 2)]
    assert publisher.last["copy"] == 0.5
    assert [(line["version"], line["copy_s"]) for line in lines] == [(1, 0.5), (2, 0.5)]
    assert lines[0]["total_s"] >= 0.1 and began + 0.1 <= lines[0]["time"] <= lines[1]["time"] <= time.time()
    assert publisher.last["total"] < 5


def test_a_failed_publish_is_never_announced_and_its_error_reaches_the_next_call():
    announced = []

    def send(params, version):
        raise ValueError("version 1 was refused: a wrong tree")

    publisher = Publisher(send, announced.append)
    publisher.publish(dict, 1)
    with pytest.raises(ValueError, match="a wrong tree"):
        publisher.publish(dict, 2)
    publisher.publish(dict, 3)
    with pytest.raises(ValueError, match="a wrong tree"):
        publisher.close()
    assert announced == []
    publisher.close()  # nothing is left to raise


def test_a_failed_publish_is_told_at_once():
    def send(params, version):
        raise ConnectionError("no server holds version 1")

    told = threading.Event()
    publisher = Publisher(send, lambda version: None, failed=told.set)
    publisher.publish(dict, 1)
    assert told.wait(10)  # the trainer may be waiting for a batch that never comes
    with pytest.raises(ConnectionError, match="no server holds version 1"):
        publisher.close()


def test_publisher_leaves_no_thread_behind():
    publisher = Publisher(lambda params, version: time.sleep(0.01), lambda version: None)
    publisher.publish(dict, 1)
    publisher.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("publisher")]
