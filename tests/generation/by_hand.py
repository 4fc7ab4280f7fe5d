"""A scheduler whose turns a test takes by hand, so that a situation is exactly the one that the test means."""

import collections

import jax
import numpy as np

from areal_jax.generation.engine import Engine
from areal_jax.generation.scheduler import Scheduler
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.types import Arrays, GenerateRequest, Sampling
from tests.full_forward import logits_behind

CONFIG = TransformerConfig(vocab_size=32, d_model=16, layers=2, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True)
LENGTH = 64  # tokens of the longest sequence
PLAIN = Sampling(max_new_tokens=1)  # temperature 1, nothing truncated
# Under a stale cache log-probabilities of these are wrong by more than 1; rounding makes less than 2e-6.
PARAMS = [
    {name: np.asarray(array) for name, array in init_params(CONFIG, jax.random.key(version)).items()}
    for version in range(5)
]


def prompt_of(length: int, uid: int = 0) -> np.ndarray:
    return (np.arange(length, dtype=np.int32) * 7 + uid) % 32


def slow_kept(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Which tokens [V] may be drawn, the slow twin: sorted, in float64, one row at a time."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(len(logits), bool)
    masses = np.exp(scaled[order] - scaled[order[0]])
    count = min(top_k or len(logits), len(logits))
    shares = np.cumsum(masses[:count]) / masses[:count].sum()
    count = min(count, int(np.searchsorted(shares, top_p)) + 1) if top_p < 1 else count
    keep[order[: min(count, int((masses >= min_p).sum()))]] = True
    return keep


def logprobs_of(logits_TV: np.ndarray, tokens: np.ndarray, sampling: Sampling) -> np.ndarray:
    """log p [T] of tokens under the tempered and truncated distributions that their requests ask for, in float64."""
    limits = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    kept_TV = np.array([slow_kept(row, *limits) for row in logits_TV])
    scaled_TV = np.where(kept_TV, logits_TV.astype(np.float64) / sampling.temperature, -np.inf)
    scaled_TV -= scaled_TV.max(-1, keepdims=True)
    return scaled_TV[np.arange(len(tokens)), tokens] - np.log(np.exp(scaled_TV).sum(-1))


def forward_logits(version: int, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] behind each of T tokens under the weights of a version, by one forward of the whole sequence."""
    return logits_behind(CONFIG, PARAMS[version], tokens)


def forward_logprobs(version: int, tokens: np.ndarray, sampling: Sampling = PLAIN) -> np.ndarray:
    """log p of every token but the first under the weights of a version."""
    return logprobs_of(forward_logits(version, tokens)[:-1], tokens[1:], sampling)


class ByHand:
    """A scheduler that is never started, its requests, and what came back for (uid, sample)."""

    def __init__(self, engine: Engine, params: Arrays = PARAMS[0], **options):
        self.scheduler = Scheduler(engine, engine.load(params, 0), **options)
        self.requests: dict[int, GenerateRequest] = {}
        self.chunks = collections.defaultdict(list)
        self.errors: list[Exception] = []

    def ask(
        self, uid, length, max_new_tokens, *, samples=(0,), stop=(), partial=None, evaluation=False, **limits
    ) -> int:
        """Puts a request behind what was put before; returns its ticket. `limits` are temperature, top_k and so on."""
        sampling = Sampling(max_new_tokens, seed=7, stop_tokens=stop, **limits)
        request = GenerateRequest(
            uid, prompt_of(length, uid), tuple(samples), sampling, evaluation=evaluation, partial=partial or {}
        )
        self.requests[uid] = request
        take = lambda chunks: [self.chunks[uid, chunk.sample].append(chunk) for chunk in chunks]  # noqa: E731
        return self.scheduler.submit(request, take, self.errors.append)

    def update(self, version: int, on_update=None):
        """Puts an update behind what was put before; returns its future."""
        return self.scheduler.update_weights(PARAMS[version], version, on_update)

    def commands(self) -> None:
        self.scheduler._run_commands(wait=False)

    def admit(self) -> None:
        """Commands, prefill, and nothing decoded yet."""
        self.commands()
        if self.scheduler._free and self.scheduler._admissible():
            self.scheduler._admit()

    def busy(self) -> bool:
        return not self.scheduler._idle() or not self.scheduler._commands.empty()

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            assert self.busy(), "a turn would wait for ever"
            self.scheduler._turn()

    def finish(self) -> None:
        while self.busy():
            self.scheduler._turn()

    def joined(self, uid: int, sample: int, field: str) -> np.ndarray:
        return np.concatenate([getattr(chunk, field) for chunk in self.chunks[uid, sample]])

    def versions(self, uid: int, sample: int = 0) -> list[int]:
        return [int(version) for version in self.joined(uid, sample, "versions")]

    def known(self, uid: int, sample: int) -> np.ndarray:
        """Everything that was known of a sample before its first chunk."""
        request = self.requests[uid]
        partial = [request.partial[sample].tokens] if sample in request.partial else []
        return np.concatenate([request.prompt_tokens, *partial])

    def slot(self, uid: int, sample: int = 0):
        slots = self.scheduler._slots.values()
        return next(slot for slot in slots if slot.ticket.request.uid == uid and slot.sample == sample)

    def assert_exact(self) -> None:
        """Every token's log-probability is that of a fresh forward of its whole sequence under the tagged version."""
        assert self.chunks
        for uid, sample in self.chunks:
            known = self.known(uid, sample)
            tokens = np.concatenate([known, self.joined(uid, sample, "tokens")])
            logprobs, versions = self.joined(uid, sample, "logprobs"), self.joined(uid, sample, "versions")
            for version in np.unique(versions):
                expected = forward_logprobs(int(version), tokens, self.requests[uid].sampling)[len(known) - 1 :]
                tagged = versions == version
                np.testing.assert_allclose(logprobs[tagged], expected[tagged], atol=1e-5, rtol=0, err_msg=f"{uid}")
