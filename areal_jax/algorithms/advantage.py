"""Advantages: one number per trajectory, from the rewards of the whole batch.

In: rewards and prompt uids of one training batch (numpy). Out: advantages, which packing spreads over the completion
tokens of each trajectory: with no critic and gamma = lambda = 1 every token of a trajectory has the same one.
Called by the trainer's loop once per step, before packing.

Weighting: every trajectory counts once, however long it is, so the baseline is the mean reward and not the mean over
tokens (under which long answers would set it). Trajectories whose tokens will all be masked as overdue count too: their
rewards are still samples of the same prompts.

Shapes: B trajectories.
"""

import collections
from typing import Literal

import numpy as np

STD_EPS = 1e-6  # added to the standard deviation; rewards are of order 1, so it is felt only where they are all equal


def trajectory_advantages(
    rewards_B: np.ndarray,
    uids_B: np.ndarray,
    *,
    group_size: int,
    normalize: Literal["batch", "group", "none"],
    std: Literal["population", "sample", "none"],
    group_baseline: bool,
) -> np.ndarray:
    """Normalised rewards [B], float32.

        A = (r - mean(r)) / (std(r) + STD_EPS), over the batch or within each group

    `group_baseline` first subtracts the group's mean reward. `std` divides squared deviations by n ("population") or
    n - 1 ("sample"), or is left out ("none"). A group (or batch) of equal rewards gets zeros, to the bit: by that they
    are known to have no gradient.

    Raises ValueError when a group does not have `group_size` members: a partial group has the wrong mean.
    """
    assert rewards_B.shape == uids_B.shape and rewards_B.ndim == 1
    _check_whole_groups(uids_B, group_size)
    advantages_B = rewards_B.astype(np.float64)
    groups, whole = [np.flatnonzero(uids_B == uid) for uid in np.unique(uids_B)], [np.arange(len(rewards_B))]
    if group_baseline:
        for group in groups:
            advantages_B[group] -= advantages_B[group].mean()
    if normalize != "none":
        for part in groups if normalize == "group" else whole:
            advantages_B[part] = _standardize(advantages_B[part], std)
    if group_baseline or normalize != "none":
        for part in groups if group_baseline or normalize == "group" else whole:
            if len(part) and np.ptp(rewards_B[part]) == 0:
                advantages_B[part] = 0.0  # means are rounded
    return advantages_B.astype(np.float32)


def _standardize(values: np.ndarray, std: str) -> np.ndarray:
    centred = values - values.mean()
    if std == "none":
        return centred
    degrees = max(1, len(values) - (std == "sample"))
    return centred / (np.sqrt(np.sum(centred**2) / degrees) + STD_EPS)


def _check_whole_groups(uids_B: np.ndarray, group_size: int) -> None:
    for uid, members in collections.Counter(uids_B.tolist()).items():
        if members != group_size:
            raise ValueError(
                f"prompt {uid} has {members} trajectories in this batch, but rollout.group_size={group_size}: groups "
                "are normalised whole or not at all; put whole groups into the queue, discard one that lost a member"
            )
