import os
import pathlib
import stat
import threading
import time
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from areal_jax import weights
from areal_jax.weights import Publisher, read_weights, shared_memory_sender, write_weights


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
    assert (file.checksum, file.size) == (zlib.crc32(data), len(data))
    assert weights.find_weights(tmp_path, 1) == file


@pytest.mark.parametrize("tear", ["flip", "cut", "empty"])
def test_a_torn_file_is_refused_with_both_checksums(tmp_path, tear):
    file = write_weights(some_params(), 1, tmp_path)
    data = bytearray(pathlib.Path(file.path).read_bytes())
    if tear == "flip":
        data[-1] ^= 1
    torn = {"flip": data, "cut": data[:-10], "empty": b""}[tear]
    pathlib.Path(file.path).write_bytes(torn)
    with pytest.raises(ValueError, match=f"torn: checksum {zlib.crc32(torn):08x}, announced was {file.checksum:08x}"):
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

    def pieces(params, version):
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


def test_sender_writes_pushes_and_keeps_the_newest_two_files(tmp_path):
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "weights-9-0000abcd.safetensors").write_bytes(b"of a process that was killed")
    (directory / ".weights-9.123").write_bytes(b"half")
    pushed = []
    send = shared_memory_sender(directory, pushed.append)
    assert list(directory.iterdir()) == []
    for version in (1, 2, 3):
        stages = send(some_params(version), version)
        assert set(stages) == {"copy", "write", "push"}
        assert all(seconds >= 0 for seconds in stages.values())
    assert [file.version for file in pushed] == [1, 2, 3]
    assert sorted(path.name.split("-")[1] for path in directory.iterdir()) == ["2", "3"]
    np.testing.assert_array_equal(
        read_weights(pushed[2].path, pushed[2].checksum)[1]["embedding"], some_params(3)["embedding"]
    )


def test_sender_makes_a_directory_that_others_cannot_read(tmp_path):
    shared_memory_sender(tmp_path / "own", lambda file: None)(some_params(1), 1)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700


def test_runs_have_directories_of_their_own_and_find_them_again(tmp_path):
    first = weights.run_directory("", tmp_path / "a")
    assert first == weights.run_directory("", tmp_path / "a" / ".." / "a")
    assert first != weights.run_directory("", tmp_path / "b")
    assert weights.run_directory("/elsewhere", tmp_path).parent.as_posix() == "/elsewhere"


def test_publish_returns_at_once_sends_one_at_a_time_and_announces_last():
    events, may_send, began = [], threading.Event(), time.time()

    def send(params, version):
        may_send.wait(10)
        events.append(("sent", version))
        return {"copy": 0.5}

    lines = []
    publisher = Publisher(send, lambda version: events.append(("announced", version)), record=lines.append)
    publisher.publish({}, 1)
    assert events == lines == []
    threading.Timer(0.1, may_send.set).start()
    publisher.publish({}, 2)  # waits for the first
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
    publisher.publish({}, 1)
    with pytest.raises(ValueError, match="a wrong tree"):
        publisher.publish({}, 2)
    publisher.publish({}, 3)
    with pytest.raises(ValueError, match="a wrong tree"):
        publisher.close()
    assert announced == []
    publisher.close()  # nothing is left to raise


def test_a_failed_publish_is_told_at_once():
    def send(params, version):
        raise ConnectionError("no server holds version 1")

    told = threading.Event()
    publisher = Publisher(send, lambda version: None, failed=told.set)
    publisher.publish({}, 1)
    assert told.wait(10)  # the trainer may be waiting for a batch that never comes
    with pytest.raises(ConnectionError, match="no server holds version 1"):
        publisher.close()


def test_publisher_leaves_no_thread_behind():
    publisher = Publisher(lambda params, version: time.sleep(0.01), lambda version: None)
    publisher.publish({}, 1)
    publisher.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("publisher")]
