"""A tiny random model with a byte-level tokenizer, for servers whose parts are all real."""

import functools
import json
import pathlib
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import decoders, models, pre_tokenizers

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.scheduler import Scheduler
from areal_jax.generation.tickets import OnChunks, OnError
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.tokenizer import Tokenizer
from areal_jax.transport.http_server import HttpServer
from areal_jax.types import Chunk, GenerateRequest, Sampling

NAME, EOS, SLOTS, LENGTH, TOP_LOGPROBS = "tiny", 256, 4, 96, 4
CONFIG = TransformerConfig(
    vocab_size=260, live_vocab=259, d_model=16, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    """A token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<eos>", "<|im_start|>", "<|im_end|>"])
    with tempfile.TemporaryDirectory() as directory:
        plain.save(f"{directory}/tokenizer.json")
        special = {"eos_token": "<eos>", "chat_template": TEMPLATE}
        pathlib.Path(directory, "tokenizer_config.json").write_text(json.dumps(special))
        loaded = Tokenizer.load(directory)
    assert loaded.eos_ids == (EOS,) and loaded.vocab_size == 259
    return loaded


@functools.cache
def engine() -> Engine:
    """Four slots of 96 tokens, two tokens per dispatch."""
    sizes = {"slots": SLOTS, "max_length": LENGTH, "length_buckets": (LENGTH,), "prefill_rows": 2, "decode_steps": 2}
    options = EngineOptions(**sizes, top_logprobs=TOP_LOGPROBS)
    return Engine(CONFIG, options, tokenizer=tokenizer())


def params_of(seed: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(2 * array) for name, array in init_params(CONFIG, jax.random.key(seed)).items()}


class Held:
    """A request of `new` tokens that holds the engine's thread when the first ones come, until `go_on` or the end."""

    def __init__(self, scheduler: Scheduler, *, prompt: Sequence[int], samples: int, new: int):
        self.chunks: list[Chunk] = []
        self.errors: list[Exception] = []
        self.go_on, self._holds = threading.Event(), threading.Event()
        sampling = Sampling(new, min_new_tokens=new, stop_tokens=(EOS,))
        request = GenerateRequest(0, np.array(prompt, np.int32), tuple(range(samples)), sampling)
        scheduler.submit(request, self._take, self.errors.append)

    def __enter__(self) -> "Held":
        assert self._holds.wait(60), self.errors
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()

    def _take(self, chunks: list[Chunk]) -> None:
        self.chunks += chunks
        self._holds.set()
        assert self.go_on.wait(60)


def held_after_first(scheduler: Scheduler, monkeypatch: Any) -> threading.Event:
    """From now on the engine's thread waits for this event whenever it has handed a client its first tokens."""
    go_on, submit = threading.Event(), scheduler.submit

    def watched_submit(request: GenerateRequest, on_chunks: OnChunks, on_error: OnError) -> int:
        def take(chunks: list[Chunk]) -> None:
            on_chunks(chunks)
            assert go_on.wait(60)

        return submit(request, take, on_error)

    monkeypatch.setattr(scheduler, "submit", watched_submit)
    return go_on


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def scrape(server: HttpServer) -> dict[str, float]:
    """The metrics of a server: name (with its labels) -> value."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {"".join([s.name.removeprefix("areal_generation_"), *s.labels.values()]): s.value for s in samples}
