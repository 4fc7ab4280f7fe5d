"""The shapes that programs are compiled for, and which sequences share one prefill.

In: lengths in tokens. Out: buckets, rows, groups. Pure arithmetic; called by the engine and the scheduler, and by the
plan of a run's memory.
"""

import dataclasses
from collections.abc import Sequence


def default_buckets(max_length: int) -> tuple[int, ...]:
    """Powers of two from 32 on, and the limit itself.

    Buckets halfway between them (48, 96, 192, ...) would spare a recompute of log-normal lengths 12 to 17 % of the
    tokens that it computes, and double the programs to compile (tests/generation/test_buckets.py has both); who swaps
    often gives them as `generation.length_buckets`.
    """
    powers = [2**n for n in range(5, max_length.bit_length() + 1) if 2**n < max_length]
    return (*powers, max_length)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillShapes:
    """Rows and lengths of the prefills that are compiled: one shape per bucket, of at most `most_tokens` tokens.

    A prefill has at most `most_rows` rows, and at least one, also where that one row exceeds the tokens.
    """

    buckets: tuple[int, ...]  # rising
    most_rows: int
    most_tokens: int

    def bucket(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens."""
        return next(bucket for bucket in self.buckets if bucket >= length)

    def rows(self, length: int) -> int:
        """Rows of the prefill whose longest row has `length` tokens."""
        return max(1, min(self.most_rows, self.most_tokens // self.bucket(length)))

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of `lengths` in groups that share a prefill, longest first, so that the rows left over are short."""
        order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
        groups = []
        while order:
            rows = self.rows(lengths[order[0]])
            groups.append(order[:rows])
            order = order[rows:]
        return groups

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that prefills of these sequences compute, padding in rows and of rows included."""
        longest = [max(lengths[index] for index in group) for group in self.groups(lengths)]
        return sum(self.rows(length) * self.bucket(length) for length in longest)
