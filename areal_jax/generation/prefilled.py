"""Prefilled rows that wait for slots, so that a slot that becomes free is filled without a prefill.

In: who waits, the weights in use. Out: the rows to start slots from. Called by the scheduler, on the engine's thread:
while all slots decode it has who comes next prefilled, behind the dispatch on its way, together with others of a like
length that wait. All samples of a prompt start from one row, however few of them find a slot at a time. Rows live as
long as their samples wait and the weights stay.

Memory: `PrefillShapes.most_waiting` tokens. For more the oldest rows are forgotten, and prefilled again when they are
next.
"""

import itertools
import math
from collections.abc import Sequence

from areal_jax.generation.engine import Engine, PrefilledRows, Weights
from areal_jax.generation.tickets import Admission, RowKey, Waiting


class Prefilled:
    """The rows, by who waits for them."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._held: dict[RowKey, tuple[PrefilledRows, int]] = {}  # the oldest first

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def have_next(self, weights: Weights, waiting: Waiting) -> None:
        """Prefills, unless it is here, the row of who is next, and those that share a prefill with it."""
        if next(iter(waiting)).key in self._held:
            return
        shapes = self._engine.shapes
        several = itertools.islice(waiting, self._engine.options.slots)
        missing = {admission.key: admission.tokens for admission in several if admission.key not in self._held}
        keys, rows = list(missing), list(missing.values())
        group = next(group for group in shapes.groups([len(tokens) for tokens in rows]) if 0 in group)
        rows = [rows[place] for place in group]
        self._make_room(math.prod(shapes.shape([len(tokens) for tokens in rows])))
        prefilled = self._engine.prefill_rows(weights, rows)
        self._held.update({keys[place]: (prefilled, row) for row, place in enumerate(group)})

    def of(self, admissions: Sequence[Admission]) -> dict[PrefilledRows, list[tuple[Admission, int]]]:
        """The admissions by the prefill that holds their row, each with the place of that row."""
        by_prefill: dict[PrefilledRows, list[tuple[Admission, int]]] = {}
        for admission in admissions:
            prefilled, row = self._held[admission.key]
            by_prefill.setdefault(prefilled, []).append((admission, row))
        return by_prefill

    def forget(self, ticket: int) -> None:
        """Of a ticket that has no sample waiting."""
        for key in [key for key in self._held if key[0] == ticket]:
            del self._held[key]

    def clear(self) -> None:
        """The weights change."""
        self._held.clear()

    def _make_room(self, tokens: int) -> None:
        prefills = list(dict.fromkeys(prefilled for prefilled, _ in self._held.values()))
        while prefills and tokens + sum(each.tokens.size for each in prefills) > self._engine.shapes.most_waiting:
            gone = prefills.pop(0)
            self._held = {key: held for key, held in self._held.items() if held[0] is not gone}
