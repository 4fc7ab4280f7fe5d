"""gRPC, JetStream's stock stub, HTTP and /metrics before one real scheduler: engine, tokenizer and sockets are real."""

import asyncio
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from areal_jax.generation.scheduler import Scheduler
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport import codec
from areal_jax.transport.clients import GenerationPool
from areal_jax.transport.generation_service import completions
from areal_jax.transport.http_server import HttpServer, Model
from areal_jax.transport.servers import serve_generation
from areal_jax.types import Completion, GenerateRequest, Sampling
from tests.transport import tiny
from tests.transport.tiny import EOS, NAME, SLOTS, scrape

TEMPERATURE, SEED, LONGEST = 0.9, 3, 40  # what the server gives to JetStream's clients


@pytest.fixture
def scheduler():
    made = Scheduler(tiny.engine(), tiny.engine().load(tiny.params_of(0), 0), max_waiting=16)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def address(scheduler):
    options = {"max_new_tokens": LONGEST, "temperature": TEMPERATURE, "seed": SEED}
    server = serve_generation(scheduler, address="127.0.0.1:0", tokenizer=tiny.tokenizer(), **options)
    yield server.address
    server.stop()


@pytest.fixture
def channel(address):
    with grpc.insecure_channel(address) as made:
        yield made


@pytest.fixture
def server(scheduler):
    made = HttpServer(Model(NAME, tiny.tokenizer(), tiny.LENGTH, tiny.TOP_LOGPROBS), address="127.0.0.1:0")
    made.serve(scheduler)
    yield made
    made.stop()


def request(uid, prompt, *, samples=1, **sampling) -> GenerateRequest:
    asked = Sampling(**{"max_new_tokens": 6, "seed": SEED, "stop_tokens": (EOS,), **sampling})
    return GenerateRequest(uid, np.array(prompt, np.int32), tuple(range(samples)), asked)


# JetStream's own service


def schedulers_own(scheduler, uid, prompt, max_new_tokens) -> Completion:
    asked = request(uid, prompt, max_new_tokens=max_new_tokens, temperature=TEMPERATURE)
    return asyncio.run(completions(scheduler, asked))[0]


def decode(channel, prompt, max_tokens, first=lambda: None) -> tuple[str, list[int]]:
    """Text and token ids of an answer to text or token ids; `first` is called when its first tokens are here."""
    if isinstance(prompt, str):
        content = {"text_content": jetstream_pb2.DecodeRequest.TextContent(text=prompt)}
    else:
        content = {"token_content": jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt)}
    stub = jetstream_pb2_grpc.OrchestratorStub(channel)
    stream = stub.Decode(jetstream_pb2.DecodeRequest(**content, max_tokens=max_tokens), timeout=60)
    parts = [*next(stream).stream_content.samples]
    first()
    parts += [part for answer in stream for part in answer.stream_content.samples]
    return "".join(part.text for part in parts), [i for part in parts for i in part.token_ids]


def test_jetstreams_stub_gets_the_schedulers_own_tokens_and_their_text(scheduler, channel):
    tokenizer = tiny.tokenizer()
    asked = [("Hé", 5, 5), ([7, 200, 9], 12, 12), ("a", 0, LONGEST), ([7], 2000, LONGEST)]  # the server's own limit
    for uid, (prompt, max_tokens, most) in enumerate(asked):  # the server counts its requests: their uids
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt  # no BOS before it
        own = schedulers_own(scheduler, uid, ids, most)
        expected = own.tokens.tolist()[: len(own.tokens) - (own.finish_reason == "stop")]
        text, tokens = decode(channel, prompt, max_tokens)
        assert tokens == expected and text == (tokenizer.decode(expected) if isinstance(prompt, str) else "")
        assert len(own.tokens) == most or own.finish_reason == "stop"


def test_jetstreams_stub_has_the_first_tokens_before_the_last_are_made(scheduler, channel, monkeypatch):
    go_on = tiny.held_after_first(scheduler, monkeypatch)
    assert len(decode(channel, [7, 8], 3, first=go_on.set)[1]) == 3


def test_jetstreams_stub_gets_no_stop_token(scheduler, channel):
    for uid, prompt_of in enumerate((lambda token: [token], lambda token: tiny.tokenizer().decode([token]))):
        answers = ((token, schedulers_own(scheduler, uid, [token], LONGEST)) for token in range(94))  # printable ones
        token, own = next((token, own) for token, own in answers if own.finish_reason == "stop")
        text, tokens = decode(channel, prompt_of(token), LONGEST)
        assert [*tokens, EOS] == own.tokens.tolist()
        assert text == (tiny.tokenizer().decode(tokens) if uid else "")


# A full house


