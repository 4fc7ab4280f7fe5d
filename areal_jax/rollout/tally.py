"""What became of the rollouts: counts for rollout.jsonl, and the ways in which a run has nothing left to train on.

In: one call per group. Out: totals, or the RuntimeError that ends the run. Called by the rollout controller alone.
Waits for nobody; it owns no clock.
"""

import collections
import logging
from collections.abc import Sequence, Set
from typing import Any

from areal_jax.rollout.workflow import Judged, RolloutFailed

log = logging.getLogger(__name__)


class Tally:
    """Counts trajectories (not groups) since the controller started.

    `max_failures` failed groups in a row, or `max_filtered` groups in a row that were left out because their rewards
    are all equal (or failed), end the run with an error instead of letting the trainer wait for ever. In a row means
    by the order in which they were started: failures come back at once and good groups take their time, so that among
    those that end one after the other there are always many failures. Prompts that are too long count in neither row
    and do not interrupt it; `max_too_long` of them in a row end the run too.
    """

    def __init__(self, *, group_size: int, max_failures: int, max_filtered: int, max_too_long: int) -> None:
        self.in_flight = 0
        self._group_size = group_size
        self._max_failures = max_failures
        self._max_filtered = max_filtered
        self._max_too_long = max_too_long
        self._started = self._finished = self._right = self._filtered = 0
        self._verdict_sum = 0.0
        self._failed: collections.Counter[str] = collections.Counter()
        self._failed_groups: set[int] = set()  # by number in the order of starting
        self._unusable_groups: set[int] = set()  # failed or filtered
        self._too_long_groups: set[int] = set()

    def start(self) -> int:
        """The number of the group that starts, 0, 1, 2, ..."""
        self._started += self._group_size
        self.in_flight += self._group_size
        return self._started // self._group_size - 1

    def end(self) -> None:
        """A group has reached the queue, or has been discarded there."""
        self.in_flight -= self._group_size

    def finish(self, group: Sequence[Judged]) -> None:
        """A whole group was judged, whether it then trains or is filtered."""
        self._finished += len(group)
        self._right += sum(judged.right for judged in group)
        self._verdict_sum += sum(judged.verdict for judged in group)

    def fail(self, number: int, failure: RolloutFailed) -> None:
        """Raises RuntimeError when too many failed in a row."""
        log.warning("%s", failure)
        self._failed[failure.cause] += self._group_size
        self._failed_groups.add(number)
        self._unusable_groups.add(number)
        in_a_row = _in_a_row(number, self._failed_groups, passing=self._too_long_groups)
        if in_a_row >= self._max_failures:
            raise RuntimeError(
                f"{in_a_row} prompts in a row failed (rollout.max_consecutive_failures={self._max_failures}); "
                f"trajectories failed so far, by cause: {dict(self._failed)}; the last: {failure}. Mend the cause, or "
                "raise the limit if so many are expected"
            ) from failure

    def skip(self, number: int, failure: RolloutFailed) -> None:
        """A prompt was too long to be asked. Raises RuntimeError when so many in a row were that the run only waits."""
        if not self._too_long_groups:
            log.warning("%s; skipped.jsonl has its number, and will have those of others", failure)
        self._failed[failure.cause] += self._group_size
        self._too_long_groups.add(number)
        in_a_row = _in_a_row(number, self._too_long_groups, passing=frozenset())
        if in_a_row >= self._max_too_long:
            raise RuntimeError(
                f"{in_a_row} prompts in a row were too long and left out, so there is nothing to train on; the last: "
                f"{failure}"
            ) from failure

    def filter(self, number: int) -> None:
        """Raises RuntimeError when so many in a row were left out that the run only waits."""
        self._filtered += self._group_size
        self._unusable_groups.add(number)
        in_a_row = _in_a_row(number, self._unusable_groups, passing=self._too_long_groups)
        if in_a_row >= self._max_filtered:
            raise RuntimeError(
                f"{in_a_row} prompts in a row were left out, since the rewards of each group were equal "
                f"(rollout.drop_zero_variance=True), so there is nothing to train on; {self._right} of "
                f"{self._finished} finished trajectories were right, {self._failed.total()} failed. Choose prompts "
                "that are neither too hard nor too easy, a larger rollout.group_size, or drop_zero_variance=False"
            )

    def line(self) -> dict[str, Any]:
        """Totals; the failed count as not right in `right_of_settled`, and not at all in `right_of_finished`."""
        settled = self._finished + self._failed.total()
        return {
            "started": self._started,
            "finished": self._finished,
            "failed": dict(self._failed),
            "filtered": self._filtered,
            "right": self._right,
            "in_flight": self.in_flight,
            "verdict_mean": self._verdict_sum / self._finished if self._finished else None,
            "right_of_finished": self._right / self._finished if self._finished else None,
            "right_of_settled": self._right / settled if settled else None,
        }


def _in_a_row(number: int, members: Set[int], *, passing: Set[int]) -> int:
    """How many members there are around `number` with none but `passing` ones between them."""
    first = last = number
    while first - 1 in members or first - 1 in passing:
        first -= 1
    while last + 1 in members or last + 1 in passing:
        last += 1
    return sum(each in members for each in range(first, last + 1))
