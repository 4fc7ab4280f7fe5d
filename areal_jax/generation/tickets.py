"""What the scheduler knows of its requests: who waits, who holds a slot, what a dispatch made for whom.

In: requests, decoded tokens. Out: admissions, chunks. Records and their bookkeeping, without a clock, a device or a
thread; all of it is used on the engine's thread.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from areal_jax.generation.engine import Decoded, Requests
from areal_jax.generation.stop_strings import StopStrings
from areal_jax.telemetry import Progress
from areal_jax.types import Chunk, GenerateRequest

OnChunks = Callable[[list[Chunk]], None]
OnError = Callable[[Exception], None]


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

    def tokens(self, sample: int) -> np.ndarray:
        """What is known of a sample before it is admitted."""
        prompt_tokens, partial = self.request.prompt_tokens, self.request.partial.get(sample)
        return prompt_tokens if partial is None else np.concatenate([prompt_tokens, partial.tokens])


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
    """Samples that start together from the same tokens."""

    ticket: Ticket
    samples: list[int]
    tokens: np.ndarray


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

    def take(self, free: int) -> list[Admission]:
        """The next samples, at most `free`; those of a prompt together, and one that goes on in a row of its own."""
        admissions = []
        while free and self:
            lane = self._evaluation or self._rollout
            ticket = lane[0]
            fresh = [sample for sample in ticket.waiting if sample not in ticket.request.partial]
            samples = (fresh or ticket.waiting[:1])[:free]
            admissions.append(Admission(ticket, samples, ticket.tokens(samples[0])))
            free -= len(samples)
            ticket.waiting = [sample for sample in ticket.waiting if sample not in samples]
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
    versions = np.full(len(tokens), version, np.int32)
    return Chunk(slot.sample, tokens, np.asarray(decoded.logprobs[index, : len(tokens)]), versions, reason)


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
