"""The engine is a real JetStream engine: it runs under JetStream's own driver and answers its own client."""

import asyncio

import grpc
import jax
import numpy as np
import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.scheduler import Scheduler
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.transport.generation_service import completions
from areal_jax.types import GenerateRequest, Sampling
from tests.full_forward import full_logprobs, logits_behind

CONFIG = TransformerConfig(vocab_size=32, d_model=16, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True)


class Letters:
    """A tokenizer of one-letter tokens; 0 ends a sequence."""

    eos_ids = (0,)
    pad_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids) -> str:
        return "".join(chr(96 + int(i)) for i in ids)


class GreedyEngine(Engine):
    """Loads its own params, as JetStream's server expects of an engine."""

    def load_params(self):
        return self.load(init_params(CONFIG, jax.random.key(0)), 0)


def greedy(prompt: list[int], params, n: int) -> list[int]:
    """The slow twin: a full forward pass for every token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + n:
        tokens.append(int(np.argmax(logits_behind(CONFIG, params, tokens)[-1])))
    return tokens[len(prompt) :]


def test_what_jetstreams_interface_samples_is_what_the_scheduler_does_with_its_logprobs():
    engine = Engine(CONFIG, EngineOptions(slots=2, max_length=32, decode_steps=1, temperature=0.8, seed=3))
    params = init_params(CONFIG, jax.random.key(0))
    weights = engine.load_params(params, version=5)
    prompt = np.zeros(32, np.int32)
    prompt[:3] = 1, 2, 3
    prefix = engine.prefill(params=weights, padded_tokens=prompt, true_length=3)
    state = engine.insert(prefix, engine.init_decode_state(), 1)
    tokens, logprobs = [], []
    for _ in range(6):
        state, result = engine.generate(weights, state)
        result = result.convert_to_numpy()
        tokens.append(int(result.get_result_at_slot(1).tokens[0, 0]))
        logprobs.append(result.logprobs[1, 0])
        assert not result.get_result_at_slot(0).valid.any()
    expected = full_logprobs(CONFIG, params, np.array([1, 2, 3, *tokens]), 0.8)[2:]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)

    scheduler = Scheduler(engine, engine.load(params, 5))
    scheduler.start()
    # The first sequence that is inserted samples as prompt 0 does.
    request = GenerateRequest(0, np.array([1, 2, 3], np.int32), (0,), Sampling(6, temperature=0.8, seed=3))
    (made,) = asyncio.run(completions(scheduler, request))
    scheduler.stop()
    assert made.tokens.tolist() == tokens and int(weights.version) == 5
    np.testing.assert_allclose(made.logprobs, logprobs, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_jetstreams_own_driver_and_client_run_this_engine(unused_port):
    from jetstream.core import config_lib, server_lib
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    options = EngineOptions(slots=2, max_length=32, temperature=0.0)
    engine = GreedyEngine(CONFIG, options, tokenizer=Letters())
    servers = config_lib.ServerConfig(
        interleaved_slices=("cpu=1",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    server = server_lib.run(
        port=unused_port, config=servers, devices=jax.devices()[:1], credentials=grpc.insecure_server_credentials()
    )
    try:
        with grpc.insecure_channel(f"localhost:{unused_port}") as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=60).is_live
            texts, prompts = [], ["abc", "hello", "xy"]  # more prompts than slots
            for prompt in prompts:
                content = jetstream_pb2.DecodeRequest.TextContent(text=prompt)
                responses = stub.Decode(jetstream_pb2.DecodeRequest(text_content=content, max_tokens=5), timeout=120)
                texts.append("".join(r.stream_content.samples[0].text for r in responses))
    finally:
        server.stop()
    letters = Letters()
    params = engine.load_params().params
    for prompt, text in zip(prompts, texts, strict=True):
        # The stock driver prepends nothing: our tokenizer encodes without BOS. It drops a stop token and what follows.
        expected = greedy(letters.encode(prompt), params, 5)
        expected = expected[: expected.index(0)] if 0 in expected else expected
        assert text == letters.decode(expected)
