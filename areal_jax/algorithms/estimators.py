"""What papers report of an evaluation, as functions of arrays: avg@n, pass@k, maj@k and a standard error.

In: which samples of which problem are right, and their final answers. Out: one number between 0 and 1, the mean over
problems. Called by `rollout.evaluation`. Waits for nobody.

Shapes: P problems, N samples of each.
"""

from collections.abc import Sequence

import numpy as np


def average_at_n(right_PN: np.ndarray) -> float:
    """avg@n: the share of samples that are right, mean over problems.

    With n = 32 it is the "average pass@1 over 32 samples" of AReaL (arXiv 2505.24298) and DeepSeek-R1 (arXiv
    2501.12948).
    """
    return float(np.mean(np.mean(right_PN, axis=1)))


def standard_error(right_PN: np.ndarray) -> float:
    """The standard error of avg@n over a larger set of such problems: std(problem means, P - 1) / sqrt(P).

    Samples of one problem are alike, so the problem is what counts as independent (clustered standard errors, arXiv
    2411.00640). Raises ValueError for fewer than two problems, which say nothing of others.
    """
    if len(right_PN) < 2:
        raise ValueError(f"{len(right_PN)} problem has no standard error; it takes two or more")
    return float(np.std(np.mean(right_PN, axis=1), ddof=1) / np.sqrt(len(right_PN)))


def pass_at_k(right_PN: np.ndarray, k: int) -> float:
    """pass@k: the chance that at least one of k samples is right, 1 - C(n - c, k) / C(n, k) with c of n right.

    The unbiased estimator of arXiv 2107.03374 (Codex), the quotient as its product 1 - prod(1 - k / i) for i from
    n - c + 1 to n. Raises ValueError unless 1 <= k <= n.
    """
    n = _samples(right_PN, k)
    wrong_P1 = n - np.count_nonzero(right_PN, axis=1, keepdims=True)
    i_1N = np.arange(1, n + 1)[None]
    missed_P = np.prod(np.where(i_1N > wrong_P1, np.maximum(1.0 - k / i_1N, 0.0), 1.0), axis=1)
    return float(np.mean(1.0 - missed_P))


def majority_at_k(right_PN: np.ndarray, answers: Sequence[Sequence[str]], k: int) -> float:
    """maj@k: the chance that the answer most frequent among k samples is right (self-consistency, arXiv 2203.11171).

    `answers[p][s]` is the final answer of a sample, "" for none. The k samples of a vote are consecutive: n // k votes
    that share no sample, each an independent draw; their mean has the same expectation as the mean over all subsets,
    of which there are too many. What is left over at the end votes nowhere. At k = 1 it is avg@n, at k = n one vote of
    all samples. Raises ValueError unless 1 <= k <= n.
    """
    n = _samples(right_PN, k)
    votes = [
        _vote(right_N[first : first + k], answers_N[first : first + k])
        for right_N, answers_N in zip(right_PN, answers, strict=True)
        for first in range(0, n - k + 1, k)
    ]
    return float(np.mean(votes))


def _vote(right_K: np.ndarray, answers: Sequence[str]) -> float:
    """The share of right ones among the samples whose answer is most frequent.

    That is the expected verdict when one of the answers that tie is drawn, and then one of the samples that gave it. No
    answer is no vote, unless nobody has one.
    """
    votes_K = np.array([answers.count(answer) if answer else 0 for answer in answers])
    return float(np.mean(right_K[votes_K == votes_K.max()]))


def ks(n: int) -> list[int]:
    """The k at which curves over k are given: 1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def _samples(right_PN: np.ndarray, k: int) -> int:
    n = right_PN.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be 1 to n={n}, the samples of each problem")
    return n
