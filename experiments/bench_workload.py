"""What the generation benchmark generates with: two models, prompts, long-tailed lengths, and a scheduler under load.

In: a name or a number of slots. Out: models, requests, and how long our engine took. Called by the parts of
`bench_generation`. Waits for the scheduler.

Shapes: P prompt tokens, R requests.
"""

import contextlib
import dataclasses
import functools
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.scheduler import Scheduler
from areal_jax.models.safetensors_files import load_model
from areal_jax.models.transformer import Params, TransformerConfig, init_params
from areal_jax.types import Chunk, GenerateRequest, Sampling

DEFAULT_MODEL = pathlib.Path(__file__).parents[1] / "configs" / "arithmetic_model"
SMOLLM2_135M = TransformerConfig(  # what smollm2_model.make_configs writes, without its weights
    vocab_size=49152,
    d_model=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_size=64,
    d_ff=1536,
    rope_theta=1e5,
    norm_eps=1e-5,
    tied_embeddings=True,
    max_positions=8192,
    family="llama",
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model and the sizes that it is measured with. Lengths are log-normal: median * exp(sigma * normal quantile)."""

    name: str
    config: TransformerConfig
    params: Params
    prompt_tokens: int  # P
    requests: int  # R
    median: int  # new tokens
    slots: int
    contexts: tuple[int, ...]  # cache lengths of the curve
    dtype: str = "float32"
    sigma: float = 1.0

    @functools.cached_property
    def prompts(self) -> np.ndarray:
        """Random token ids [R, P]."""
        shape = (self.requests, self.prompt_tokens)
        return np.random.default_rng(0).integers(0, self.config.vocab_size, shape, np.int32)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """New tokens of each request [R], in the order of arrival."""
        return long_tailed(self.requests, self.median, self.sigma)

    @property
    def longest(self) -> int:
        return self.prompt_tokens + int(self.lengths.max())

    def engine(
        self, slots: int, max_length: int, buckets: tuple[int, ...] = (), slot_buckets: tuple[int, ...] = ()
    ) -> Engine:
        options = EngineOptions(
            slots=slots, max_length=max_length, length_buckets=buckets, slot_buckets=slot_buckets, dtype=self.dtype
        )
        return Engine(self.config, options)


def make_bench(name: str, dtype: str) -> Bench:
    """ "smollm2": SmolLM2-135M's shape with random weights; "default": the model of configs/math.py as it is."""
    if name == "smollm2":
        params = init_params(SMOLLM2_135M, jax.random.key(0))
        return Bench(name, SMOLLM2_135M, params, 32, 192, 24, 32, (64, 128, 256, 512), dtype)
    config, arrays = load_model(DEFAULT_MODEL)
    params = {key: jax.numpy.asarray(array) for key, array in arrays.items()}
    return Bench(name, config, params, 12, 512, 5, 64, (32, 64, 128), dtype)


def long_tailed(count: int, median: int, sigma: float) -> np.ndarray:
    """Quantiles of a log-normal distribution in random order, [count] int; the tail is what it is meant to be."""
    normal = statistics.NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    lengths = np.maximum(np.round(median * np.exp(sigma * quantiles)), 1).astype(int)
    return np.random.default_rng(1).permutation(lengths)


def tail(lengths: Sequence[int] | np.ndarray) -> float:
    """p99 / p50."""
    p50, p99 = np.percentile(lengths, [50, 99])
    return float(p99 / p50)


# Our engine under a scheduler.


@contextlib.contextmanager
def serving(bench: Bench, slots: int, max_length: int, slot_buckets: tuple[int, ...] = ()) -> Iterator[Scheduler]:
    """A scheduler that has compiled everything and runs."""
    engine = bench.engine(slots, max_length, slot_buckets=slot_buckets)
    weights = engine.load(bench.params, 0)
    engine.warm_up(weights)
    scheduler = Scheduler(engine, weights, max_waiting=10**6)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()


def request(uid: int, prompt: np.ndarray, new_tokens: int, temperature: float = 0.0) -> GenerateRequest:
    """One sample that ends at its length and nowhere before."""
    return GenerateRequest(uid, prompt, (0,), Sampling(max_new_tokens=int(new_tokens), temperature=temperature))


@dataclasses.dataclass
class Answers:
    """Tokens by request uid, filled in by the scheduler's thread."""

    waiting: int
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    errors: list[Exception] = dataclasses.field(default_factory=list)
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def add(self, uid: int, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.tokens.setdefault(uid, []).extend(map(int, chunk.tokens))
            self.waiting -= bool(chunk.finish_reason)
        if not self.waiting:
            self.done.set()

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.done.set()

    def wait(self) -> dict[int, list[int]]:
        self.done.wait()
        if self.errors:
            raise RuntimeError("the engine failed under the benchmark") from self.errors[0]
        return self.tokens


def serve(bench: Bench, scheduler: Scheduler, uids: Sequence[int]) -> dict[int, list[int]]:
    """Submits these requests together and waits for the last; greedy tokens by uid."""
    answers = Answers(len(uids))
    for uid in uids:
        asked = request(uid, bench.prompts[uid], bench.lengths[uid])
        scheduler.submit(asked, functools.partial(answers.add, uid), answers.fail)
    return answers.wait()


def continuous(bench: Bench, scheduler: Scheduler) -> float:
    """Seconds for all requests, slots refilled as they become free."""
    return timed(lambda: serve(bench, scheduler, range(bench.requests)))


def static(bench: Bench, scheduler: Scheduler) -> float:
    """Seconds for all requests in batches as large as the slots, in the order of arrival, each waiting for its last."""

    def batches() -> None:
        for first in range(0, bench.requests, bench.slots):
            serve(bench, scheduler, range(first, min(first + bench.slots, bench.requests)))

    return timed(batches)


class Load:
    """Keeps every slot of a scheduler busy with sequences of mixed lengths, until it is closed."""

    def __init__(self, bench: Bench, scheduler: Scheduler, slots: int, max_length: int):
        self._bench, self._scheduler = bench, scheduler
        self._room = max_length - bench.prompt_tokens
        self._slots = slots
        self._next = 0
        self._ended = 0
        self._open = True
        self._error: Exception | None = None
        for _ in range(2 * slots):  # as many wait as run
            self._submit()

    def settle(self) -> None:
        """Waits until a sequence that begins now is among others of all ages; they may all have begun together."""
        until = self._ended + 2 * self._slots
        while self._ended < until:
            self.check()
            time.sleep(0.01)

    def harvested(self) -> tuple[float, float]:
        """The moment at which the tokens of a dispatch come, and how many tokens there were by then."""
        before = self._scheduler.status()["tokens"]
        while self._scheduler.status()["tokens"] == before:
            self.check()
            time.sleep(0.001)
        time.sleep(0.002)  # they are counted slot by slot
        return time.monotonic(), self._scheduler.status()["tokens"]

    def close(self) -> None:
        """No more requests; those under way end by themselves."""
        self._open = False

    def check(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine failed under load") from self._error

    def _submit(self) -> None:
        uid, self._next = self._next, self._next + 1
        place = uid % self._bench.requests
        new_tokens = min(int(self._bench.lengths[place]), self._room)
        asked = request(uid, self._bench.prompts[place], new_tokens, temperature=1.0)
        self._scheduler.submit(asked, self._took, self._fail)

    def _took(self, chunks: list[Chunk]) -> None:
        if self._open and any(chunk.finish_reason for chunk in chunks):
            self._ended += 1
            self._submit()

    def _fail(self, error: Exception) -> None:
        if self._open:  # afterwards it is the scheduler's end
            self._error = error


# Measuring.


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call whose result is ready when it returns or is an array to wait for."""
    began = time.monotonic()
    jax.block_until_ready(call())
    return time.monotonic() - began


def take_turns(calls: dict[str, Callable[[], float]], seconds: float, *, rounds: int = 5) -> dict[str, list[float]]:
    """What each call gives, round after round, so that a machine that becomes slower slows all; at least two rounds.

    Ends after `rounds` rounds, or when the next one would exceed the seconds.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    began = time.monotonic()
    for done in range(1, rounds + 1):
        for name, call in calls.items():
            found[name].append(call())
        spent = time.monotonic() - began
        if done >= 2 and spent * (done + 1) / done > seconds:
            break
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}
