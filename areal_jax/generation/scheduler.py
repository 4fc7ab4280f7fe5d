"""Continuous batching over the engine's slots: admission, decoding, harvest, weight swaps, on one thread.

In: requests, cancellations and new weights, from any thread, as commands in a queue. Out: chunks of tokens through each
request's callback, on the engine's thread.

One turn of the loop:
    commands       consumes what other threads asked for; a weight swap happens here, between two dispatches
    expire         ends the requests whose time is over
    admit          fills free slots from the waiting requests, evaluation first; one prefill for all samples of a prompt
    decode         dispatches up to `decode_steps` tokens for every slot
    prefill ahead  dispatches, behind it, the prefill of who is next where no slot is free (prefilled.py)
    harvest        reads the dispatch before, while the device works on this one; looks for stop strings, drops what was
                   made behind them, frees slots, calls back
Waits for commands only when no slot is active and nothing is admitted. When more samples wait than slots are free, it
reads the dispatch before first, so that a slot that ended is filled at this boundary and not one dispatch later; the
callbacks still run beside the new dispatch.

Memory of a swap: the new weights load beside the old ones, in the thread that brings them, so that two sets live until
the swap, and one more for each further update that comes before it (a trainer's publisher waits, and brings none); or,
without `double_buffer`, in their place: one set, and the server stands still while they load.
"""

import collections
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np

from areal_jax import compilation
from areal_jax.generation import request_checks
from areal_jax.generation.engine import Engine, Requests, Weights, empty_requests
from areal_jax.generation.prefilled import Prefilled
from areal_jax.generation.stop_strings import StopStrings
from areal_jax.generation.tickets import (
    Admission,
    Dispatch,
    OnChunks,
    OnError,
    Slot,
    Ticket,
    Waiting,
    chunk_of,
    fill,
    no_more,
    too_late,
)
from areal_jax.telemetry import Activity, Progress, Swap, Telemetry
from areal_jax.types import Busy, Chunk, GenerateRequest

OnUpdate = Literal["recompute", "keep", "drain"]


Load = Callable[[], Weights]


def _already(weights: Weights) -> Load:
    return lambda: weights


def _bytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


