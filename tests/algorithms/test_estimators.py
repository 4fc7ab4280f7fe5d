"""avg@n, pass@k, maj@k by hand, against all subsets, and at their limits."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.algorithms.estimators import average_at_n, ks, majority_at_k, pass_at_k, standard_error

RIGHT_PN = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool)


def _table(problems, n):
    row = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=n, max_size=n)
    return st.lists(row, min_size=problems, max_size=problems)


tables = st.tuples(st.integers(1, 3), st.integers(1, 6)).flatmap(lambda shape: _table(*shape))


def right_where(answers, reference="a"):
    return np.array([[answer == reference for answer in row] for row in answers])


def test_avg_at_n_is_the_mean_over_problems_of_the_share_right():
    assert average_at_n(RIGHT_PN) == pytest.approx((1 / 4 + 3 / 4 + 0) / 3)


def test_the_standard_error_counts_problems_not_samples():
    # means 1/4, 3/4, 0; their mean 1/3; squares of distances 1/144, 25/144, 16/144; sum 42/144, / (3 - 1) = 21/144
    assert standard_error(RIGHT_PN) == pytest.approx(math.sqrt(21 / 144 / 3))
    assert standard_error(np.repeat(RIGHT_PN, 8, axis=1)) == pytest.approx(math.sqrt(21 / 144 / 3))


def test_one_problem_has_no_standard_error():
    with pytest.raises(ValueError, match="1 problem has no standard error"):
        standard_error(RIGHT_PN[:1])


def test_pass_at_k_by_hand():
    # c = 1 of 4: 1 - C(3, 2) / C(4, 2) = 1 - 3/6;  c = 3: 1 - C(1, 2) / 6 = 1;  c = 0: 0
    assert pass_at_k(RIGHT_PN, 2) == pytest.approx((1 / 2 + 1 + 0) / 3)
    # k = 3: 1 - C(3, 3) / C(4, 3) = 3/4, 1, 0
    assert pass_at_k(RIGHT_PN, 3) == pytest.approx((3 / 4 + 1 + 0) / 3)


@given(tables)
def test_pass_at_k_is_the_mean_over_all_subsets(answers):
    right_PN = right_where(answers)
    for k in range(1, right_PN.shape[1] + 1):
        slow = np.mean([np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in right_PN])
        assert pass_at_k(right_PN, k) == pytest.approx(slow)


@given(tables)
def test_pass_at_1_and_maj_at_1_are_avg_and_pass_at_n_is_any(answers):
    right_PN = right_where(answers)
    n = right_PN.shape[1]
    assert pass_at_k(right_PN, 1) == pytest.approx(average_at_n(right_PN))
    assert majority_at_k(right_PN, answers, 1) == pytest.approx(average_at_n(right_PN))
    assert pass_at_k(right_PN, n) == pytest.approx(np.mean(right_PN.any(axis=1)))


def test_pass_at_k_is_exact_where_binomials_overflow():
    right_PN = np.zeros((1, 4000), bool)
    right_PN[0, :1000] = True
    exact = 1 - math.comb(3000, 64) / math.comb(4000, 64)
    assert pass_at_k(right_PN, 64) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(~right_PN, 2000) == 1.0


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["5", "5", "7"], [1, 1, 0], 1.0),
        (["5", "7", "7"], [1, 0, 0], 0.0),  # the majority is wrong
        (["5", "7", "7", "5"], [1, 0, 0, 1], 0.5),  # a tie of two
        (["5", "7", "8"], [1, 0, 0], 1 / 3),  # a tie of three
        (["5", "5", "7", "7", "8", "8"], [1, 1, 0, 0, 0, 0], 1 / 3),
        (["", "", "", "5"], [0, 0, 0, 1], 1.0),  # no answer is no vote
        (["", "", ""], [0, 0, 0], 0.0),
        (["", ""], [1, 0], 0.5),  # nobody has an answer that can be counted, and a verifier accepts one of the texts
        (["5", "5", "5", "7"], [1, 1, 0, 0], 2 / 3),  # a verifier that wants more than the answer
    ],
)
def test_the_vote_of_all_samples_by_hand(answers, right, expected):
    assert majority_at_k(np.array([right], bool), [answers], len(answers)) == pytest.approx(expected)


def test_maj_at_k_votes_among_consecutive_samples_and_leaves_out_the_rest():
    answers = [["5", "7", "7", "5", "5", "7", "5"]]
    # votes of 3: (5 7 7) wrong, (5 5 7) right; the last 5 is left over
    assert majority_at_k(right_where(answers, "5"), answers, 3) == pytest.approx((0 + 1) / 2)
    # votes of 2: (5 7) tie, (7 5) tie, (5 7) tie
    assert majority_at_k(right_where(answers, "5"), answers, 2) == pytest.approx(0.5)


def test_maj_at_k_expects_the_mean_over_all_subsets():
    answers = ["a", "b", "b", "", "a"]
    for k in (2, 3, 4):
        subsets = [majority_at_k(right_where([s]), [s], k) for s in map(list, itertools.combinations(answers, k))]
        orders = [majority_at_k(right_where([o]), [o], k) for o in map(list, itertools.permutations(answers))]
        assert np.mean(orders) == pytest.approx(np.mean(subsets))


@pytest.mark.parametrize("k", [0, 5])
def test_k_lies_between_1_and_n(k):
    with pytest.raises(ValueError, match=f"k={k} must be 1 to n=4"):
        pass_at_k(RIGHT_PN, k)
    with pytest.raises(ValueError, match=f"k={k} must be 1 to n=4"):
        majority_at_k(RIGHT_PN, [["a"] * 4] * 3, k)


def test_curves_over_k_double_and_end_at_n():
    assert [ks(n) for n in (1, 2, 6, 8, 32)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32]]
