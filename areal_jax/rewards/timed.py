"""When the reward workers had something to judge, for the timeline of a run.

In: a scorer. Out: the same, which knows its times. Called by the rollout controller, from one event loop; waits for
what it wraps.
"""

import time
from collections.abc import Sequence
from typing import Any

AT_ONCE_S = 0.01  # between two times of judging that are told as one


class TimedScorer:
    """A scorer of which is seen when it had something to judge."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer
        self._groups, self._since = 0, 0.0
        self._spans: list[tuple[float, float]] = []

    async def score(self, completions: Sequence[str], *, answer: str, prompt: str) -> list[float]:
        self._note(1)
        try:
            return await self._scorer.score(completions, answer=answer, prompt=prompt)
        finally:
            self._note(-1)

    def take(self) -> list[tuple[float, float]]:
        """[begin, end] of each such time since the last call, in seconds since 1970; what goes on is cut here."""
        self._note(0)
        spans, self._spans = self._spans, []
        return spans

    def _note(self, more: int) -> None:
        now = time.time()
        if self._groups:
            # What follows at once goes on: else there would be as many of them as groups.
            at_once = bool(self._spans) and self._since - self._spans[-1][1] < AT_ONCE_S
            begin = self._spans.pop()[0] if at_once else self._since
            self._spans.append((begin, now))
        self._groups, self._since = self._groups + more, now
