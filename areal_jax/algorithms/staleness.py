"""Staleness: the paper's gate inequality, and how old the tokens of a batch are.

In: counts and versions, integers and numpy arrays. Out: booleans and figures. Called by the rollout controller's gate
(before a request) and by the trainer (when a batch is consumed). Waits for nobody.

Staleness is the consuming version minus the version of the weights that sampled a token. Shapes: T completion tokens.
"""

from collections.abc import Sequence

import numpy as np


def gate_is_open(request: int, *, batch_size: int, version: int, max_staleness: int) -> bool:
    """Whether trajectory number `request` may be started: floor((n - 1) / B) <= i + eta.

    n counts from 1 and includes everything generated, waiting or in flight, and the request itself; B is in
    trajectories, i is the current version, eta the most staleness allowed. eta = 0 is synchronous: one batch per
    version. The inequality bounds how many are started, not how old each one becomes; consumption checks that again.
    Source: AReaL, arXiv 2505.24298, section 5.1.
    """
    assert request >= 1 and batch_size >= 1
    return (request - 1) // batch_size <= version + max_staleness


def token_staleness(versions_T: np.ndarray, *, version: int) -> np.ndarray:
    """Staleness of each token, [T] int32, when `version` consumes it. Prompt tokens (version -1) do not belong here."""
    assert versions_T.size == 0 or versions_T.min() >= 0, "a prompt token has no staleness"
    return (version - versions_T).astype(np.int32)


def staleness_figures(versions: Sequence[np.ndarray], *, version: int) -> dict[str, float | int | list[int]]:
    """Mean, min, max and histogram (index = staleness) over the completion tokens of trajectories [T] each.

    Raises ValueError for a token of a later version than the consuming one: then something mixed up two runs.
    """
    staleness_T = token_staleness(np.concatenate(list(versions)), version=version)
    if staleness_T.min() < 0:
        raise ValueError(
            f"a token of version {version - int(staleness_T.min())} reached the trainer at version {version}; "
            "a generation server or a queue of a later run feeds this one: stop it, or give each run its own ports"
        )
    return {
        "mean": float(staleness_T.mean()),
        "min": int(staleness_T.min()),
        "max": int(staleness_T.max()),
        "histogram": np.bincount(staleness_T).tolist(),
    }
