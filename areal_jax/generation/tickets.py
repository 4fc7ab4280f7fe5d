"""What the scheduler knows of its requests: who waits, who holds a slot, what a dispatch made for whom.

In: requests, decoded tokens. Out: admissions, chunks. Records and their bookkeeping, without a clock, a device or a
thread; all of it is used on the engine's thread.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterator

import numpy as np

from areal_jax.generation.engine import Decoded, Requests
from areal_jax.generation.stop_strings import StopStrings
from areal_jax.telemetry import Progress
from areal_jax.types import Alternatives, Chunk, GenerateRequest

OnChunks = Callable[[list[Chunk]], None]
OnError = Callable[[Exception], None]
RowKey = tuple[int, int | None]  # a ticket's number, and which sample goes on; None: those that start from the prompt


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way: samples not yet admitted, slots it holds."""

    number: int
    request: GenerateRequest
    on_chunks: OnChunks
    on_error: OnError
    waiting: list[int]  # sample indices without a slot yet
    asked: float  # on the scheduler's clock
    running: set[int] = dataclasses.field(default_factory=set)  # slots
    made: int = 0  # tokens handed out

    @property
    def limit(self) -> int:
        """The length at which its sequences end."""
        return len(self.request.prompt_tokens) + self.request.sampling.max_new_tokens

    @property
    def rows(self) -> "Iterator[Admission]":
        """Its waiting samples by the tokens that they start from: those of the prompt, then each that goes on."""
        fresh = [sample for sample in self.waiting if sample not in self.request.partial]
        if fresh:
            yield Admission(self, fresh)
        yield from (Admission(self, [sample]) for sample in self.waiting if sample in self.request.partial)


@dataclasses.dataclass(slots=True)
class Slot:
    """A sample that runs."""

    ticket: Ticket
    sample: int
    length: int  # known tokens, without those of a dispatch that is not harvested
    limit: int
    progress: Progress
    stop_strings: StopStrings | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Samples that start from the same tokens: a row of a prefill."""

    ticket: Ticket
    samples: list[int]

    @property
    def key(self) -> RowKey:
        sample = self.samples[0]
        return self.ticket.number, sample if sample in self.ticket.request.partial else None

    @property
    def tokens(self) -> np.ndarray:
        """What is known of the samples before they are admitted."""
        request, (_, sample) = self.ticket.request, self.key
        if sample is None:
            return request.prompt_tokens
        return np.concatenate([request.prompt_tokens, request.partial[sample].tokens])


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatch:
    """A decode that the device may still be working on, and who held the slots when it was sent."""

    decoded: Decoded
    version: int
    slots: dict[int, Slot]


class Waiting:
    """Tickets with samples that have no slot yet: evaluation before rollouts, in each lane first come, first served."""

    def __init__(self) -> None:
        self._evaluation: collections.deque[Ticket] = collections.deque()
        self._rollout: collections.deque[Ticket] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._evaluation or self._rollout)

    def put(self, ticket: Ticket) -> None:
        self._lane(ticket).append(ticket)

    def __iter__(self) -> Iterator[Admission]:
        """All of them, row by row, in the order in which they are admitted."""
        return (row for ticket in itertools.chain(self._evaluation, self._rollout) for row in ticket.rows)

    def take(self, free: int, ready: Container[RowKey]) -> list[Admission]:
        """The next samples, at most `free`, up to the first whose row is not `ready`."""
        admissions = []
        while free and self:
            lane = self._evaluation or self._rollout
            ticket = lane[0]
            row = next(ticket.rows)
            if row.key not in ready:
                break
            taken = Admission(ticket, row.samples[:free])
            admissions.append(taken)
            free -= len(taken.samples)
            ticket.waiting = [sample for sample in ticket.waiting if sample not in taken.samples]
            if not ticket.waiting:
                lane.popleft()
        return admissions

    def leave_out(self, ticket: Ticket, sample: int) -> None:
        """Forgets one sample."""
        ticket.waiting.remove(sample)
        if not ticket.waiting:
            self._lane(ticket).remove(ticket)

    def drop(self, ticket: Ticket) -> None:
        """Forgets all samples of a ticket, if any wait."""
        if ticket in self._lane(ticket):
            self._lane(ticket).remove(ticket)

    def _lane(self, ticket: Ticket) -> collections.deque[Ticket]:
        return self._evaluation if ticket.request.evaluation else self._rollout


def fill(requests: Requests, index: int, slot: Slot, row: int) -> None:
    """Writes what slot `index` is to do, from row `row` of a prefill."""
    request, sampling = slot.ticket.request, slot.ticket.request.sampling
    prompt_length = len(request.prompt_tokens)
    values = {
        "row": row,
        "length": slot.length,
        "prompt_length": prompt_length,
        "limit": slot.limit,
        "temperature": sampling.temperature,
        "min_length": prompt_length + sampling.min_new_tokens,
        "seed": sampling.seed % 2**32,
        "uid": request.uid % 2**32,
        "sample": slot.sample,
        "wants_alternatives": request.top_logprobs > 0,
    }
    for name, value in values.items():
        getattr(requests, name)[index] = value
    requests.truncation.top_k[index] = min(sampling.top_k, 2**31 - 1)
    requests.truncation.top_p[index], requests.truncation.min_p[index] = sampling.top_p, sampling.min_p
    requests.stop_tokens[index, : len(sampling.stop_tokens)] = sampling.stop_tokens


def chunk_of(slot: Slot, index: int, decoded: Decoded, version: int) -> Chunk:
    """What a dispatch made for the sample in a slot, up to where it ends."""
    tokens = np.asarray(decoded.tokens[index, : int(decoded.count[index])])
    kept = slot.stop_strings.kept(tokens.tolist()) if slot.stop_strings else None
    tokens = tokens[:kept]
    if kept is not None or (not decoded.active[index] and tokens[-1] in slot.ticket.request.sampling.stop_tokens):
        reason = "stop"
    else:
        reason = "" if decoded.active[index] else "length"
    logprobs = np.asarray(decoded.logprobs[index, : len(tokens)])
    versions, most = np.full(len(tokens), version, np.int32), slot.ticket.request.top_logprobs
    found = [np.asarray(each[index, : len(tokens), :most]) for each in decoded.alternatives]
    return Chunk(slot.sample, tokens, logprobs, versions, reason, Alternatives(*found) if most else None)


def no_more(sample: int) -> Chunk:
    """The end of a sample that is stopped from outside."""
    none = np.zeros(0, np.int32)
    return Chunk(sample, none, np.zeros(0, np.float32), none, "stop")


def too_late(ticket: Ticket) -> TimeoutError:
    """The error of a request whose time is over."""
    request, samples = ticket.request, len(ticket.request.samples)
    running, waiting = len(ticket.running), len(ticket.waiting)
    return TimeoutError(
        f"prompt {request.uid} was not finished within timeout_s={request.timeout_s:g}: {samples - running - waiting} "
        f"of {samples} samples are done, {running} run, {waiting} wait for a slot, {ticket.made} tokens are made; ask "
        "for fewer tokens or allow more time"
    )
