"""The number verifier against verdicts that were decided by hand."""

import json
import pathlib
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.rewards.math_answer import final_number, last_number_matches

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"

RIGHT = [
    ("73", "... Final Answer: **73**"),
    ("$13$", r"$\text{13}$"),
    ("42", r"<answer>\boxed{42}</answer>"),
    ("5", r"\boxed{4} or maybe \boxed{5}"),  # the rule: the last box answers
    ("0.5", "it is 1/2"),
    ("1/2", r"so $\frac{1}{2}$."),
    (r"\dfrac{17}{50}", r"\boxed{0.34}"),  # 17 / 50 = 34 / 100
    ("-3/4", r"$x = -\frac{3}{4}$"),
    ("-3/4", "-0.75"),
    ("1234567", "1,234,567 people"),
    ("10080", r"\boxed{10,\!080}"),
    ("1/4", "It is .25"),
    ("1500", "1.5e3"),
    ("-7", "\N{MINUS SIGN}7"),
    ("-5", "x = - 5"),
    ("36", "12 * 3 = 36."),
    ("16", "12+7=19;19-3=16"),
    ("3", "[ 5 8 3 ] 3"),
    ("50", r"50\%"),
    ("18", r"\boxed{\$18}"),
    ("18", r"\boxed{18 \text{ dollars}}"),
    ("45", r"\boxed{45^\circ}"),
    ("5", "<answer>5</answer> or rather 6"),
    ("5", "- 5"),  # a bullet
    ("27.0", "27"),
    ("5", "I think 5<|im_end|>"),
    ("9007199254740993", "9007199254740993"),
]
WRONG = [
    ("9007199254740993", "9007199254740992"),  # 2^53 + 1 and 2^53 are the same float64
    ("0", ""),
    ("0", "none"),
    ("0", r"\boxed{}"),
    ("1/3", "0.333"),
    ("4", r"\boxed{4} or maybe \boxed{5}"),
    ("4", r"4, no: \boxed{4"),  # cut off
    ("5", r"\boxed{5 or 6}"),
    ("5", r"5 \boxed{x}"),
    ("2", r"3\sqrt{2}"),
    ("2", r"\boxed{3\sqrt{2}}"),
    ("0", "12:00"),
    ("3", "2,3"),
    ("5", "x - 5"),
    ("3", "2 * 3"),
    ("3", r"$2 \times 3$"),
    ("5", "5x"),
    ("5", "x >=5"),
    ("9", "9^9^9"),
    ("9", "9**9"),
    ("4/5", "1 4/5"),
    ("4/5", r"1\frac{4}{5}"),
    ("14/5", r"1\frac{4}{5}"),
    ("5", "12 in total on day 6"),
    ("5", "5</answer> <answer>6"),
    ("1", "1/0"),
    ("2024", "1/2/2024"),
]
REFUSED = [
    "3x + 4y + 14 = 0",
    r"$1-\frac{1}{e}$",
    "$n=2,3,4$",
    r"$\pm 2021$",
    "$12:00$",
    r"1\frac{4}{5}",
    "2^{10}",
    r"3\sqrt{13}",
    "(2, 3)",
    r"\text{east}",
    "",
    "1/0",
    "1" * 300,
]


@pytest.mark.parametrize(("answer", "completion"), RIGHT)
def test_right_answer_is_right(answer, completion):
    assert last_number_matches(completion=completion, answer=answer) == 1.0


@pytest.mark.parametrize(("answer", "completion"), WRONG)
def test_wrong_answer_is_wrong(answer, completion):
    assert last_number_matches(completion=completion, answer=answer) == 0.0


@pytest.mark.parametrize("answer", REFUSED)
def test_reference_that_is_no_number_is_refused_whatever_was_answered(answer):
    with pytest.raises(ValueError, match="is not one number"):
        last_number_matches(completion=answer, answer=answer)


HOSTILE = {
    "powers": "9^" * 500_000 + "9",
    "power with a million digits": "10^(10^6)",
    "tower": "9**9**9**9",
    "exponent": "1e999999999",
    "million digits": "1" * 1_000_000,
    "thousands": "1,000" * 200_000,
    "boxes": "\\boxed{" * 150_000,
    "braces": "\\boxed" + "{" * 1_000_000,
    "dollars": "$" * 1_000_000,
    "fractions": "\\frac{1}{" * 100_000,
    "texts": "\\text{" * 100_000,
    "tags": "<answer>" * 100_000,
    "signs": "= - " * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_wrong_at_once(name):
    began = time.perf_counter()
    assert last_number_matches(completion=HOSTILE[name], answer="9") == 0.0
    assert time.perf_counter() - began < 1.0  # some milliseconds; the second is for a busy machine


@given(st.fractions(max_denominator=10**6), st.integers(-(10**40), 10**40))
def test_every_integer_and_fraction_is_read_back_exactly(fraction, integer):
    assert final_number(f"the answer is {fraction}.") == fraction
    assert final_number(f"\\boxed{{{integer:,}}}") == Fraction(integer)


@given(st.text(max_size=300))
def test_any_text_gives_a_number_or_nothing(text):
    assert isinstance(final_number(text), Fraction | None)


def test_a_number_cut_by_the_search_window_is_not_taken():
    assert final_number("7" + "1" * 150 + " a" * 2000) is None  # 4,000 characters: the window begins inside the number


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data here")
def test_each_gsm8k_answer_is_right_for_its_own_problem_and_wrong_for_another():
    answers = [json.loads(line)["answer"] for line in (DATA / "gsm8k_test.jsonl").open()]
    gold = [answer.rsplit("####", 1)[1] for answer in answers]
    verdicts = [last_number_matches(completion=text, answer=answer) for text, answer in zip(answers, gold, strict=True)]
    assert sum(verdicts) == 1319
    other = [last_number_matches(completion=text, answer=gold[i - 1]) for i, text in enumerate(answers)]
    same = sum(Fraction(gold[i].replace(",", "")) == Fraction(gold[i - 1].replace(",", "")) for i in range(len(gold)))
    assert sum(other) == same
