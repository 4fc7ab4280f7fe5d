import asyncio
import dataclasses
import socket
import subprocess
import sys

import grpc
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.transport import areal_pb2 as pb
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport import codec
from areal_jax.transport.generation_service import completions
from areal_jax.transport.jetstream_decode import TextStream
from areal_jax.transport.servers import serve_generation, serve_trainer
from areal_jax.types import Completion, GenerateRequest, Sampling
from areal_jax.weights import write_weights
from tests.transport.fakes import SHAPES, FakeScheduler, FakeTokenizer, serve_fake, token_at


@pytest.fixture
def scheduler():
    return FakeScheduler(step=2)


@pytest.fixture
def channel(scheduler):
    server = serve_fake(scheduler, max_new_tokens=6, temperature=0.5, seed=3)
    with grpc.insecure_channel(server.address) as channel:
        yield channel
    server.stop()


@pytest.fixture
def stub(channel):
    return pb_grpc.GenerationStub(channel)


def make_queue():
    return TrajectoryQueue(batch_size=2, group_size=2, max_staleness=1, overdue="mask")


def request(uid=7, samples=(0, 1), prompt=(1, 2), **sampling):
    return GenerateRequest(
        uid=uid,
        prompt_tokens=np.array(prompt, np.int32),
        samples=samples,
        sampling=Sampling(**{"max_new_tokens": 5, **sampling}),
    )


def until(condition):
    async def poll():
        while not condition():
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(poll(), 5))


def params(fill=1.0):
    return {name: np.full(shape, fill, np.float32) for name, shape in SHAPES.items()}