class Scheduler:
    """Owns the decode state and the weights in use. All methods may be called from any thread, once `start`ed."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        *,
        on_update: OnUpdate = "recompute",
        max_waiting: int = 4096,
        double_buffer: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._weights = weights
        self._version = int(weights.version)
        self._on_update = on_update
        self._max_waiting = max_waiting
        self._double_buffer = double_buffer
        self._clock = clock
        self._state = engine.init_decode_state()
        self.telemetry = Telemetry(
            clock=clock,
            slots=engine.options.slots,
            cache_bytes=_bytes(self._state.cache),
            weight_bytes=_bytes(weights.params),
        )
        self.activity = Activity(clock)
        self._slots: dict[int, Slot] = {}
        self._free = list(range(engine.options.slots))
        self._tickets: dict[int, Ticket] = {}
        self._deadlines: dict[int, float] = {}  # by ticket, on this clock; of those that have one
        self._waiting = Waiting()
        self._prefilled = Prefilled(engine)
        self._waiting_samples = 0  # there, and in tickets that are still on their way there
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._draining: Callable[[], None] | None = None
        self._pending: Dispatch | None = None
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
        `on_error` instead, once, when the engine fails, or with a TimeoutError when the request's time is over.
        """
        try:
            request_checks.check(request, self._engine)
            self._check_samples(request)
        except ValueError:
            self.telemetry.refuse("invalid")
            raise
        with self._lock:
            self._check_alive()
            if self._waiting_samples + len(request.samples) > self._max_waiting:
                self.telemetry.refuse("busy")
                raise Busy(
                    f"{self._waiting_samples} samples wait for a slot and generation.max_waiting={self._max_waiting}; "
                    "ask again later"
                )
            self._waiting_samples += len(request.samples)
            self._next_ticket += 1
            asked = self.telemetry.accept(len(request.prompt_tokens))
            ticket = Ticket(self._next_ticket, request, on_chunks, on_error, list(request.samples), asked)
            self._tickets[ticket.number] = ticket
            if request.timeout_s:
                self._deadlines[ticket.number] = asked + request.timeout_s
        self._commands.put(lambda: self._enqueue(ticket))
        return ticket.number

    def cancel(self, ticket: int) -> None:
        """Forgets a request at the next boundary; an unknown or finished one is ignored."""
        self._commands.put(lambda: self._cancel(ticket))

    def finish(self, ticket: int, sample: int) -> None:
        """Ends a sample at the next boundary with finish_reason "stop"; an unknown or finished one is ignored.

        Its last chunk has no tokens, and those that the device has already made beyond are never handed out.
        """
        self._commands.put(lambda: self._finish(ticket, sample))

    def update_weights(
        self,
        params: Mapping[str, np.ndarray | jax.Array],
        version: int,
        on_update: OnUpdate | None = None,
        confirm: Callable[[], object] = lambda: None,
    ) -> Future[float]:
        """Takes new weights at the next dispatch boundary; the future gives the seconds that decoding stood still.

        They load beside the old ones, in this thread; without `double_buffer` in their place, in the engine's, and
        `params` must stay as they are until then. Raises ValueError, and changes nothing, when names, shapes or dtypes
        differ or the version is not newer than the one held. All of that is known before an old array is freed: what
        can still fail then is the placing itself, and it ends the server, which has no weights any more. Of `confirm`,
        which is called before they are used, an error says that they must not be.
        """
        request_checks.check_weights(params, version, self._engine)
        self._check_version(version)
        load: Load = functools.partial(self._engine.load, params, version)
        if self._double_buffer:
            load = _already(load())
        confirm()
        future: Future[float] = Future()
        with self._lock:
            self._check_alive()
            self._updates.add(future)
        self._commands.put(lambda: self._update(load, version, on_update or self._on_update, future))
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
        self._run_commands(wait=self._idle())
        if self._stopped:
            return
        self._expire()
        if self._draining is not None and not self._slots:
            swap, self._draining = self._draining, None
            swap()
        began = self._clock()
        made = self._collect() if self._admissible() and self._waiting_samples > len(self._free) else {}
        if self._free and self._admissible():
            self._admit()
        dispatched = self._dispatch()
        if self._admissible():  # no slot is free
            self._prefilled.have_next(self._weights, self._waiting)
        self._hand_out(made or self._collect())
        self._pending = dispatched
        if dispatched is not None:
            self._counts["busy_s"] += self._clock() - began

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            with self.activity.waiting():
                command = self._commands.get()
            command()
        while not self._commands.empty() and not self._stopped:
            self._commands.get()()

    def _idle(self) -> bool:
        return not (self._slots or self._admissible() or self._pending or self._draining)

    def _admissible(self) -> bool:
        return self._draining is None and bool(self._waiting)

    def _dispatch(self) -> Dispatch | None:
        """Decodes at the cost of the longest slot that goes on; None when all reach their limits in the one before."""
        steps = self._engine.options.decode_steps
        before = {} if self._pending is None else self._pending.slots
        reached = [
            (slot.length + steps * (before.get(index) is slot), slot.limit) for index, slot in self._slots.items()
        ]
        goals = [min(length + steps, limit) for length, limit in reached if length < limit]
        if not goals:
            return None
        self._state, decoded = self._engine.decode(self._weights, self._state, max(goals), self._slots)
        return Dispatch(decoded, self._version, dict(self._slots))

    def _collect(self) -> dict[int, list[Chunk]]:
        """What the dispatch before made, by ticket, once it is done; frees the slots that ended in it."""
        dispatch, self._pending = self._pending, None
        chunks: dict[int, list[Chunk]] = collections.defaultdict(list)
        if dispatch is None:
            return chunks
        decoded = jax.device_get(dispatch.decoded)
        going_on = []  # slots that end here and not on the device, by a stop string
        for index, slot in dispatch.slots.items():
            if decoded.count[index] == 0 or self._slots.get(index) is not slot:  # ended before, or cancelled since
                continue
            chunk = chunk_of(slot, index, decoded, dispatch.version)
            chunks[slot.ticket.number].append(chunk)
            count = len(chunk.tokens)
            slot.length += count
            slot.ticket.made += count
            self._counts["tokens"] += count
            self.telemetry.advance(slot.progress, count)
            if chunk.finish_reason:
                self.telemetry.finish(slot.progress, chunk.finish_reason)
                self._release(index)
                going_on += [index] if decoded.active[index] else []
        if going_on:
            self._state = self._engine.deactivate(self._state, going_on)
        return chunks

    def _hand_out(self, chunks: dict[int, list[Chunk]]) -> None:
        """Calls back with what was made, and forgets the requests that are done."""
        for number, made in chunks.items():
            ticket = self._tickets[number]
            if not ticket.running and not ticket.waiting:
                with self._lock:
                    del self._tickets[number]
                    self._deadlines.pop(number, None)
            ticket.on_chunks(made)

    def _release(self, index: int) -> None:
        self._slots.pop(index).ticket.running.discard(index)
        self._free.append(index)

    def _admit(self) -> None:
        """Starts as many waiting samples as there are free slots."""
        while self._free and self._waiting:
            self._prefilled.have_next(self._weights, self._waiting)
            admissions = self._waiting.take(len(self._free), self._prefilled)
            for prefilled, rows in self._prefilled.of(admissions).items():
                requests = empty_requests(self._engine.options.slots)
                for admission, row in rows:
                    self._start(admission, row, requests)
                self._state = self._engine.start(self._state, prefilled, requests)
            for ticket in (admission.ticket for admission in admissions):
                if not ticket.waiting:
                    self._prefilled.forget(ticket.number)
            with self._lock:
                self._waiting_samples -= sum(len(admission.samples) for admission in admissions)

    def _start(self, admission: Admission, row: int, requests: Requests) -> None:
        ticket = admission.ticket
        for sample in admission.samples:
            index = self._free.pop()
            slot = Slot(ticket, sample, len(admission.tokens), ticket.limit, Progress(ticket.asked))
            if ticket.request.sampling.stop_strings:
                slot.stop_strings = self._stop_strings(ticket.request, sample)
            fill(requests, index, slot, row)
            self._slots[index] = slot
            ticket.running.add(index)

    def _stop_strings(self, request: GenerateRequest, sample: int) -> StopStrings:
        sampling = request.sampling
        found = StopStrings(sampling.stop_strings, self._engine.tokenizer.decode, ignored=sampling.min_new_tokens)
        if sample in request.partial:
            found.skip(request.partial[sample].tokens.tolist())
        return found

    # Commands, on the engine's thread.

    def _enqueue(self, ticket: Ticket) -> None:
        if ticket.number not in self._tickets:  # its time was over before it got here
            return
        self._waiting.put(ticket)
        self._counts["requests"] += len(ticket.request.samples)

    def _finish(self, number: int, sample: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        index = next((index for index in ticket.running if self._slots[index].sample == sample), None)
        if index is not None:
            self._state = self._engine.deactivate(self._state, [index])
            self.telemetry.finish(self._slots[index].progress, "stop")
            self._release(index)
        elif sample in ticket.waiting:
            self.telemetry.end("stop")
            self._waiting.leave_out(ticket, sample)
            if not ticket.waiting:
                self._prefilled.forget(number)
            with self._lock:
                self._waiting_samples -= 1
        else:
            return
        self._hand_out({number: [no_more(sample)]})

    def _expire(self) -> None:
        """Ends the requests whose time is over."""
        if not self._deadlines:
            return
        now = self._clock()
        with self._lock:
            late = [self._tickets[number] for number, deadline in self._deadlines.items() if deadline <= now]
        for ticket in late:
            error = too_late(ticket)
            self._drop(ticket.number, "deadline")
            ticket.on_error(error)

    def _cancel(self, number: int) -> None:
        self._drop(number, "cancelled")

    def _drop(self, number: int, reason: str) -> None:
        """Forgets a request; `reason` is what its samples are counted under."""
        with self._lock:
            self._deadlines.pop(number, None)
            ticket = self._tickets.pop(number, None)
            if ticket is None:
                return
            self._waiting_samples -= len(ticket.waiting)
        self.telemetry.end(reason, len(ticket.waiting) + len(ticket.running))
        self._waiting.drop(ticket)
        self._prefilled.forget(number)
        self._state = self._engine.deactivate(self._state, sorted(ticket.running))
        for index in list(ticket.running):
            self._release(index)

    def _update(self, load: Load, version: int, on_update: OnUpdate, future: Future[float]) -> None:
        if on_update != "drain":
            self._swap(load, version, future, recompute=on_update == "recompute")
            return
        earlier = self._draining

        def swap() -> None:
            if earlier is not None:
                earlier()
            self._swap(load, version, future, recompute=False)

        self._draining = swap

    def _swap(self, load: Load, version: int, future: Future[float], *, recompute: bool) -> None:
        if version <= self._version:  # another update was faster
            self._forget(future)
            future.set_exception(
                ValueError(f"version {version} is not newer than version {self._version}, which is held")
            )
            return
        self._prefilled.clear()
        self._hand_out(self._collect())  # what the device still does under the old weights is no part of the stall
        began = self._clock()
        self._take(load, version)
        taken, known = self._clock(), self._counts["recomputed_tokens"]
        if recompute:
            self._recompute()
        ended = self._clock()
        stall = ended - began
        recomputed = int(self._counts["recomputed_tokens"] - known)
        self.activity.swapped(Swap(version, ended, stall, ended - taken, recomputed))
        self._counts["swaps"] += 1
        self._counts["swap_stall_s"] += stall
        self.telemetry.swap_stall_s.add(stall)
        self._forget(future)
        future.set_result(stall)

    def _take(self, load: Load, version: int) -> None:
        """Lets the old weights go, and only then loads the new ones. RuntimeError where that fails."""
        del self._weights
        try:
            self._weights = load()
        except Exception as error:
            raise RuntimeError(
                f"the weights of version {version} could not be placed on the device, and those of version "
                f"{self._version} were freed before, as generation.double_buffer=False says; this server has no "
                "weights any more and ends. Start it again, or set generation.double_buffer=True"
            ) from error
        self._version = version

    def _forget(self, future: Future[float]) -> None:
        with self._lock:
            self._updates.discard(future)

    def _recompute(self) -> None:
        """Rebuilds the cache of every running slot, neighbours in length together so that little is padding."""
        running = list(self._slots)
        lengths = [self._slots[index].length for index in running]
        for group in self._engine.shapes.groups(lengths):
            slots, of_slots = ([each[place] for place in group] for each in (running, lengths))
            self._state = self._engine.recompute(self._weights, self._state, slots, of_slots)
        self._counts["recomputed_tokens"] += sum(lengths)
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
            self.telemetry.end("failed", len(ticket.waiting) + len(ticket.running))
            ticket.on_error(error)
        for update in updates:
            update.set_exception(RuntimeError(f"the new weights were not swapped in: {error!r}"))

    # Checks, on the caller's thread.

    def _check_samples(self, request: GenerateRequest) -> None:
        if len(request.samples) > self._max_waiting:
            raise ValueError(
                f"prompt {request.uid} asks for {len(request.samples)} samples, of which generation.max_waiting="
                f"{self._max_waiting} may wait at most; ask for fewer at a time"
            )

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise RuntimeError("the generation engine has ended and serves no more requests") from self.failure

    def _check_version(self, version: int) -> None:
        if version <= self._version:
            raise ValueError(f"version {version} is not newer than version {self._version}, which is held")
