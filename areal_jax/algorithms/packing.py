"""Packing: trajectories of different lengths into microbatches of few static shapes, without losing tokens to padding.

In: the trajectories of one minibatch with their advantages (numpy). Out: `TrainBatch`es [R, L], all of one shape out of
`Layout.shapes`, each one forward-backward of the trainer. Called by the trainer's loop before anything is on a device.

A row holds several sequences one after the other, told apart by segment ids. Sequences go to rows by the paper's
Algorithm 1 (`allocate`) with the row's length as budget; rows go to microbatches in order, as many as the token budget
allows, and the last microbatch is filled up with empty rows.

Shapes: B trajectories, R packed rows, L tokens of a row, T completion tokens of a trajectory.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.types import PROMPT_VERSION, TrainBatch, Trajectory

MOST_BUCKETS = 4  # default row lengths: a power of two and its halves; each costs one compilation of every program
SHORTEST_BUCKET = 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static shapes of microbatches. Make it with `make_layout`, which checks it.

    `lengths` rises; `token_budget` is the most tokens of a microbatch over all its rows; `shards` is the number of
    shards that rows are split over (mesh axes data x fsdp).
    """

    lengths: tuple[int, ...]
    token_budget: int
    shards: int = 1

    def rows(self, length: int) -> int:
        """Rows of a microbatch: what the budget allows, rounded down to a multiple of the shards."""
        return self.token_budget // length // self.shards * self.shards

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All shapes [R, L] that a microbatch can have."""
        return [(self.rows(length), length) for length in self.lengths]


def make_layout(
    row_buckets: Sequence[int],
    *,
    max_length: int,
    token_budget: int,
    shards: int = 1,
    comes_from: str = "data.max_prompt_tokens + rollout.max_new_tokens",
) -> Layout:
    """The row lengths to compile for: `row_buckets`, or powers of two up to the one that holds `max_length`.

    `comes_from` names the settings behind `max_length`, for the errors.

    Raises ValueError when the budget does not hold one row of the longest sequence per shard, or when the given buckets
    do not hold the longest sequence or exceed the budget.
    """
    most = token_budget // shards
    if most < max_length:
        each = f" for each of the {shards} shards of rows (mesh axes data x fsdp)" if shards > 1 else ""
        raise ValueError(
            f"trainer.token_budget={token_budget} must hold the longest possible sequence, {max_length} tokens "
            f"({comes_from}){each}; set it to at least {max_length * shards}"
        )
    if not row_buckets:
        longest = 1 << (max_length - 1).bit_length()
        halves = [longest >> i for i in range(MOST_BUCKETS) if longest >> i >= SHORTEST_BUCKET]
        row_buckets = [min(length, most) for length in halves[::-1] or [longest]]
    lengths = tuple(row_buckets)
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 1 or not max_length <= lengths[-1] <= most:
        raise ValueError(
            f"trainer.row_buckets={lengths} must rise, and the last one must be between the longest possible sequence "
            f"({max_length} tokens) and the token budget per shard of rows ({most}); leave it empty for powers of two"
        )
    return Layout(lengths, token_budget, shards)


def allocate(lengths: Sequence[int], capacity: int, *, min_bins: int = 1) -> list[list[int]]:
    """Algorithm 1 of AReaL (arXiv 2505.24298): indices of sequences by bin, no bin holding more than `capacity` tokens.

    Longest first, a sequence opens a new bin while there are fewer than `min_bins` or none can hold it; else it goes to
    the bin with the fewest sequences among those that can hold it (the earliest of equals).
    Raises ValueError when a sequence is longer than the capacity.
    """
    lengths_B = np.asarray(lengths, np.int64)
    if len(lengths_B) and lengths_B.max() > capacity:
        raise ValueError(
            f"a sequence of {lengths_B.max()} tokens does not fit into a row of {capacity}; the longest row comes from "
            "data.max_prompt_tokens + rollout.max_new_tokens, or from trainer.row_buckets"
        )
    bins: list[list[int]] = []
    free = np.full(len(lengths_B), capacity, np.int64)
    members = np.zeros(len(lengths_B), np.int64)
    for index in np.argsort(-lengths_B, kind="stable"):
        fits = np.flatnonzero(free[: len(bins)] >= lengths_B[index])
        if len(bins) < min_bins or not len(fits):
            chosen = len(bins)
            bins.append([])
        else:
            chosen = int(fits[np.argmin(members[fits])])
        bins[chosen].append(int(index))
        free[chosen] -= lengths_B[index]
        members[chosen] += 1
    return bins


def choose_rows(lengths: Sequence[int], layout: Layout) -> tuple[int, list[list[int]]]:
    """The row length that computes the fewest tokens, empty rows included (the shorter of equals), and its rows."""
    longest = max(lengths)
    candidates = [length for length in layout.lengths if length >= longest] or [layout.lengths[-1]]
    plans = [(length, allocate(lengths, length)) for length in candidates]
    return min(plans, key=lambda plan: -(-len(plan[1]) // layout.rows(plan[0])) * layout.rows(plan[0]) * plan[0])


def split_minibatches(trajectories: Sequence[Trajectory], minibatches: int) -> list[np.ndarray]:
    """Indices of each minibatch: dealt out longest first, so that all hold about the same number of tokens."""
    order_B = np.argsort([-len(t) for t in trajectories], kind="stable")
    return [order_B[i::minibatches] for i in range(minibatches)]


def pack(
    trajectories: Sequence[Trajectory],
    advantages_B: np.ndarray,
    layout: Layout,
    *,
    version: int,
    max_staleness: int,
) -> list[TrainBatch]:
    """The microbatches of one minibatch, all of the same shape [R, L]; none for no trajectories.

    `version` is the consuming one: overdue completion tokens (version - their version > max_staleness) get loss mask 0,
    the others of the trajectory train. The order of sequences, rows and microbatches changes no loss, as sums are
    divided by the loss tokens of the whole minibatch (`loss_tokens`).
    """
    assert len(trajectories) == len(advantages_B)
    if not trajectories:
        return []
    length, bins = choose_rows([len(t) for t in trajectories], layout)
    rows = layout.rows(length)
    batches = []
    for start in range(0, len(bins), rows):
        batch = empty_batch(rows, length)
        for r, row in enumerate(bins[start : start + rows]):
            end = 0
            for segment, i in enumerate(row, start=1):
                span = slice(end, end + len(trajectories[i]))
                _write(batch, r, span, segment, trajectories[i], advantages_B[i], version - max_staleness)
                end = span.stop
        batches.append(batch)
    return batches


def _write(batch: TrainBatch, r: int, span: slice, segment: int, t: Trajectory, advantage: float, oldest: int) -> None:
    """Puts one trajectory into row r; tokens of versions before `oldest` do not train."""
    assert len(t.prompt_tokens) > 0, f"prompt {t.uid} has no token: its first completion token would have no context"
    completion = slice(span.start + len(t.prompt_tokens), span.stop)
    batch.tokens[r, span] = np.concatenate([t.prompt_tokens, t.tokens])
    batch.positions[r, span] = np.arange(len(t))
    batch.segment_ids[r, span] = segment
    batch.loss_mask[r, completion] = t.versions >= oldest
    batch.behav_logprobs[r, completion] = t.behav_logprobs
    batch.advantages[r, completion] = advantage
    batch.versions[r, completion] = t.versions


def empty_batch(rows: int, length: int) -> TrainBatch:
    """Padding only: the shape that programs are compiled with, and what `pack` writes into."""
    shape = (rows, length)
    return TrainBatch(
        rows=rows,
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.float32),
        behav_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        versions=np.full(shape, PROMPT_VERSION, np.int32),
    )


def loss_tokens(batches: Sequence[TrainBatch]) -> int:
    """Tokens that train, over all microbatches of a minibatch: what its loss is divided by."""
    return sum(int(np.count_nonzero(batch.loss_mask)) for batch in batches)


def padding_share(batches: Sequence[TrainBatch]) -> float:
    """Share of computed tokens that belong to no sequence."""
    real = sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches)
    computed = sum(batch.segment_ids.size for batch in batches)
    return 1.0 - real / computed if computed else 0.0
