"""What a generation server's requests go through, as numbers for whoever watches it, and what it did when.

In: events of the scheduler, most of them on the engine's thread. Out: counts, histograms and a rate that any thread
reads, which `transport.prometheus` shows; waits and weight swaps with their times, for the run's log. Waits for nobody.
"""

import bisect
import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PER_TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STALL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RATE_S = 10  # that tokens per second are over
ENDED = ("stop", "length", "cancelled", "deadline", "failed")
REFUSED = ("busy", "invalid")
SHORT_WAIT_S = 0.01  # shorter waits for work are not noted: a busy server has thousands of them
MOST_NOTED = 4096  # waits, and swaps, that are kept for whoever takes them; older ones are forgotten


class Histogram:
    """How many values were at most each of `bounds` (the last bucket has no bound), and their sum. One thread adds."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Values at most each bound, and all of them last."""
        return list(itertools.accumulate(list(self._counts)))


class Rate:
    """Events per second over the last `RATE_S` whole seconds, in bins of a second each. One thread adds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._bins = [(-1, 0)] * (RATE_S + 2)  # (second, events)

    def add(self, events: int) -> None:
        now = int(self._clock())
        at = now % len(self._bins)
        second, before = self._bins[at]
        self._bins[at] = (now, events + (before if second == now else 0))

    def per_second(self) -> float:
        now = int(self._clock())
        return sum(events for second, events in list(self._bins) if now - RATE_S <= second < now) / RATE_S


@dataclasses.dataclass(slots=True)
class Progress:
    """How far one sample is: when it was asked for, and how its tokens have come since."""

    asked: float
    first: float = 0.0  # when its first tokens came
    first_tokens: int = 0  # how many those were: all of one dispatch come together
    tokens: int = 0


class Telemetry:
    """The numbers of one scheduler. `slots`, `cache_bytes` and `weight_bytes` are sizes that do not change.

    `requests` counts those that were accepted, `ended` their samples by reason (`ENDED`), `refused` requests by reason
    (`REFUSED`).
    """

    def __init__(self, *, clock: Callable[[], float], slots: int, cache_bytes: int, weight_bytes: int):
        self.slots, self.cache_bytes, self.weight_bytes = slots, cache_bytes, weight_bytes
        self.requests = 0
        self.prompt_tokens = 0
        self.ended = dict.fromkeys(ENDED, 0)
        self.refused = dict.fromkeys(REFUSED, 0)
        self.time_to_first_token_s = Histogram(FIRST_TOKEN_S)
        self.time_per_token_s = Histogram(PER_TOKEN_S)
        self.swap_stall_s = Histogram(STALL_S)
        self.tokens = Rate(clock)
        self._clock = clock
        self._lock = threading.Lock()  # of what several threads count

    def accept(self, prompt_tokens: int) -> float:
        """A request came in; returns when, which is what its samples' progress is counted from."""
        with self._lock:
            self.requests += 1
            self.prompt_tokens += prompt_tokens
        return self._clock()

    def refuse(self, reason: str) -> None:
        with self._lock:
            self.refused[reason] += 1

    def end(self, reason: str, samples: int = 1) -> None:
        with self._lock:
            self.ended[reason] += samples

    def advance(self, progress: Progress, tokens: int) -> None:
        """A sample got tokens."""
        self.tokens.add(tokens)
        progress.tokens += tokens
        if not progress.first_tokens:
            progress.first, progress.first_tokens = self._clock(), tokens
            self.time_to_first_token_s.add(progress.first - progress.asked)

    def finish(self, progress: Progress, reason: str) -> None:
        """A sample has all its tokens; those after the first dispatch say how long one takes."""
        self.end(reason)
        later = progress.tokens - progress.first_tokens
        if later:
            self.time_per_token_s.add((self._clock() - progress.first) / later)


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """New weights at a dispatch boundary: decoding stood still for `stall_s`, until `ended`.

    The last `recompute_s` of these rebuilt the caches of the running slots, which held `recomputed_tokens`.
    """

    version: int
    ended: float
    stall_s: float
    recompute_s: float
    recomputed_tokens: int


class Activity:
    """When a generation server waited for work, and when it swapped weights; the rest of the time it generates.

    The engine's thread notes it, another one takes it. Times are on `clock`, in seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST_NOTED)
        self._swaps: collections.deque[Swap] = collections.deque(maxlen=MOST_NOTED)
        self._waiting_since: float | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for work."""
        with self._lock:
            self._waiting_since = self._clock()
        yield
        with self._lock:
            self._note_wait()
            self._waiting_since = None

    def swapped(self, swap: Swap) -> None:
        with self._lock:
            self._swaps.append(swap)

    def take(self) -> tuple[list[tuple[float, float]], list[Swap]]:
        """The waits (begin, end) and swaps since the last call; a wait that goes on is cut in two here."""
        with self._lock:
            self._note_wait()
            waits, swaps = list(self._waits), list(self._swaps)
            self._waits.clear()
            self._swaps.clear()
        return waits, swaps

    def _note_wait(self) -> None:
        now = self._clock()
        if self._waiting_since is not None and now - self._waiting_since >= SHORT_WAIT_S:
            self._waits.append((self._waiting_since, now))
            self._waiting_since = now
