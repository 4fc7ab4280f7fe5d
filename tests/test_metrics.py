"""Accumulators and writers of metrics."""

import json
import logging
import sys
import threading

import numpy as np
import pytest

from areal_jax import metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_percentiles_of_one_to_hundred_and_of_nothing():
    found = metrics.percentiles(np.arange(1, 101))
    # linear between ranks: 1 + 0.5 * 99 = 50.5 and 1 + 0.99 * 99 = 99.01
    assert found == pytest.approx({"p50": 50.5, "p99": 99.01, "max": 100.0})
    assert metrics.percentiles([]) == {}


def test_seconds_add_up_by_name_and_start_again_after_take():
    clock = iter([0.0, 2.0, 10.0, 13.0, 20.0, 20.5])
    seconds = metrics.Seconds(clock=lambda: next(clock))
    for name in ("idle_s", "update_s", "idle_s"):
        with seconds.measure(name):
            pass
    assert seconds.take() == {"idle_s": 2.5, "update_s": 3.0}  # 2 - 0 and 20.5 - 20; 13 - 10
    assert seconds.take() == {}


def test_a_line_is_on_disk_at_once_with_numpy_and_nested_values(tmp_path):
    writer = metrics.JsonlWriter(tmp_path / "new" / "metrics.jsonl")
    writer.write({"version": np.int64(3), "loss": np.float32(0.5), "staleness/histogram": np.array([4, 0, 1])})
    writer.write({"version": 4, "dropped": {"overdue": np.int32(2)}, "done": np.bool_(True)})
    assert lines(writer.path) == [
        {"version": 3, "loss": 0.5, "staleness/histogram": [4, 0, 1]},
        {"version": 4, "dropped": {"overdue": 2}, "done": True},
    ]
    writer.close()


@pytest.mark.parametrize("value", [float("nan"), np.float32("inf"), np.array([1.0, -np.inf])])
def test_a_value_that_is_not_finite_is_null_and_named_and_logged(tmp_path, caplog, value):
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        writer.write({"version": 7, "loss": value, "lr": 0.1})
    (line,) = lines(writer.path)
    assert line["loss"] in (None, [1.0, None]) and line["lr"] == 0.1
    assert next(iter(line["not_finite"])).startswith("loss")
    assert "version 7" in caplog.text and "loss" in caplog.text
    writer.close()


def test_appending_goes_on_after_a_line_that_a_killed_process_left_unfinished(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1}\n{"version": 2, "lo')
    writer = metrics.JsonlWriter(path)
    writer.write({"version": 2})
    assert [line["version"] for line in lines(path)] == [1, 2]
    writer.close()


def test_truncate_after_drops_what_the_checkpoint_does_not_hold_and_goes_on(tmp_path):
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
    for version in range(1, 6):
        writer.write({"version": version})
    writer.write({"time": 1.0})  # a line without a version stays
    writer.truncate_after(3)
    writer.write({"version": 4, "again": True})
    assert lines(writer.path) == [
        {"version": 1},
        {"version": 2},
        {"version": 3},
        {"time": 1.0},
        {"version": 4, "again": True},
    ]
    writer.close()


def test_lines_of_many_threads_never_mix(tmp_path):
    writer = metrics.JsonlWriter(tmp_path / "rollout.jsonl")

    def work(thread: int) -> None:
        for i in range(50):
            writer.write({"thread": thread, "i": i, "text": "x" * 500})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    written = lines(writer.path)
    assert len(written) == 8 * 50
    for n in range(8):  # each thread's own order is kept
        assert [line["i"] for line in written if line["thread"] == n] == list(range(50))


def test_scalars_join_nested_names_and_leave_out_what_is_no_number():
    record = {
        "version": 3,
        "time": 1.5,
        "loss": np.float32(2),
        "dropped": {"overdue": 1},
        "staleness/histogram": [1, 2],
        "phase": "during",
        "absent": None,
    }
    assert dict(metrics.scalars(record)) == {"loss": 2.0, "dropped/overdue": 1.0}


def test_tensorboard_holds_the_numbers_and_a_resumed_run_hides_the_lost_steps(tmp_path):
    from tensorboardX.proto import event_pb2

    first = metrics.StepLog(tmp_path, version=0, tensorboard=True, wandb=False)
    for version in (1, 2, 3):
        first.write({"version": version, "time": 100.0 + version, "loss": 10.0 * version})
    first.close()
    second = metrics.StepLog(tmp_path, version=1, tensorboard=True, wandb=False)
    second.write({"version": 2, "time": 200.0, "loss": -1.0})
    second.close()

    assert [line["version"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    events = [e for path in sorted((tmp_path / "tensorboard").iterdir()) for e in read_events(path, event_pb2.Event)]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(1, "loss", 10.0), (2, "loss", 20.0), (3, "loss", 30.0), (2, "loss", -1.0)]
    started = [e.step for e in events if e.HasField("session_log")]
    assert started == [1, 2]  # the second file: hide what was written for version 2 and later


def read_events(path, message):
    """Event records of a TensorBoard file: 8 bytes length, 4 bytes crc, the message, 4 bytes crc."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield message.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4


def test_wandb_is_refused_with_the_remedy_when_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"metrics.wandb=True .*pip install wandb"):
        metrics.StepLog(tmp_path, version=0, tensorboard=False, wandb=True)


def test_wandb_gets_the_numbers_of_a_step_when_it_is_there(tmp_path, monkeypatch):
    class Run:
        def __init__(self):
            self.logged = []

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.logged.append("finished")

    run = Run()
    fake = type(sys)("wandb")
    fake.init = lambda **options: run
    fake.__spec__ = type("Spec", (), {})()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    step_log = metrics.StepLog(tmp_path, version=0, tensorboard=False, wandb=True)
    step_log.write({"version": 1, "loss": 0.5, "staleness/histogram": [1]})
    step_log.close()
    assert run.logged == [(1, {"loss": 0.5}), "finished"]


def test_every_metric_is_explained_in_one_row_of_the_table():
    rows = metrics.table().splitlines()
    assert len(rows) == 2 + len(metrics.METRICS)
    assert all(row.count("|") == 4 for row in rows)
    assert "| `ratio/clipped` |" in metrics.table() and "`update/clip_ratio/avg`" in metrics.table()
