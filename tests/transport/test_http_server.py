"""The HTTP server over a scheduler without a model: what is refused and how, who may ask and watch, who goes away."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from areal_jax.transport import http_server
from areal_jax.transport.http_server import HttpServer, Model
from areal_jax.transport.openai_answer import Choice, ShownText
from areal_jax.transport.openai_request import FIRST_UID, read_completion, sampling_identity
from areal_jax.types import Alternatives, Chunk, GenerateRequest, Sampling
from tests.transport.fakes import FakeScheduler, FakeTokenizer

NAME = "tiny/model"


class ByteTokenizer(FakeTokenizer):
    vocab_size = 256
    chat_variables = frozenset({"enable_thinking"})

    def encode_chat(self, messages, **variables):
        if messages[-1]["role"] != "user":
            raise ValueError("the chat template does not render this")
        return list("".join(message["content"] for message in messages).encode())[:8] or [0]


def make_server(scheduler, **options):
    server = HttpServer(Model(NAME, ByteTokenizer(), 64, 20), **{"address": "127.0.0.1:0", **options})
    if scheduler is not None:
        server.serve(scheduler)
    return server


@pytest.fixture
def scheduler():
    return FakeScheduler(step=2)


@pytest.fixture
def server(scheduler):
    made = make_server(scheduler)
    yield made
    made.stop()


def connect(server):
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)


def call(server, path, body=None, *, method=None, headers=None):
    """(status, the object or text of the answer, its headers)."""
    connection = connect(server)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, raw, headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    is_json = answer.headers["Content-Type"].startswith("application/json")
    return answer.status, json.loads(text) if is_json else text, answer.headers


def complete(server, **fields):
    return call(server, "/v1/completions", {"model": NAME, "prompt": "ab", "max_tokens": 5, "seed": 1, **fields})


def chat(server, **fields):
    messages = [{"role": "user", "content": "ab"}]
    return call(server, "/v1/chat/completions", {"model": NAME, "messages": messages, "max_tokens": 5, **fields})


def until(condition):
    async def poll():
        while not condition():
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(poll(), 10))


# What is refused.


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"prompt": None}, "prompt is missing", "prompt"),
        ({"prompt": ""}, "prompt is empty", "prompt"),
        ({"prompt": []}, "prompt is empty", "prompt"),
        ({"prompt": "\ud800"}, "surrogates not allowed", "prompt"),
        ({"prompt": ["a", [1]]}, "must be only texts, or only lists of token ids", "prompt"),
        ({"prompt": "a" * 513}, "the prompt has 513 characters, too many for the 64 tokens", "prompt"),
        ({"prompt": [1, "a"]}, "must be text or token ids", "prompt"),
        ({"prompt": [[1], 2]}, "must be text or token ids", "prompt"),
        ({"prompt": [True]}, "must be text or token ids", "prompt"),
        ({"prompt": [[1], [256]]}, "no token has id 256; the ids end at 255", "prompt"),
        ({"prompt": ["a"] * 129}, "129 prompts", "prompt"),
        ({"model": None}, "model is missing", "model"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1", "max_tokens"),
        ({"max_tokens": 63}, "the prompt has 2 tokens and 63 may follow, together 65; this server holds 64", "prompt"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be an integer", "max_tokens"),
        ({"n": True}, "n=True must be an integer", "n"),
        ({"n": 0}, "n=0 must be between 1 and 128", "n"),
        ({"temperature": -1}, "temperature=-1 must be between 0 and 1e+06", "temperature"),
        ({"temperature": float("nan")}, "temperature=nan must be between 0 and 1e+06", "temperature"),
        ({"temperature": 10**400}, "00... must be between 0 and 1e+06", "temperature"),
        ({"temperature": "1"}, "temperature='1' must be a number", "temperature"),
        ({"top_p": 0}, "top_p=0 keeps no token", "top_p"),
        ({"top_p": 1.1}, "top_p=1.1 must be between 0 and 1", "top_p"),
        ({"min_tokens": 6}, "min_tokens=6 exceeds the most tokens, 5", "min_tokens"),
        ({"stop": [""]}, "stop=[''] must be", "stop"),
        ({"stop_token_ids": [300]}, "no token has id 300", "stop_token_ids"),
        ({"logprobs": 21}, "logprobs=21 must be between 0 and 20", "logprobs"),
        ({"echo": True}, "echo=True is not supported", "echo"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported by this server; leave it out (or", None),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not supported", "logit_bias"),
        ({"best_of": 2}, "best_of=2 is not supported", "best_of"),
        ({"temprature": 1}, "unknown parameter temprature", "temprature"),
        ({"stream_options": {"usage": True}}, "unknown parameter stream_options.usage", None),
        ({"stream_options": []}, "stream_options=[] must be an object", "stream_options"),
        ({"timeout_s": -1}, "timeout_s=-1 must be between 0 and 1e+09", "timeout_s"),
        ({"timeout_s": 10**400}, "00... must be between 0 and 1e+09", "timeout_s"),
    ],
)  # fmt: skip
def test_a_request_that_is_wrong_is_refused_by_name_in_openais_form(server, scheduler, fields, says, param):
    status, answer, _ = complete(server, **fields)
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert says in error["message"]
    assert param is None or error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert not scheduler.requests


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is missing"),
        ({"messages": ["hello"]}, "messages[0] must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "this model reads text only"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the chat template does not render this"),
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs=21 must be between 0 and 20"),
        ({"logprobs": 1}, "logprobs=1 must be true or false"),
        ({"max_completion_tokens": 6}, "max_tokens=5 and max_completion_tokens=6 are one thing"),
        ({"tools": [{"type": "function"}]}, "tools=[{'type': 'function'}] is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"chat_template_kwargs": {"thinking": 1}}, "the model's template reads enable_thinking, and not thinking"),
        ({"prompt": "a"}, "unknown parameter prompt"),
    ],
)
def test_a_chat_that_is_wrong_is_refused(server, fields, says):
    status, answer, _ = chat(server, **fields)
    assert status == 400
    assert says in answer["error"]["message"]


def test_what_changes_nothing_is_taken(server):
    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "echo": False, "suffix": None,
        "best_of": 1, "user": "me", "stop": None, "logprobs": None, "top_k": -1,
    }  # fmt: skip
    assert complete(server, **neutral)[0] == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert chat(server, messages=parts, tools=[], response_format={"type": "text"}, top_logprobs=0)[0] == 200
    assert chat(server, chat_template_kwargs={"enable_thinking": False}, max_completion_tokens=5)[0] == 200


def test_bodies_paths_and_methods_that_are_wrong_are_told_in_openais_form(server):
    for body in (b"{", b"[" * 100_000, b"\xff"):
        assert call(server, "/v1/completions", body)[1]["error"]["message"].startswith("the body is not JSON")
    assert call(server, "/v1/completions", b"[]")[1]["error"]["message"] == "the body must be a JSON object, not []"
    assert call(server, "/v1/completions", b"\xff")[0] == 400
    status, answer, _ = call(server, "/v1/embeddings", {})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer, headers = call(server, "/v1/completions", method="GET")
    assert (status, headers["Allow"]) == (405, "POST")
    status, answer, _ = complete(server, model="other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert NAME in answer["error"]["message"]


# What the scheduler says.


def test_a_busy_server_answers_429_and_says_when_to_come_again(server, scheduler):
    scheduler.max_waiting = 0
    status, answer, headers = complete(server)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "busy", "1")
    assert answer["error"]["message"] == "0 requests run and 0 may"


def test_one_prompt_too_many_takes_the_others_with_it(server, scheduler):
    scheduler.hold.set()
    scheduler.max_waiting = 2
    status, _, _ = complete(server, prompt=["a", "b", "c"], stream=True)
    assert status == 429
    until(lambda: sorted(scheduler.cancelled) == [0, 1])


def test_a_deadline_is_408_and_an_engine_that_fails_503(server, scheduler):
    for error, expected in ((TimeoutError("too late"), 408), (MemoryError("out of cache"), 503)):
        scheduler.hold.set()
        answers = []
        thread = threading.Thread(target=lambda into=answers: into.append(complete(server)))
        before = len(scheduler.requests)
        thread.start()
        until(lambda seen=before: len(scheduler.requests) > seen)
        scheduler.fail(error)
        thread.join()
        assert answers[0][0] == expected
        assert str(error) in answers[0][1]["error"]["message"]
        scheduler.failure = None


def test_an_error_in_mid_stream_is_an_event_and_no_done_follows(scheduler):
    scheduler.pause_s, scheduler.step = 0.02, 1
    server = make_server(scheduler)
    connection = connect(server)
    body = {"model": NAME, "prompt": "a", "max_tokens": 50, "seed": 1, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.status == 200
    answer.readline()
    scheduler.fail(MemoryError("out of cache"))
    events = [line for line in answer.read().decode().split("\n\n") if line]
    assert "out of cache" in json.loads(events[-1].strip().removeprefix("data: "))["error"]["message"]
    server.stop()


# Who goes away.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(scheduler, stream):
    scheduler.pause_s, scheduler.step = 0.02, 1
    server = make_server(scheduler)
    connection = connect(server)
    body = {"model": NAME, "prompt": ["a", "b"], "max_tokens": 60, "n": 2, "stream": stream, "seed": 2}
    connection.request("POST", "/v1/completions", json.dumps(body))
    until(lambda: scheduler.status()["active"] == 2)
    if stream:
        connection.getresponse().readline()
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    until(lambda: sorted(scheduler.cancelled) == [0, 1])
    assert scheduler.status()["active"] == 0
    server.stop()


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(http_server, "READ_S", 0.2)
    connection = connect(server)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    answer = connection.getresponse()
    assert answer.status == 408
    assert json.loads(answer.read())["error"]["message"] == "the body has not come within 0.2 s"
    connection.close()


def test_a_client_that_does_not_read_holds_up_nobody(server, scheduler):
    slow = connect(server)
    body = {"model": NAME, "prompt": "a", "max_tokens": 60, "n": 50, "stream": True, "seed": 2}
    slow.request("POST", "/v1/completions", json.dumps(body | {"return_token_ids": True}))
    until(lambda: scheduler.requests)
    assert complete(server)[0] == 200
    slow.close()


def test_stopping_ends_what_runs(scheduler):
    scheduler.hold.set()
    server = make_server(scheduler)
    connection = connect(server)
    connection.request("POST", "/v1/completions", json.dumps({"model": NAME, "prompt": "a"}))
    until(lambda: scheduler.requests)
    server.stop()
    server.stop()  # twice is once
    assert scheduler.cancelled == [0]


# Who may ask, and who watches.


def test_a_token_is_wanted_from_everyone_but_who_watches():
    server = make_server(FakeScheduler(), address="0.0.0.0:0", token="secret")
    local = f"http://127.0.0.1:{server.url.rsplit(':', 1)[1]}"
    object.__setattr__(server, "url", local)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/v1/models", "/metrics", "/nowhere"):
            status, answer, _ = call(server, path, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert call(server, "/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200
    assert [call(server, path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    server.stop()


def test_beyond_loopback_a_token_is_needed_and_a_port_in_use_is_an_error_at_once():
    with pytest.raises(ValueError, match="AREAL_JAX_TOKEN"):
        make_server(None, address="0.0.0.0:0")
    with pytest.raises(ValueError, match='must be "host:port"'):
        make_server(None, address="127.0.0.1")
    server = make_server(None)
    taken = server.url.removeprefix("http://")
    with pytest.raises(OSError, match=f"cannot listen on http address {taken}"):
        make_server(None, address=taken)
    server.stop()
    make_server(None, address=taken).stop()  # free again


def test_before_the_engine_is_warm_it_lives_but_is_not_ready():
    server = make_server(None)
    assert call(server, "/healthz")[:2] == (200, "alive\n")
    assert call(server, "/readyz")[:2] == (503, "the engine loads the model and compiles\n")
    status, answer, headers = complete(server)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "not_ready", "1")
    assert "areal_generation_ready 0.0" in call(server, "/metrics")[1]
    scheduler = FakeScheduler()
    server.serve(scheduler)
    assert call(server, "/readyz")[:2] == (200, "ready\n")
    scheduler.fail(MemoryError("out of cache"))
    for path in ("/healthz", "/readyz"):
        status, text, _ = call(server, path)
        assert status == 503 and "out of cache" in text
    assert complete(server)[0] == 503
    server.stop()


# Sampling identity.


def test_a_seed_is_a_uid_of_its_own_range_and_its_absence_another_one_each_time():
    read = lambda **fields: read_completion(  # noqa: E731
        {"model": NAME, "prompt": "a", **fields}, ByteTokenizer(), max_length=64, top_logprobs=0
    )
    two = ["a", "a"]
    once, again, other = (read(prompt=two, seed=seed) for seed in (5, 5, 6))
    unset, fresh = read(prompt=two), read(prompt=two)
    keys = lambda asked: [(r.sampling.seed, r.uid) for r in asked.requests]  # noqa: E731
    assert keys(once) == keys(again)
    assert len({*keys(once), *keys(other), *keys(unset), *keys(fresh)}) == 8  # also the two prompts of one request
    assert keys(once)[0] == keys(read(seed=5))[0]
    for seed in (0, -1, 2**63, 2**200):
        key, uid = sampling_identity(seed, 0)
        assert 0 <= key < 2**32 and FIRST_UID <= uid < 2**32


def test_the_server_takes_no_accelerator():
    program = "import sys; from areal_jax.transport import http_server; print({'jax', 'flax'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


def test_a_text_that_takes_long_to_encode_holds_nobody_else_up(scheduler, monkeypatch):
    came, go_on = threading.Event(), threading.Event()

    def encode(self, text):
        came.set()
        assert go_on.wait(20)
        return [1]

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    server = make_server(scheduler)
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(complete, server)
        assert came.wait(20)
        assert call(server, "/healthz")[0] == 200
        go_on.set()
        assert answer.result()[0] == 200
    server.stop()


def test_a_body_that_is_not_compressed_as_it_says_is_the_clients_mistake(server):
    status, answer, _ = call(server, "/v1/completions", b"no gzip", headers={"Content-Encoding": "gzip"})
    assert status == 400 and answer["error"]["message"].startswith("the body cannot be read")


def test_an_alternative_reads_as_it_would_behind_the_token_before():
    """The words of some vocabularies begin with a space, but not at the beginning of a text."""

    class Words(FakeTokenizer):
        def decode(self, ids):
            return " ".join({0: "", 1: "a", 2: "b", 3: "c"}[i] for i in ids).strip()

    likeliest = Alternatives(np.array([[2, 3], [3, 2]]), np.array([[-0.5, -1.0], [-0.1, -3.0]]))
    sampled = {"tokens": np.array([2, 2]), "logprobs": np.array([-0.5, -3.0]), "versions": np.array([0, 0])}
    choice = Choice(GenerateRequest(0, np.array([0]), (0,), Sampling(4)), Words())
    part = choice.add(Chunk(sample=0, **sampled, finish_reason="length", alternatives=likeliest))
    assert part.texts == ("b", " b")
    assert part.alternatives == ((("b", -0.5), ("c", -1.0)), ((" c", -0.1), (" b", -3.0)))


def test_text_ends_before_the_first_of_several_stop_strings():
    shown = ShownText(("bcd", "d"))
    assert [shown.add("xb"), shown.add("c"), shown.stop("de")] == ["x", "", ""]  # "bcd" begins before "d" does
    assert ShownText(("bcd",)).add("ab") + ShownText(("bcd",)).end("ab") == "aab"  # nothing is held back at an end