def code_and_text(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


# Generate


def test_tokens_stream_as_they_are_made_one_message_per_boundary(scheduler, stub):
    scheduler.hold.set()
    stream = stub.Generate(codec.encode_request(request()))
    until(lambda: scheduler.requests)
    scheduler.hold.clear()
    messages = [codec.decode_samples(message) for message in stream]
    # A message that is sent late holds all that has come meanwhile.
    assert [chunk.sample for chunk in messages[0][:2]] == [0, 1]  # both samples in one message
    tokens = {s: [int(t) for m in messages for c in m if c.sample == s for t in c.tokens] for s in (0, 1)}
    assert tokens == {s: [token_at(7, s, position) for position in range(5)] for s in (0, 1)}
    ends = messages[-1][-2:]
    assert [c.finish_reason for c in ends] == ["length", "length"]


def test_first_tokens_arrive_before_the_last_are_made():
    scheduler = FakeScheduler(step=1, pause_s=0.05)
    server = serve_fake(scheduler)
    with grpc.insecure_channel(server.address) as channel:
        stream = pb_grpc.GenerationStub(channel).Generate(codec.encode_request(request(max_new_tokens=200)))
        next(stream)
        assert scheduler.status()["active"] == 1
        stream.cancel()
        until(lambda: scheduler.cancelled == [0])  # a client that goes away frees its slots
    server.stop()


def test_what_the_scheduler_raises_becomes_a_status_code_with_its_text(scheduler, stub):
    long = codec.encode_request(request(prompt=range(9)))
    assert code_and_text(lambda: list(stub.Generate(long))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt 7 has 9 tokens; this server holds 8",
    )
    scheduler.max_waiting = 0
    code, text = code_and_text(lambda: list(stub.Generate(codec.encode_request(request()))))
    assert (code, text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "0 requests run and 0 may")


def test_an_engine_that_fails_ends_its_streams_with_its_text(scheduler, stub):
    scheduler.hold.set()
    stream = stub.Generate(codec.encode_request(request()))
    until(lambda: scheduler.requests)
    scheduler.fail(MemoryError("out of cache"))
    code, text = code_and_text(lambda: list(stream))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "out of cache" in text


def test_a_request_past_its_time_ends_with_its_text_and_the_server_goes_on(scheduler, stub):
    scheduler.hold.set()
    stream = stub.Generate(codec.encode_request(dataclasses.replace(request(), timeout_s=0.5)))
    until(lambda: scheduler.requests)
    assert scheduler.requests[0].timeout_s == 0.5
    _, _, on_error = scheduler._running.pop(0)
    on_error(TimeoutError("prompt 7 was not finished within timeout_s=0.5"))
    code, text = code_and_text(lambda: list(stream))
    assert (code, text) == (grpc.StatusCode.DEADLINE_EXCEEDED, "prompt 7 was not finished within timeout_s=0.5")
    scheduler.hold.clear()
    assert list(stub.Generate(codec.encode_request(request())))


def test_status_is_the_schedulers(scheduler, stub):
    assert dict(stub.Status(pb.StatusRequest()).values) == {"version": 0, "active": 0}


def test_completions_without_a_network_are_the_same_tokens(scheduler):
    held = Completion(np.array([7, 8], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "")
    asked = dataclasses.replace(request(samples=(1, 0)), partial={0: held})
    first, second = asyncio.run(completions(scheduler, asked))
    assert first.tokens.tolist() == [17, 18, 19, 20, 21]
    assert second.tokens.tolist() == [7, 8, 9, 10, 11]
    assert second.finish_reason == "length"
    with pytest.raises(ValueError, match="this server holds 8"):
        asyncio.run(completions(scheduler, request(prompt=range(9))))


# UpdateWeights


def update(stub, file, **fields):
    values = {"version": file.version, "checksum": file.checksum, "path": file.path, **fields}
    return stub.UpdateWeights(pb.UpdateWeightsRequest(**values))


def test_update_reports_the_stall_and_the_tensors_have_changed(scheduler, stub, tmp_path):
    reply = update(stub, write_weights(params(3.0), 4, tmp_path), on_update=pb.OnUpdate.KEEP)
    assert (reply.stall_s, reply.error) == (0.25, "")
    assert scheduler.updates == [(4, "keep")]
    np.testing.assert_array_equal(scheduler.params["layer.kernel"], np.full((2, 3), 3.0, np.float32))
    update(stub, write_weights(params(), 5, tmp_path))
    assert scheduler.updates[-1] == (5, None)  # the server's own policy


@pytest.mark.parametrize("case", ["torn", "missing", "wrong tree", "not newer", "another version", "unknown policy"])
def test_a_bad_update_is_refused_with_its_reason_and_the_old_version_stays(scheduler, stub, tmp_path, case):
    update(stub, write_weights(params(1.0), 2, tmp_path))
    file = write_weights({"layer.kernel": np.zeros((9, 9))} if case == "wrong tree" else params(2.0), 3, tmp_path)
    fields, says = {
        "torn": ({"checksum": file.checksum ^ 1}, "torn"),
        "missing": ({"path": file.path + ".gone"}, "No such file"),
        "wrong tree": ({}, "do not fit this model"),
        "not newer": ({"path": (old := write_weights(params(9.0), 2, tmp_path)).path, "checksum": old.checksum}, ""),
        "another version": ({"version": 4}, "version 4 was announced, but these are the weights of version 3"),
        "unknown policy": ({"on_update": 17}, "17"),
    }[case]
    if case == "not newer":
        fields["version"], says = 2, "version 2 is not newer than version 2"
    assert says in update(stub, file, **fields).error
    assert scheduler.version == 2
    np.testing.assert_array_equal(scheduler.params["layer.bias"], np.full(3, 1.0, np.float32))
    assert stub.Status(pb.StatusRequest()).values["version"] == 2  # and it goes on serving
    assert update(stub, write_weights(params(2.0), 3, tmp_path)).error == ""


def test_weights_that_do_not_fit_into_memory_are_refused_and_a_dead_engine_is_away(scheduler, stub, tmp_path):
    """What `push_weights` makes of it: a refusal ends the run, a server that is away is left out."""
    update(stub, write_weights(params(1.0), 2, tmp_path))
    file = write_weights(params(2.0), 3, tmp_path)

    def out_of_memory(*arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    scheduler.update_weights = out_of_memory
    assert update(stub, file).error == "RESOURCE_EXHAUSTED: out of memory"
    scheduler.failure = FloatingPointError("device lost")
    code, details = code_and_text(lambda: update(stub, file))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "RESOURCE_EXHAUSTED: out of memory")


# JetStream's own service


def decode(channel, **fields):
    stream = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(jetstream_pb2.DecodeRequest(**fields))
    return [answer.stream_content.samples for answer in stream]


def text(value):
    return jetstream_pb2.DecodeRequest.TextContent(text=value)


def test_text_comes_in_whole_characters_that_join_to_the_whole_text():
    whole = "né 3 € 😀!"
    stream, tokens = TextStream(FakeTokenizer()), list(whole.encode())
    pieces = [stream.add([token], ended=token == tokens[-1]) for token in tokens]
    assert "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:3] == ["n", "", "é"]
    cut = TextStream(FakeTokenizer())
    assert cut.add(list("€".encode()[:2]), ended=True) == "\ufffd"  # cut by the length limit: shown as it is


def test_a_jetstream_limit_leaves_room_for_the_prompt(scheduler):
    server = serve_fake(scheduler, max_new_tokens=6, max_length=8)
    with grpc.insecure_channel(server.address) as channel:
        for prompt, asked, most in (("abc", 0, 5), ("a", 0, 6), ("abc", 9, 5), ("abc", 2, 2)):
            decode(channel, text_content=text(prompt), max_tokens=asked)
            assert scheduler.requests[-1].sampling.max_new_tokens == most
    server.stop()


@pytest.mark.parametrize("fields", [{}, {"text_content": text("")}, {"text_content": text("a"), "max_tokens": -1}])
def test_jetstream_request_that_asks_nothing_is_refused(channel, fields):
    code, words = code_and_text(lambda: decode(channel, **fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "the request has no prompt" in words or "max_tokens=-1" in words


def test_jetstream_health_is_the_engines(scheduler, channel):
    health = jetstream_pb2_grpc.OrchestratorStub(channel).HealthCheck
    assert health(jetstream_pb2.HealthCheckRequest()).is_live
    scheduler.fail(RuntimeError("gone"))
    assert not health(jetstream_pb2.HealthCheckRequest()).is_live


def test_the_trainer_knows_when_its_end_was_heard():
    queue = make_queue()
    server = serve_trainer(queue, address="127.0.0.1:0")
    with grpc.insecure_channel(server.address) as channel:
        announced = pb_grpc.TrainerStub(channel).Announcements(pb.AnnouncementsRequest())
        queue.announce(0)
        assert not next(announced).finished
        assert not server.heard.is_set()
        queue.announce(1, finished=True)
        assert [each.finished for each in announced] == [True]
        assert server.heard.wait(10)
    server.stop()


# Addresses and tokens


def serve_queue(address, **options):
    return serve_trainer(make_queue(), address=address, **options)


def serve_nothing(address, **options):
    return serve_generation(FakeScheduler(), address=address, tokenizer=FakeTokenizer(), **options)


SERVE = pytest.mark.parametrize("serve", [serve_queue, serve_nothing])


@SERVE
def test_port_0_becomes_a_real_port_that_is_free_again_after_stop(serve):
    server = serve("127.0.0.1:0")
    assert not server.address.endswith(":0")
    server.stop()
    server.stop()  # twice is once
    serve(server.address).stop()


@SERVE
def test_a_port_in_use_is_an_error_at_once_also_when_a_server_of_ours_has_it(serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}: another process has this port"):
            serve(address)
    server = serve("127.0.0.1:0")
    with pytest.raises(OSError, match=f"cannot listen on {server.address}"):
        serve(server.address)
    server.stop()


@SERVE
@pytest.mark.parametrize("address", ["localhost", ":5000", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_a_broken_address_is_named(serve, address):
    with pytest.raises(ValueError, match=f"address='{address}' must be .host:port."):
        serve(address)


@SERVE
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "gpu-7.cluster"])
def test_beyond_loopback_a_token_is_needed(serve, host):
    with pytest.raises(ValueError, match="AREAL_JAX_TOKEN"):
        serve(f"{host}:0")


@SERVE
@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_loopback_needs_no_token(serve, host):
    server = serve(f"{host}:0")
    assert server.address.startswith(f"{host}:")
    server.stop()


@SERVE
def test_a_token_opens_every_address_and_is_asked_of_every_call(serve):
    server = serve("0.0.0.0:0", token="secret")
    with grpc.insecure_channel(server.address.replace("0.0.0.0", "127.0.0.1")) as channel:
        stub = (pb_grpc.TrainerStub if serve is serve_queue else pb_grpc.GenerationStub)(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            code, words = code_and_text(lambda shown=metadata: stub.Status(pb.StatusRequest(), metadata=shown))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "AREAL_JAX_TOKEN" in words
        stub.Status(pb.StatusRequest(), metadata=(("authorization", "Bearer secret"),))
        stream = stub.FetchWeights if serve is serve_queue else stub.Generate
        message = pb.FetchWeightsRequest() if serve is serve_queue else codec.encode_request(request())
        assert code_and_text(lambda: list(stream(message)))[0] is grpc.StatusCode.UNAUTHENTICATED
    server.stop()


def test_transport_takes_no_accelerator():
    program = (
        "import sys; from areal_jax.transport import servers, clients;"
        "print([m for m in ('jax', 'flax', 'seqio', 'tensorflow') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