def complete(server: HttpServer, **fields):
    """Status, object and headers of an answer to a completion."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = {"model": NAME, "prompt": "ab", "max_tokens": 6, "seed": 1, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()), answer.headers
    connection.close()
    return found


def ask_pool(address: str, asked: GenerateRequest) -> Completion:
    async def ask() -> Completion:
        pool = GenerationPool([address], patience_s=30)
        try:
            return (await pool(asked))[0]
        finally:
            await pool.close()

    return asyncio.run(ask())


def test_small_requests_that_add_up_are_told_to_come_again_and_then_are_taken(scheduler, address, channel, server):
    generate = pb_grpc.GenerationStub(channel).Generate
    with ThreadPoolExecutor(4) as beside, tiny.Held(scheduler, prompt=[1], samples=SLOTS, new=4) as held:
        streams = [generate(codec.encode_request(request(uid, [2, 3], samples=5))) for uid in (1, 2)]
        answers = [beside.submit(complete, server, n=3, seed=seed) for seed in (1, 2)]
        tiny.until(lambda: scheduler.status()["waiting"] == 5 + 5 + 3 + 3)
        full = "16 samples wait for a slot and generation.max_waiting=16; ask again later"
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(codec.encode_request(request(3, [2, 3]))))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, full)
        status, answer, headers = complete(server)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "busy", "1")
        assert answer["error"]["message"] == full
        refused = scheduler.telemetry.refused["busy"]
        patient = beside.submit(ask_pool, address, request(4, [2, 3]))  # asks again until there is room
        tiny.until(lambda: scheduler.telemetry.refused["busy"] > refused)
        found = scrape(server)
        assert (found["slots_in_use"], found["queue_samples"], found["requests_total"]) == (SLOTS, 16, 5)
        held.go_on.set()
        ends = [c.finish_reason for stream in streams for m in stream for c in codec.decode_samples(m)]
        assert sum(map(bool, ends)) == 10
        assert [len(answer.result()[1]["choices"]) for answer in answers] == [3, 3]
        assert patient.result().finish_reason
    assert complete(server)[0] == 200
    assert list(generate(codec.encode_request(request(5, [2, 3]))))
    tiny.until(lambda: scheduler.status()["active"] == 0)
    assert scheduler.status()["waiting"] == 0 and scheduler.status()["requests"] == SLOTS + 16 + 3


# Metrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_metrics_are_those_of_a_schedule_worked_out_by_hand():
    """One long sample (8 tokens) and a group of five short ones (2 tokens) on four slots, two tokens per dispatch.

    All are asked for at 100 s and the engine starts at 103 s. With each of its chunks the long one moves the clock on
    by a second, and with the third brings new weights.

        dispatch   read at   samples                          tokens   first tokens after
        1          103 s     the long one and three short     8        3 s, four times
        2          104 s     the long one and two short       6        4 s, twice
        3          105 s     the long one                     2
        4          106 s     the long one, under version 1    2
    """
    clock, scrapes = Clock(), []
    scheduler = Scheduler(tiny.engine(), tiny.engine().load(tiny.params_of(0), 0), clock=clock)
    server = HttpServer(Model(NAME, tiny.tokenizer(), tiny.LENGTH, tiny.TOP_LOGPROBS), address="127.0.0.1:0")
    server.serve(scheduler)
    new = tiny.params_of(1)

    def tick(chunks) -> None:
        scrapes.append(scrape(server))
        clock.now += 1.0
        if len(scrapes) == 2:
            scheduler.update_weights(new, 1)

    scheduler.submit(request(0, [1, 2, 3], max_new_tokens=8, min_new_tokens=8), tick, print)
    scheduler.submit(request(1, [4, 5], samples=5, max_new_tokens=2, min_new_tokens=2), lambda chunks: None, print)
    waiting = scrape(server)
    assert (waiting["slots_in_use"], waiting["queue_samples"], waiting["tokens_total"]) == (0, 6, 0)
    assert (waiting["requests_total"], waiting["prompt_tokens_total"]) == (2, 3 + 2)
    clock.now = 103.0
    scheduler.start()
    tiny.until(lambda: len(scrapes) == 4)
    scheduler.stop()
    end = scrape(server)
    assert [found["slots_in_use"] for found in scrapes] == [3, 1, 1, 0]
    assert [found["queue_samples"] for found in scrapes] == [0, 0, 0, 0]
    assert [found["tokens_total"] for found in scrapes] == [8, 14, 16, 18]
    assert [found["weights_version"] for found in scrapes] == [0, 0, 0, 1]
    assert [found["samples_total"] for found in scrapes] == [6] * 4
    # the prompt of 3 tokens and the 6 of three dispatches
    assert [found["recomputed_tokens_total"] for found in scrapes] == [0, 0, 0, 9]
    assert end["time_to_first_token_seconds_count"] == 6
    assert end["time_to_first_token_seconds_sum"] == 4 * 3 + 2 * 4
    within = [end[f"time_to_first_token_seconds_bucket{bound}"] for bound in ("2.5", "5.0", "+Inf")]
    assert within == [0, 6, 6]
    # the long one alone has tokens after its first dispatch: 6 from 103 to 106 s
    assert (end["time_per_output_token_seconds_count"], end["time_per_output_token_seconds_sum"]) == (1, 3 / 6)
    assert (end["swaps_total"], end["swap_stall_seconds_count"], end["swap_stall_seconds_sum"]) == (1, 1, 0)
    assert end["ended_samples_totallength"] == 6
    assert end["tokens_per_second"] == 18 / 10  # at 107 s all of them are within ten seconds
    clock.now = 114.0
    assert scrape(server)["tokens_per_second"] == (6 + 2 + 2) / 10  # from 104 s on
    server.stop()
