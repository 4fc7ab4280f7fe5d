import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import grpc
import numpy as np
import pytest

from areal_jax import weights
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.transport import areal_pb2 as pb
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport.clients import GenerationPool, TrainerClient, fetch_weights, push_weights
from areal_jax.transport.servers import serve_trainer
from areal_jax.transport.trainer_service import TrainerServicer
from areal_jax.types import (
    UNPUBLISHED,
    Announcement,
    Chunk,
    Completion,
    GenerateRequest,
    Progress,
    Sampling,
    Trajectory,
)
from areal_jax.weights import Publisher, shared_memory_sender, write_weights
from tests.transport.fakes import SHAPES, FakeScheduler, serve_fake, token_at


def request(uid=7, samples=(0, 1), max_new_tokens=6, prompt=(1, 2), **fields):
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return GenerateRequest(
        uid=uid, prompt_tokens=np.array(prompt, np.int32), samples=samples, sampling=sampling, **fields
    )


def assert_complete(completion, uid, sample, count=6):
    """All tokens of the fake's sequence in their order, each with its own log-probability: no seam, none twice."""
    np.testing.assert_array_equal(completion.tokens, [token_at(uid, sample, p) for p in range(count)])
    np.testing.assert_array_equal(completion.logprobs, -np.arange(count, dtype=np.float32) / 8)
    assert (np.diff(completion.versions) >= 0).all()
    assert completion.finish_reason == "length"


