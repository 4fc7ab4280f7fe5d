"""Continuous batching over the engine's slots: admission, decoding, harvest, weight swaps, on one thread.

In: requests, cancellations and new weights, from any thread, as commands in a queue. Out: chunks of tokens through each
request's callback, on the engine's thread.

One turn of the loop:
    commands       consumes what other threads asked for; a weight swap happens here, between two dispatches
    admit          fills free slots from the waiting requests, evaluation first; one prefill for all samples of a prompt
    decode         dispatches up to `decode_steps` tokens for every slot
    harvest        reads the dispatch before, while the device works on this one; frees slots, calls back
Waits for commands only when no slot is active and nothing is admitted.
"""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Literal

import jax
import numpy as np

from areal_jax import compilation
from areal_jax.generation.engine import STOP_TOKENS, Decoded, Engine, Requests, Weights, empty_requests
from areal_jax.models.transformer import param_shapes
from areal_jax.types import Busy, Chunk, GenerateRequest

OnUpdate = Literal["recompute", "keep", "drain"]


OnChunks = Callable[[list[Chunk]], None]
OnError = Callable[[Exception], None]


@dataclasses.dataclass(slots=True, eq=False)
class _Ticket:
    """A request on its way: samples not yet admitted, slots it holds."""

    number: int
    request: GenerateRequest
    on_chunks: OnChunks
    on_error: OnError
    waiting: list[int]  # sample indices without a slot yet
    running: set[int] = dataclasses.field(default_factory=set)  # slots


@dataclasses.dataclass(slots=True)
class _Slot:
    ticket: _Ticket
    sample: int
    length: int  # known tokens, without those of a dispatch that is not harvested
    limit: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Dispatch:
    """A decode that the device may still be working on, and who held the slots when it was sent."""

    decoded: Decoded
    version: int
    slots: dict[int, _Slot]


