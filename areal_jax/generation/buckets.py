"""The shapes that programs are compiled for, and which sequences share one prefill.

In: lengths in tokens. Out: buckets, rows, groups. Pure arithmetic; called by the engine and the scheduler, and by the
plan of a run's memory.
"""

import dataclasses
import math
from collections.abc import Sequence

HELD = 2  # of the largest prefills, whose rows may wait for slots


def default_buckets(max_length: int) -> tuple[int, ...]:
    """Powers of two from 32 on, and the limit itself.

    Buckets halfway between them (48, 96, 192, ...) would spare a recompute of log-normal lengths 15 to 17 % of the
    tokens that it computes, and double the programs to compile (tests/generation/test_buckets.py has both); who swaps
    often gives them as `generation.length_buckets`.
    """
    powers = [2**n for n in range(5, max_length.bit_length() + 1) if 2**n < max_length]
    return (*powers, max_length)


def default_slot_buckets(slots: int, platform: str) -> tuple[int, ...]:
    """All slots, and on a CPU a quarter of them as well, for the time in which only the longest answers still run.

    There a step of 8 slots takes half the time of one of 32; fewer than 8 rows XLA multiplies in another order. An
    accelerator reads the weights in either case, which is what its step costs, and the narrow step holds a copy of its
    slots' cache.
    """
    return (slots // 4, slots) if platform == "cpu" and slots >= 32 else (slots,)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillShapes:
    """Rows and lengths of the prefills that are compiled: two shapes per bucket, one row and many rows.

    A prefill has at most `most_rows` rows and `most_tokens` tokens, and at least one row, also where that one exceeds
    the tokens. What does not fill many rows of one length goes row by row: a row that nobody needs costs as much as one
    that somebody does.
    """

    buckets: tuple[int, ...]  # rising
    most_rows: int
    most_tokens: int

    def bucket(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens."""
        return next(bucket for bucket in self.buckets if bucket >= length)

    def most(self, bucket: int) -> int:
        """Rows of the larger prefill of a bucket."""
        return max(1, min(self.most_rows, self.most_tokens // bucket))

    @property
    def most_waiting(self) -> int:
        """Tokens, padding too, of prefilled rows that may wait for slots: one prefill per bucket where these double."""
        return HELD * max(self.most(bucket) * bucket for bucket in self.buckets)

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Rows and tokens per row of the compiled prefill that holds rows of these lengths."""
        bucket = self.bucket(max(lengths))
        return (1 if len(lengths) == 1 else self.most(bucket)), bucket

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of `lengths` in groups that share a prefill, longest first; together only where it computes less."""
        order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
        groups = []
        while order:
            rows = self.most(self.bucket(lengths[order[0]]))
            together = [lengths[index] for index in order[:rows]]
            if sum(map(self.bucket, together)) < math.prod(self.shape(together)):
                rows = 1
            groups.append(order[:rows])
            order = order[rows:]
        return groups

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that prefills of these sequences compute, padding in rows and of rows included."""
        return sum(math.prod(self.shape([lengths[index] for index in group])) for group in self.groups(lengths))