def generate(addresses, *requests, patience_s=10.0, meanwhile=None):
    """Completions of all requests, asked at the same time through one pool."""

    async def ask():
        pool = GenerationPool(addresses, patience_s=patience_s)
        try:
            asked = asyncio.gather(*map(pool, requests))
            if meanwhile is not None:
                await asyncio.to_thread(meanwhile)
            return await asyncio.wait_for(asked, 30)
        finally:
            await pool.close()

    return asyncio.run(ask())


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@contextlib.contextmanager
def server_process(port=0, pause_s=0.02, version=0):
    """A generation server in a process of its own, which the block may kill; gives the process and its address."""
    command = [sys.executable, "-m", "tests.transport.fakes", str(port), str(pause_s), str(version)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def kill_in_the_middle(process, address, while_s=0.3):
    """Kills a server some time after it has begun to work on a request."""
    with grpc.insecure_channel(address) as channel:
        status = pb_grpc.GenerationStub(channel).Status
        until(lambda: status(pb.StatusRequest()).values["active"])
    time.sleep(while_s)
    process.send_signal(signal.SIGKILL)
    process.wait()


# GenerationPool


def test_completions_come_in_the_order_of_the_samples_asked_for():
    server = serve_fake(FakeScheduler(step=4))
    for completions in generate([server.address], request(samples=(3, 0, 2))):
        for sample, completion in zip((3, 0, 2), completions, strict=True):
            assert_complete(completion, 7, sample)
    server.stop()


def test_a_request_past_its_time_is_a_timeout_error_and_not_asked_again():
    scheduler = FakeScheduler()
    scheduler.hold.set()
    server = serve_fake(scheduler)

    def run_out():
        until(lambda: scheduler.requests)
        _, _, on_error = scheduler._running.pop(0)
        on_error(TimeoutError("prompt 7 was not finished within timeout_s=0.5"))

    with pytest.raises(TimeoutError, match=f"{server.address}: prompt 7 was not finished within timeout_s=0.5"):
        generate([server.address], request(timeout_s=0.5), meanwhile=run_out)
    assert len(scheduler.requests) == 1
    server.stop()


def test_a_sample_may_end_with_a_chunk_without_tokens():
    scheduler = FakeScheduler()
    scheduler.hold.set()
    server = serve_fake(scheduler)
    none = np.zeros(0, np.int32)

    def finish():
        until(lambda: scheduler.requests)
        _, on_chunks, _ = scheduler._running.pop(0)
        on_chunks([Chunk(0, np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "")])
        on_chunks([Chunk(0, none, np.zeros(0, np.float32), none, "stop")])

    ((completion,),) = generate([server.address], request(samples=(0,)), meanwhile=finish)
    assert (completion.tokens.tolist(), completion.finish_reason) == ([5], "stop")
    server.stop()


def test_the_server_with_the_fewest_outstanding_samples_is_asked():
    schedulers = [FakeScheduler() for _ in range(2)]
    for scheduler in schedulers:
        scheduler.hold.set()
    servers = [serve_fake(scheduler) for scheduler in schedulers]

    def release():
        until(lambda: sum(len(s.requests) for s in schedulers) == 5)
        for scheduler in schedulers:
            scheduler.hold.clear()

    # 4 samples go to the first; then 1, 1, 1 to the second until that has 3, and the last (3 < 4) too.
    asked = [request(0, (0, 1, 2, 3)), *(request(uid, (0,)) for uid in (1, 2, 3, 4))]
    generate([server.address for server in servers], *asked, meanwhile=release)
    assert [sorted(sent.uid for sent in scheduler.requests) for scheduler in schedulers] == [[0], [1, 2, 3, 4]]
    for server in servers:
        server.stop()


def test_a_killed_servers_request_goes_on_elsewhere_from_the_tokens_it_had():
    survivor = FakeScheduler()
    server = serve_fake(survivor)
    with server_process() as (process, address):
        # The first of two with nothing to do is asked: the one that dies, after some 15 of 500 boundaries.
        (completions,) = generate(
            [address, server.address],
            request(max_new_tokens=1000),
            meanwhile=lambda: kill_in_the_middle(process, address),
        )
    for sample, completion in enumerate(completions):
        assert_complete(completion, 7, sample, 1000)
    (sent,) = survivor.requests
    assert 0 < len(sent.partial[0].tokens) < 1000
    np.testing.assert_array_equal(sent.partial[0].tokens, completions[0].tokens[: len(sent.partial[0].tokens)])
    server.stop()


def test_only_unfinished_samples_go_on_elsewhere():
    first, second = FakeScheduler(), FakeScheduler()
    servers = [serve_fake(first), serve_fake(second)]
    done = Completion(np.array([17], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    (completions,) = generate([s.address for s in servers], request(samples=(0, 1), partial={1: done}))
    assert_complete(completions[0], 7, 0)
    assert completions[1].finish_reason == "stop"
    assert [sent.samples for sent in first.requests] == [(0,)]
    for server in servers:
        server.stop()


def test_a_server_that_stops_in_the_middle_is_one_that_died():
    slow, other = FakeScheduler(pause_s=0.02), FakeScheduler()
    servers = [serve_fake(slow), serve_fake(other)]

    def stop():
        until(lambda: slow.requests)
        time.sleep(0.1)
        servers[0].stop()

    (completions,) = generate([s.address for s in servers], request(max_new_tokens=100), meanwhile=stop)
    for sample, completion in enumerate(completions):
        assert_complete(completion, 7, sample, 100)
    assert len(other.requests) == 1
    servers[1].stop()


def test_versions_never_fall_when_the_next_server_is_behind():
    with server_process(version=5) as (process, address):
        behind = FakeScheduler(version=3)
        server = serve_fake(behind)
        held = Completion(
            tokens=np.array([7, 8], np.int32),
            logprobs=-np.arange(2, dtype=np.float32) / 8,
            versions=np.array([2, 3], np.int32),
            finish_reason="",
        )
        asked = request(samples=(0,), max_new_tokens=1000, partial={0: held})
        ((completion,),) = generate(
            [address, server.address], asked, meanwhile=lambda: kill_in_the_middle(process, address)
        )
        # What version 5 had made is made again by version 3; the two tokens from before are kept.
        assert_complete(completion, 7, 0, 1000)
        assert completion.versions.tolist() == [2] + [3] * 999
        np.testing.assert_array_equal(behind.requests[0].partial[0].versions, [2, 3])
        server.stop()


def test_a_server_that_comes_back_gets_its_requests_again():
    async def ask():
        with server_process() as (process, address):
            pool = GenerationPool([address], patience_s=20)
            asked = asyncio.ensure_future(pool(request(max_new_tokens=200)))
            await asyncio.to_thread(kill_in_the_middle, process, address)
            with server_process(port=int(address.rpartition(":")[2])):
                completions = await asyncio.wait_for(asked, 20)
            await pool.close()
            return completions

    for sample, completion in enumerate(asyncio.run(ask())):
        assert_complete(completion, 7, sample, 200)


def test_a_busy_server_is_asked_again():
    scheduler = FakeScheduler(max_waiting=0)
    server = serve_fake(scheduler)

    def relent():
        time.sleep(0.2)
        scheduler.max_waiting = 10

    ((completion,),) = generate([server.address], request(samples=(0,)), meanwhile=relent)
    assert_complete(completion, 7, 0)
    server.stop()


def test_a_request_that_can_never_run_is_a_value_error_at_once():
    server = serve_fake(FakeScheduler())
    with pytest.raises(ValueError, match="prompt 7 has 9 tokens; this server holds 8"):
        generate([server.address], request(prompt=range(9)))
    server.stop()


def test_when_no_server_answers_for_the_patience_it_ends_in_an_error():
    server = serve_fake(FakeScheduler())
    server.stop()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=f"generation server {server.address}: UNAVAILABLE"):
        generate([server.address], request(), patience_s=0.5)
    assert time.monotonic() - began < 5


def test_a_cancelled_request_is_cancelled_on_the_server():
    scheduler = FakeScheduler()
    scheduler.hold.set()
    server = serve_fake(scheduler)

    async def ask():
        pool = GenerationPool([server.address])
        asked = asyncio.ensure_future(pool(request()))
        await asyncio.to_thread(until, lambda: scheduler.requests)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(until, lambda: scheduler.cancelled == [0])
        assert await pool.status() == {server.address: {"version": 0.0, "active": 0.0}}
        await pool.close()

    asyncio.run(ask())
    server.stop()


def test_a_token_is_shown_to_generation_servers():
    server = serve_fake(FakeScheduler(), token="secret")
    with pytest.raises(PermissionError, match="AREAL_JAX_TOKEN"):
        generate([server.address], request())

    async def ask():
        pool = GenerationPool([server.address], token="secret")
        completions = await pool(request(samples=(0,)))
        await pool.close()
        return completions

    assert_complete(asyncio.run(ask())[0], 7, 0)
    server.stop()


# TrainerClient


def make_queue(*, opened=True):
    queue = TrajectoryQueue(batch_size=2, group_size=2, max_staleness=1, overdue="mask")
    if opened:
        queue.announce(0)
    return queue


def group(uid):
    return [
        Trajectory(
            uid=uid,
            sample=sample,
            prompt_tokens=np.array([1, 2, 3], np.int32),
            tokens=np.array([4] * (sample + 1), np.int32),
            behav_logprobs=np.full(sample + 1, -0.25, np.float32),
            versions=np.zeros(sample + 1, np.int32),
            reward=5.0,
            truncated=False,
        )
        for sample in range(2)
    ]


def with_trainer(use, queue=None, **options):
    """Runs `use(client, queue)` against a served queue."""
    queue = queue or make_queue()
    server = serve_trainer(queue, address="127.0.0.1:0", **options)

    async def run():
        client = TrainerClient(server.address, patience_s=10)
        try:
            return await asyncio.wait_for(use(client, queue), 20)
        finally:
            await client.close()

    try:
        return asyncio.run(run())
    finally:
        server.stop()


def test_a_group_is_put_once_and_comes_out_as_it_went_in():
    async def use(client, queue):
        assert await client.put(group(3))
        assert not await client.put(group(3))
        await client.discard(0, 2, "failed")
        assert await client.progress() == Progress(version=0, low=1, done=(3,), counted=2, lost=2)
        assert await client.status() == {"version": 0, "waiting": 2, "counted": 2, "dropped/failed": 2}
        return await client.get(0, timeout_s=5)

    for mine, theirs in zip(with_trainer(use), group(3), strict=True):
        assert (mine.uid, mine.sample, mine.reward, mine.truncated) == (3, theirs.sample, 5.0, False)
        np.testing.assert_array_equal(mine.tokens, theirs.tokens, strict=True)
        np.testing.assert_array_equal(mine.versions, theirs.versions, strict=True)


def test_the_queues_errors_reach_the_caller_as_its_own():
    async def use(client, queue):
        with pytest.raises(ValueError, match="prompt 3 holds samples .0. and must hold 0 to 1"):
            await client.put(group(3)[:1])
        with pytest.raises(TimeoutError, match="0 of the 2 trajectories it takes wait"):
            await client.get(0, timeout_s=0.05)

    with_trainer(use)


def test_a_get_whose_caller_is_gone_takes_no_batch():
    async def use(client, queue):
        asked = asyncio.ensure_future(client.get(0, timeout_s=10))
        await asyncio.sleep(0.2)
        asked.cancel()
        await asyncio.sleep(0.5)
        await client.put(group(0))
        await asyncio.sleep(0.1)
        assert queue.waiting == 2

    with_trainer(use)


def test_a_controller_waits_until_the_trainer_has_restored_its_queue_and_published():
    """All processes start at once: a controller that asked too early would begin again at uid 0, on old weights."""
    before = make_queue()
    before.put(group(0))
    before.get(0, timeout_s=1)

    async def use(client, queue):
        asked = [client.progress(), anext(client.announcements()), client.put(group(0)), client.discard(1, 2, "failed")]
        asked = [asyncio.ensure_future(call) for call in asked]
        done, _ = await asyncio.wait(asked, timeout=0.3)
        assert not done
        queue.restore(before.snapshot(version=1))
        assert not (await asyncio.wait(asked, timeout=0.3))[0]
        queue.announce(1)
        progress, announcement, accepted, _ = await asyncio.gather(*asked)
        assert progress.version == announcement.version == 1
        assert progress.low >= 1
        assert not accepted  # it was trained before the restart

    with_trainer(use, make_queue(opened=False))


def test_announcements_begin_with_the_current_one_and_end_with_finished():
    async def use(client, queue):
        queue.announce(4)
        seen = []
        async for announcement in client.announcements():
            seen.append(announcement)
            if len(seen) == 1:
                queue.announce(5)
            elif len(seen) == 2:
                queue.discard(0, 2, "failed")
            else:
                queue.announce(5, finished=True)
        return seen

    assert with_trainer(use) == [
        Announcement(version=4, lost=0, finished=False),
        Announcement(version=5, lost=0, finished=False),
        Announcement(version=5, lost=2, finished=False),
        Announcement(version=5, lost=2, finished=True),
    ]


def test_calls_and_announcements_outlive_a_restart_of_the_trainer():
    queue = make_queue()
    server = serve_trainer(queue, address="127.0.0.1:0")
    seen = []

    async def listen(client):
        async for announcement in client.announcements():
            seen.append(announcement.version)

    async def run():
        client = TrainerClient(server.address, patience_s=10)
        listening = asyncio.ensure_future(listen(client))
        while not seen:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.stop)
        putting = asyncio.ensure_future(client.put(group(0)))
        await asyncio.sleep(0.2)
        again = await asyncio.to_thread(lambda: serve_trainer(queue, address=server.address))
        assert await asyncio.wait_for(putting, 10)
        queue.announce(1, finished=True)
        await asyncio.wait_for(listening, 10)
        await client.close()
        await asyncio.to_thread(again.stop)

    asyncio.run(run())
    assert seen[0] == 0
    assert seen[-1] == 1


def test_a_trainer_that_stays_away_ends_in_an_error():
    server = serve_trainer(make_queue(), address="127.0.0.1:0")
    server.stop()

    async def run():
        client = TrainerClient(server.address, patience_s=0.3)
        with pytest.raises(ConnectionError, match=f"trainer {server.address}: UNAVAILABLE"):
            await client.put(group(0))
        with pytest.raises(ConnectionError, match="UNAVAILABLE"):
            await anext(client.announcements())
        await client.close()

    asyncio.run(asyncio.wait_for(run(), 10))


# Weights


def params(fill=1.0):
    return {name: np.full(shape, fill, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def two():
    """Two schedulers and the addresses of their servers."""
    schedulers = [FakeScheduler() for _ in range(2)]
    servers = [serve_fake(scheduler) for scheduler in schedulers]
    yield schedulers, [server.address for server in servers]
    for server in servers:
        server.stop()


def test_push_loads_every_server_and_returns_its_stall(two, tmp_path):
    schedulers, addresses = two
    assert push_weights(addresses, write_weights(params(2.0), 1, tmp_path), on_update="drain") == dict.fromkeys(
        addresses, 0.25
    )
    for scheduler in schedulers:
        assert scheduler.updates == [(1, "drain")]
        np.testing.assert_array_equal(scheduler.params["layer.bias"], np.full(3, 2.0, np.float32))


def test_a_refused_push_raises_the_servers_text_and_is_not_repeated(two, tmp_path):
    schedulers, addresses = two
    file = write_weights({"layer.kernel": np.zeros((9, 9), np.float32)}, 1, tmp_path)
    with pytest.raises(ValueError, match=f"version 1 was refused.*{addresses[1]}: weights of version 1 do not fit"):
        push_weights(addresses, file)
    assert [scheduler.version for scheduler in schedulers] == [0, 0]


def test_the_text_of_a_torn_update_reaches_the_trainer_and_the_next_version_recovers(two, tmp_path):
    schedulers, addresses = two

    def push(file):
        if file.version == 2:
            with open(file.path, "r+b") as opened:
                opened.write(b"torn")
        push_weights(addresses, file)

    announced = []
    publisher = Publisher(shared_memory_sender(tmp_path, push), announced.append)
    publisher.publish(lambda: params(1.0), 1)
    publisher.publish(lambda: params(2.0), 2)
    with pytest.raises(ValueError, match=r"version 2 was refused.*weights-2-.* are torn: checksum"):
        publisher.publish(lambda: params(3.0), 3)
    assert [scheduler.version for scheduler in schedulers] == [1, 1]
    publisher.publish(lambda: params(3.0), 3)
    publisher.close()
    assert [scheduler.version for scheduler in schedulers] == [3, 3]
    assert announced == [1, 3]


def test_a_dead_server_does_not_hold_up_the_live_one(tmp_path):
    live, dead = FakeScheduler(), FakeScheduler()
    servers = [serve_fake(live), serve_fake(dead)]
    servers[1].stop()
    began = time.monotonic()
    held = push_weights([server.address for server in servers], write_weights(params(), 1, tmp_path), timeout_s=20)
    assert held == {servers[0].address: 0.25}
    assert time.monotonic() - began < 5
    servers[0].stop()


def test_the_first_version_waits_for_every_server(tmp_path):
    early, late = serve_fake(FakeScheduler()), serve_fake(FakeScheduler())
    late.stop()
    started = []
    timer = threading.Timer(1.5, lambda: started.append(serve_fake(FakeScheduler(), address=late.address)))
    timer.start()
    held = push_weights([early.address, late.address], write_weights(params(), 1, tmp_path), timeout_s=20, least="all")
    assert held.keys() == {early.address, late.address}
    with pytest.raises(ConnectionError, match=f"version 2 is not held by generation server {late.address}"):
        started[0].stop()
        push_weights([early.address, late.address], write_weights(params(), 2, tmp_path), timeout_s=1.0, least="all")
    early.stop()


def test_tokens_of_a_server_without_published_weights_count_for_nothing():
    restarted = FakeScheduler(version=UNPUBLISHED)
    server = serve_fake(restarted)
    timer = threading.Timer(1.0, lambda: setattr(restarted, "version", 3))
    timer.start()
    (completions,) = generate([server.address], request())
    for sample, completion in enumerate(completions):
        assert_complete(completion, 7, sample)
        assert (completion.versions == 3).all()
    server.stop()


def test_when_no_server_can_be_reached_the_push_fails_within_its_timeout(tmp_path):
    server = serve_fake(FakeScheduler())
    server.stop()
    began = time.monotonic()
    with pytest.raises(
        ConnectionError, match=rf"version 1 is not held by generation server {server.address}.*timeout_s"
    ):
        push_weights([server.address], write_weights(params(), 1, tmp_path), timeout_s=1.0)
    assert 0.9 < time.monotonic() - began < 5


def test_a_server_that_hangs_fails_the_push_within_its_timeout(tmp_path):
    swap = Future()  # never done

    class Hanging(FakeScheduler):
        def update_weights(self, params, version, on_update=None, confirm=None):
            return swap

    server = serve_fake(Hanging())
    with pytest.raises(TimeoutError, match=r"version 1 is not held by generation server"):
        push_weights([server.address], write_weights(params(), 1, tmp_path), timeout_s=0.5)
    server.stop()
    assert swap.set_running_or_notify_cancel()  # the engine may still fulfil it: nobody cancelled it


def test_a_server_that_dies_and_is_restarted_within_the_timeout_gets_the_version(tmp_path):
    first = serve_fake(FakeScheduler())
    first.stop()
    again = FakeScheduler()
    restarted = []
    timer = threading.Timer(0.7, lambda: restarted.append(serve_fake(again, address=first.address)))
    timer.start()
    assert push_weights([first.address], write_weights(params(), 1, tmp_path), timeout_s=20) == {first.address: 0.25}
    assert again.version == 1
    restarted[0].stop()


def test_an_update_whose_reply_was_lost_is_no_failure(tmp_path):
    """The server loads the version and the connection breaks before it says so."""

    class Dying(FakeScheduler):
        def update_weights(self, params, version, on_update=None, confirm=lambda: None):
            super().update_weights(params, version, on_update, confirm)
            # Once the call waits for the swap: one that grpc.aio cancels while it is being set up gets no status.
            threading.Timer(0.3, server.stop).start()
            return Future()

    scheduler = Dying()
    server = serve_fake(scheduler)
    restarted = []
    timer = threading.Timer(1.5, lambda: restarted.append(serve_fake(scheduler, address=server.address)))
    timer.start()
    assert push_weights([server.address], write_weights(params(), 1, tmp_path), timeout_s=20) == {server.address: 0.0}
    assert scheduler.updates == [(1, None)]
    restarted[0].stop()


@pytest.fixture
def weights_server(tmp_path):
    server = serve_trainer(make_queue(), address="127.0.0.1:0", weights_directory=str(tmp_path))
    yield server
    server.stop()


def test_weights_are_fetched_in_pieces_and_are_the_files_own(tmp_path, weights_server, monkeypatch):
    monkeypatch.setattr("areal_jax.transport.trainer_service.PIECE_BYTES", 64)  # many pieces
    for version in (1, 2):
        file = write_weights(params(float(version)), version, tmp_path)
    version, fetched = fetch_weights(weights_server.address, version=2, checksum=file.checksum)
    assert version == 2
    np.testing.assert_array_equal(fetched["layer.kernel"], params(2.0)["layer.kernel"], strict=True)
    assert fetch_weights(weights_server.address)[0] == 2  # the newest, for a server that comes late
    assert fetch_weights(weights_server.address, version=1)[0] == 1
    with pytest.raises(ConnectionError, match="NOT_FOUND: the trainer holds no weights of version 7"):
        fetch_weights(weights_server.address, version=7)


def test_a_version_that_is_being_fetched_is_not_overwritten(tmp_path):
    files = []
    send = shared_memory_sender(tmp_path, files.append)
    send(params(1.0), 1)
    data = np.fromfile(files[0].path, np.uint8).tobytes()
    pieces = TrainerServicer(make_queue(), str(tmp_path)).FetchWeights(pb.FetchWeightsRequest(version=1), context=None)
    next(pieces)
    for version in range(2, 2 * weights.KEPT):
        send(params(float(version)), version)
    assert b"".join(piece.data for piece in pieces) == data


def test_servers_fetch_a_pushed_version_and_refuse_it_when_torn(two, tmp_path, weights_server):
    schedulers, addresses = two
    file = write_weights(params(2.0), 1, tmp_path)
    moved = weights.WeightFile("/nowhere", file.version, file.checksum, file.size)  # as on another host
    push_weights(addresses, moved, source=weights_server.address)
    assert [scheduler.version for scheduler in schedulers] == [1, 1]
    np.testing.assert_array_equal(schedulers[1].params["layer.bias"], np.full(3, 2.0, np.float32))

    file = write_weights(params(3.0), 2, tmp_path)
    with open(file.path, "r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\xff")
    with pytest.raises(ValueError, match=f"the weights from the trainer at {weights_server.address} are torn"):
        push_weights(addresses, file, source=weights_server.address)
    assert [scheduler.version for scheduler in schedulers] == [1, 1]


def test_a_version_the_trainer_does_not_hold_is_refused_with_that_text(two, tmp_path, weights_server):
    file = weights.WeightFile("/nowhere", 9, 1, 1)
    with pytest.raises(ValueError, match="version 9 was refused.*the trainer holds no weights of version 9"):
        push_weights(two[1], file, source=weights_server.address)
