"""A generation scheduler without a model, and a server process around it that can be killed.

Token at position p of sample s of prompt u is (u + 10 s + p) % 100, its log-probability -p / 8, its version the one
held at that moment: a test knows every answer beforehand, and a sample that went on elsewhere shows no seam.
"""

import sys
import threading
import time
from concurrent.futures import Future

import numpy as np

from areal_jax.transport.servers import serve_generation
from areal_jax.types import Busy, Chunk, GenerateRequest

SHAPES = {"layer.kernel": (2, 3), "layer.bias": (3,)}


def token_at(uid: int, sample: int, position: int) -> int:
    return (uid + 10 * sample + position) % 100


class FakeScheduler:
    """Gives every running sample `step` tokens per boundary, `pause_s` apart; stands still while `hold` is set."""

    def __init__(self, *, step: int = 2, pause_s: float = 0.0, version: int = 0, max_waiting: int = 1000):
        self.step, self.pause_s, self.version, self.max_waiting = step, pause_s, version, max_waiting
        self.failure: Exception | None = None
        self.hold = threading.Event()
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[int] = []
        self.updates: list[tuple[int, object]] = []
        self.params: dict[str, np.ndarray] = {}
        self._running: dict[int, tuple] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request, on_chunks, on_error) -> int:
        if len(request.prompt_tokens) > 8:
            raise ValueError(f"prompt {request.uid} has {len(request.prompt_tokens)} tokens; this server holds 8")
        with self._lock:
            if len(self._running) >= self.max_waiting:
                raise Busy(f"{len(self._running)} requests run and {self.max_waiting} may")
            ticket = len(self.requests)
            self.requests.append(request)
            for sample in request.samples:
                partial = request.partial.get(sample)
                self._tokens[ticket, sample] = 0 if partial is None else len(partial.tokens)
            self._running[ticket] = (request, on_chunks, on_error)
        return ticket

    def cancel(self, ticket: int) -> None:
        with self._lock:
            self.cancelled.append(ticket)
            self._running.pop(ticket, None)

    def fail(self, error: Exception) -> None:
        with self._lock:
            self.failure = error
            for _, _, on_error in self._running.values():
                on_error(error)
            self._running.clear()

    def update_weights(self, params, version, on_update=None, confirm=lambda: None) -> Future:
        confirm()
        shapes = {name: array.shape for name, array in params.items()}
        if shapes != SHAPES:
            raise ValueError(f"weights of version {version} do not fit this model: given {shapes}, needed {SHAPES}")
        future: Future = Future()
        with self._lock:
            if version <= self.version:
                future.set_exception(ValueError(f"version {version} is not newer than version {self.version}"))
            else:
                self.version, self.params = version, dict(params)
                self.updates.append((version, on_update))
                future.set_result(0.25)
        return future

    def status(self) -> dict[str, float]:
        return {"version": self.version, "active": len(self._running)}

    def _run(self) -> None:
        while True:
            time.sleep(self.pause_s or 0.001)
            with self._lock:
                if not self.hold.is_set():
                    for ticket in list(self._running):
                        self._boundary(ticket)

    def _boundary(self, ticket: int) -> None:
        request, on_chunks, _ = self._running[ticket]
        chunks = []
        for sample in request.samples:
            begin, limit = self._tokens[ticket, sample], request.sampling.max_new_tokens
            if begin < 0:
                continue
            tokens, reason = [], ""
            for position in range(begin, min(begin + self.step, limit)):
                tokens.append(token_at(request.uid, sample, position))
                if tokens[-1] in request.sampling.stop_tokens or position == limit - 1:
                    reason = "stop" if tokens[-1] in request.sampling.stop_tokens else "length"
                    break
            end = begin + len(tokens)
            self._tokens[ticket, sample] = -1 if reason else end
            logprobs = -np.arange(begin, end, dtype=np.float32) / 8
            versions = np.full(len(tokens), self.version, np.int32)
            chunks.append(Chunk(sample, np.array(tokens, np.int32), logprobs, versions, reason))
        if all(self._tokens[ticket, sample] < 0 for sample in request.samples):
            del self._running[ticket]
        on_chunks(chunks)


class FakeTokenizer:
    """One token per byte of UTF-8; 3 (end of text) ends."""

    eos_ids = (3,)
    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def serve_fake(scheduler: FakeScheduler, **options):
    """A server over a fake scheduler, on a free port of loopback unless `options` say otherwise."""
    return serve_generation(scheduler, **{"address": "127.0.0.1:0", "tokenizer": FakeTokenizer(), **options})


if (
    __name__ == "__main__"
):  # python -m tests.transport.fakes PORT PAUSE_S VERSION: prints its address, serves until killed
    port, pause_s, version = sys.argv[1:]
    server = serve_fake(FakeScheduler(pause_s=float(pause_s), version=int(version)), address=f"127.0.0.1:{port}")
    print(server.address, flush=True)
    threading.Event().wait()