class Scheduler:
    """Owns the decode state and the weights in use. All methods may be called from any thread, once `start`ed."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        *,
        on_update: OnUpdate = "recompute",
        max_waiting: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._weights = weights
        self._version = int(weights.version)
        self._on_update = on_update
        self._max_waiting = max_waiting
        self._clock = clock
        self._state = engine.init_decode_state()
        self._slots: dict[int, _Slot] = {}
        self._free = list(range(engine.options.slots))
        self._tickets: dict[int, _Ticket] = {}
        self._waiting: tuple[collections.deque[_Ticket], ...] = (
            collections.deque(),
            collections.deque(),
        )  # evaluation, rollout
        self._waiting_samples = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._draining: Callable[[], None] | None = None
        self._pending: _Dispatch | None = None
        self._next_ticket = 0
        self._updates: set[Future[float]] = set()  # not swapped in yet
        self._lock = threading.Lock()  # of tickets, updates, the waiting count and `failure`
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopped = False
        self.failure: Exception | None = None
        self._counts = dict.fromkeys(
            ("busy_s", "tokens", "requests", "swaps", "swap_stall_s", "recomputed_tokens"), 0.0
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop; requests and updates that are not done get a RuntimeError."""
        self._commands.put(self._end)
        self._thread.join()

    def submit(self, request: GenerateRequest, on_chunks: OnChunks, on_error: OnError) -> int:
        """Queues a request, returns its ticket. ValueError for one that can never run, Busy when too many wait.

        `on_chunks` is called on the engine's thread, at most once per dispatch, until every sample has a finish reason;
        `on_error` instead, once, when the engine fails.
        """
        self._check(request)
        with self._lock:
            self._check_alive()
            if self._waiting_samples + len(request.samples) > self._max_waiting:
                raise Busy(
                    f"{self._waiting_samples} samples wait for a slot and generation.max_waiting={self._max_waiting}; "
                    "ask again later"
                )
            self._waiting_samples += len(request.samples)
            self._next_ticket += 1
            ticket = _Ticket(self._next_ticket, request, on_chunks, on_error, list(request.samples))
            self._tickets[ticket.number] = ticket
        self._commands.put(lambda: self._enqueue(ticket))
        return ticket.number

    def cancel(self, ticket: int) -> None:
        """Forgets a request at the next boundary; an unknown or finished one is ignored."""
        self._commands.put(lambda: self._cancel(ticket))

    def update_weights(
        self, params: Mapping[str, np.ndarray | jax.Array], version: int, on_update: OnUpdate | None = None
    ) -> Future[float]:
        """Loads new weights beside the old ones (in this thread) and swaps them in at the next dispatch boundary.

        The future gives the seconds that decoding stood still for it. Raises ValueError, and changes nothing, when
        names or shapes differ or the version is not newer than the one held.
        """
        self._check_weights(params, version)
        weights = self._engine.load(params, version)
        future: Future[float] = Future()
        with self._lock:
            self._check_alive()
            self._updates.add(future)
        self._commands.put(lambda: self._update(weights, version, on_update or self._on_update, future))
        return future

    def status(self) -> dict[str, float]:
        """Totals since the start, and what is going on now."""
        return {
            **self._counts,
            "version": self._version,
            "active": len(self._slots),
            "waiting": self._waiting_samples,
            "compilations": compilation.count(),
        }

    # The loop, on the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:  # the one place where the engine's thread fails: everyone waiting must hear of it
            self._abandon(error)
            raise

    def _turn(self) -> None:
        self._run_commands(wait=not self._slots and not self._admissible() and self._pending is None)
        if self._draining is not None and not self._slots:
            swap, self._draining = self._draining, None
            swap()
        began = self._clock()
        while self._free and self._admissible():
            self._admit()
        dispatched = self._dispatch() if self._slots else None
        if self._pending is not None:
            self._harvest(self._pending)
        self._pending = dispatched
        if dispatched is not None:
            self._counts["busy_s"] += self._clock() - began

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty() and not self._stopped:
            self._commands.get()()

    def _admissible(self) -> bool:
        return self._draining is None and any(self._waiting)

    def _dispatch(self) -> _Dispatch:
        ahead = self._engine.options.decode_steps * (1 if self._pending is None else 2)  # what may not be harvested yet
        longest = max(min(slot.length + ahead, slot.limit) for slot in self._slots.values())
        self._state, decoded = self._engine.decode(self._weights, self._state, longest)
        return _Dispatch(decoded, self._version, dict(self._slots))

    def _harvest(self, dispatch: _Dispatch) -> None:
        """Hands out what a dispatch made and frees the slots that it finished."""
        decoded = jax.device_get(dispatch.decoded)
        chunks: dict[int, list[Chunk]] = collections.defaultdict(list)
        for index, slot in dispatch.slots.items():
            count = int(decoded.count[index])
            if count == 0 or self._slots.get(index) is not slot:  # ended before, or cancelled since
                continue
            tokens = decoded.tokens[index, :count]
            reason = (
                ""
                if decoded.active[index]
                else "stop"
                if tokens[-1] in slot.ticket.request.sampling.stop_tokens
                else "length"
            )
            versions = np.full(count, dispatch.version, np.int32)
            chunks[slot.ticket.number].append(
                Chunk(slot.sample, tokens, decoded.logprobs[index, :count], versions, reason)
            )
            slot.length += count
            self._counts["tokens"] += count
            if reason:
                self._release(index)
        for number, made in chunks.items():
            ticket = self._tickets[number]
            if not ticket.running and not ticket.waiting:
                with self._lock:
                    del self._tickets[number]
            ticket.on_chunks(made)

    def _release(self, index: int) -> None:
        self._slots.pop(index).ticket.running.discard(index)
        self._free.append(index)

    def _admit(self) -> None:
        """Starts as many waiting samples as there are free slots and prefill rows."""
        requests = empty_requests(self._engine.options.slots)
        rows: list[np.ndarray] = []
        while self._free and self._admissible() and len(rows) < self._engine.options.prefill_rows:
            lane = next(lane for lane in self._waiting if lane)
            ticket = lane[0]
            fresh = [s for s in ticket.waiting if s not in ticket.request.partial]
            samples = (fresh or ticket.waiting[:1])[: len(self._free)]  # a sample that goes on has a row of its own
            rows.append(self._row(ticket.request, samples[0]))
            for sample in samples:
                self._start(ticket, sample, len(rows) - 1, len(rows[-1]), requests)
            ticket.waiting = [s for s in ticket.waiting if s not in samples]
            with self._lock:
                self._waiting_samples -= len(samples)
            if not ticket.waiting:
                lane.popleft()
        self._state = self._engine.admit(self._weights, self._state, rows, requests)

    @staticmethod
    def _row(request: GenerateRequest, sample: int) -> np.ndarray:
        partial = request.partial.get(sample)
        return request.prompt_tokens if partial is None else np.concatenate([request.prompt_tokens, partial.tokens])

    def _start(self, ticket: _Ticket, sample: int, row: int, length: int, requests: Requests) -> None:
        request, sampling = ticket.request, ticket.request.sampling
        index = self._free.pop()
        limit = len(request.prompt_tokens) + sampling.max_new_tokens
        values = {
            "row": row,
            "length": length,
            "prompt_length": len(request.prompt_tokens),
            "limit": limit,
            "temperature": sampling.temperature,
            "seed": sampling.seed % 2**32,
            "uid": request.uid % 2**32,
            "sample": sample,
        }
        for name, value in values.items():
            getattr(requests, name)[index] = value
        requests.stop_tokens[index, : len(sampling.stop_tokens)] = sampling.stop_tokens
        self._slots[index] = _Slot(ticket, sample, length, limit)
        ticket.running.add(index)

    # Commands, on the engine's thread.

    def _enqueue(self, ticket: _Ticket) -> None:
        self._waiting[0 if ticket.request.evaluation else 1].append(ticket)
        self._counts["requests"] += len(ticket.request.samples)

    def _cancel(self, number: int) -> None:
        with self._lock:
            ticket = self._tickets.pop(number, None)
            if ticket is None:
                return
            self._waiting_samples -= len(ticket.waiting)
        for lane in self._waiting:
            if ticket in lane:
                lane.remove(ticket)
        self._state = self._engine.deactivate(self._state, sorted(ticket.running))
        for index in list(ticket.running):
            self._release(index)

    def _update(self, weights: Weights, version: int, on_update: OnUpdate, future: Future[float]) -> None:
        if on_update != "drain":
            self._swap(weights, version, future, recompute=on_update == "recompute")
            return
        earlier = self._draining

        def swap() -> None:
            if earlier is not None:
                earlier()
            self._swap(weights, version, future, recompute=False)

        self._draining = swap

    def _swap(self, weights: Weights, version: int, future: Future[float], *, recompute: bool) -> None:
        with self._lock:
            self._updates.discard(future)
        if version <= self._version:  # another update was faster
            future.set_exception(
                ValueError(f"version {version} is not newer than version {self._version}, which is held")
            )
            return
        if self._pending is not None:  # what the device still does under the old weights is no part of the stall
            self._harvest(self._pending)
            self._pending = None
        began = self._clock()
        self._weights, self._version = weights, version
        if recompute:
            self._recompute()
        stall = self._clock() - began
        self._counts["swaps"] += 1
        self._counts["swap_stall_s"] += stall
        future.set_result(stall)

    def _recompute(self) -> None:
        """Rebuilds the cache of every running slot, neighbours in length together so that little is padding."""
        by_length = sorted(self._slots, key=lambda index: self._slots[index].length)
        rows = self._engine.options.prefill_rows
        for first in range(0, len(by_length), rows):
            group = by_length[first : first + rows]
            longest = self._slots[group[-1]].length
            self._state = self._engine.recompute(self._weights, self._state, group, longest)
            self._counts["recomputed_tokens"] += sum(self._slots[index].length for index in group)
        jax.block_until_ready(self._state.length)

    def _end(self) -> None:
        self._stopped = True
        self._abandon(RuntimeError("the generation server is stopping"))

    def _abandon(self, error: Exception) -> None:
        """Tells everyone who waits, and from now on everyone who comes."""
        with self._lock:
            self.failure = error
            tickets, updates = list(self._tickets.values()), list(self._updates)
        for ticket in tickets:
            ticket.on_error(error)
        for update in updates:
            update.set_exception(RuntimeError(f"the new weights were not swapped in: {error!r}"))

    # Checks, on the caller's thread.

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise RuntimeError("the generation engine has ended and serves no more requests") from self.failure

    def _check(self, request: GenerateRequest) -> None:
        sampling, options = request.sampling, self._engine.options
        length = len(request.prompt_tokens) + sampling.max_new_tokens
        if not len(request.prompt_tokens):
            raise ValueError(f"prompt {request.uid} is empty; a prompt needs at least one token")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={sampling.max_new_tokens} must be at least 1")
        if length > options.max_length:
            raise ValueError(
                f"prompt {request.uid} has {len(request.prompt_tokens)} tokens and "
                f"max_new_tokens={sampling.max_new_tokens}"
                f", together {length}; this server holds {options.max_length} per sequence: shorten one of them"
            )
        for sample, partial in request.partial.items():
            if len(partial.tokens) >= sampling.max_new_tokens:
                raise ValueError(
                    f"sample {sample} of prompt {request.uid} already has its {sampling.max_new_tokens} tokens"
                )
        if sampling.temperature < 0:
            raise ValueError(f"temperature={sampling.temperature} must be 0 (greedy) or positive")
        if len(sampling.stop_tokens) > STOP_TOKENS:
            raise ValueError(f"{len(sampling.stop_tokens)} stop tokens; a request may have {STOP_TOKENS}")

    def _check_weights(self, params: Mapping[str, np.ndarray | jax.Array], version: int) -> None:
        wanted = {name: shape.shape for name, shape in param_shapes(self._engine.config).items()}
        given = {name: tuple(array.shape) for name, array in params.items()}
        if given != wanted:
            differing = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
            first = differing[0]
            raise ValueError(
                f"weights of version {version} do not fit this model in {len(differing)} tensors; {first}: "
                f"given {given.get(first, 'nothing')}, needed {wanted.get(first, 'nothing')}"
            )
        if version <= self._version:
            raise ValueError(f"version {version} is not newer than version {self._version}, which is held")
