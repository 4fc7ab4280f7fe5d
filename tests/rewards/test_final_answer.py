"""Final answers against what a person would read off, and the time that hostile texts take."""

import json
import pathlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.rewards.final_answer import final_answer, normalised

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"

ONLY_ENDS = [  # the last number is only the end of something
    "The interval is [1, 2].",
    "The set is {1, 2}",
    r"The set is \{1, 2\}",
    "it is log 2",
    r"it is \log_2 8",
    r"it is \sqrt 2",
    r"it is $\sqrt 2$ for x = \sqrt 2",
    "5 minus 2",
    "the total - 2",
    "x ≠ 3",
    "x != 3",
    "x >= 3",
    "x ≤ 3",
    "x < 3",
    r"x \geq 3",
    "(2, 3)",
    "2 ± 3",
    r"2 \pm 3",
    "5 choose 3",
    "2 (mod 3)",
    r"2 \pmod 3",
    "either 2 or 3",
    "it is between 2 and 3",
    "3 over 2",
    "it is more than 3",
    "<answer>it is not 3</answer>",
    "it is 2 pi",
    r"it is 2 \pi",
    "it is 3 squared",
]
ANSWERS = [
    (r"first \boxed{4}, then \boxed{5}", "5"),
    (r"<answer>\boxed{42}</answer>", "42"),
    ("<answer>1</answer> no: <answer>2</answer> or 3", "2"),
    ("<answer>x + 1</answer>", "x+1"),
    ("<answer>The sum of both is 7</answer>", "7"),
    ("... Final Answer: **73**", "73"),
    ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
    (r"So the answer is $3\sqrt{2}$.", r"3\sqrt{2}"),
    ("The answer is x = 4 apples", "4"),
    ("the answer: is it so that we go on? 12", "12"),
    ("Answer:\n\n**1/2**", "1/2"),
    (r"we get \(x+1\) in the end", "x+1"),
    (r"we get \[ x + 1 \]", "x+1"),
    ("it costs $18, then $20", "20"),
    ("It is 12 in total on day 6.", "6"),
    ("It is 5!", "5"),
    ("[ 5 8 3 ] 3", "3"),
    ("2 * 3", ""),
    ("1 3/4", ""),
    ("", ""),
    ("none", ""),
    *[(text, "") for text in ONLY_ENDS],
    (r"5 \boxed{", ""),
    (r"\boxed{}", ""),
    (r"\boxed{.0000672}", "21/312500"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
    (r"\boxed{\text{Yes}}", "Yes"),
    (r"\boxed{\text{(C)}}", "(C)"),
    (r"\boxed{\text{AB}}", r"\text{AB}"),
    ("The answer is 7 million.", "7000000"),
    ("it is 7 million.", "7000000"),
    ("it is 3 dozen", "36"),
    ("it is 2π", r"2\pi"),
    ("it is minus 2.", "-2"),
    ("It is **negative** 2", "-2"),
    ("The temperature is - 2", "-2"),
    ("so we have 3 kinds:\n- 2", "2"),
    ("- the temperature is - 2", "-2"),
    ("it was 3 then and it is 5 or so", "5"),
    ("it is (5)", "5"),
    ("between us, and 5 apples", "5"),
]
SPELLINGS = [
    (["1/2", "0.5", ".50", r"\frac12", r"\dfrac{1}{2}", r"$\frac{1}{2}$", "x = 1/2", "**0.5**"], "1/2"),
    (["18.90", r"\$18.90", r"18.90 \text{ dollars}", "$18.9 dollars"], "189/10"),
    (["10080", "10,080", r"10,\!080", "10{,}080", "10080.0", r"10080^\circ", r"10080\%"], "10080"),
    (
        [r"\frac{\sqrt3}{3}", r"\dfrac{\sqrt{3}}{3}", r"\frac{\sqrt 3} 3", r" \( \frac{\sqrt3}{3} \)."],
        r"\frac{\sqrt{3}}{3}",
    ),
    (["1234567", r"1\,234\,567", r"1{,}234{,}567", "1.234567 million", "1234567 people"], "1234567"),
    (["-2", "–2", "−2", "x = –2"], "-2"),
    (["f'", r"f^\prime", r"f^{\prime}"], "f'"),
    ([r"\text{no}", "no", r"\mathrm{no}", r"\textbf{no}"], "no"),
    ([r"\text{AB}", r"\mathrm{AB}", r"\textbf{ AB }"], r"\text{AB}"),
    (["(3,4]", r"\left( 3, 4 \right]", "( 3 , 4 ]"], "(3,4]"),
    ([r"15\mbox{ cm}^2", r"15 \text{ cm}^{2}", "15 cm"], "15"),
    ([r"2\pi\text{ cm}", r"2\pi", r"2 \pi", "2π"], r"2\pi"),
    (["x≤2", r"x \leq 2", r"x\le 2", r"x\leqslant 2"], r"x\le 2"),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_the_answer_is_where_the_rules_say(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(("spellings", "uniform"), SPELLINGS)
def test_one_answer_has_one_spelling(spellings, uniform):
    assert {normalised(spelling) for spelling in spellings} == {uniform}


@pytest.mark.parametrize(
    "text",
    [
        "2 pi",
        "5 millions",
        "5 per million",
        "3 or 4",
        "2+3=5",
        "3*x-1*y+13=0",
        "5!",
        "12:00",
        "x=1,y=2",
        r"2\sqrt{3}",
        "1 2",
        "1 4/5",
    ],
)
def test_what_is_no_number_does_not_become_one(text):
    assert not normalised(text).isdigit()


@pytest.mark.parametrize("text", ["1,-2", "(1,234)", r"2 x", "1 4/5", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"])
def test_spaces_and_commas_that_mean_something_stay(text):
    assert normalised(text) == {r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": r"\begin{pmatrix}1\\2\end{pmatrix}"}.get(
        text, text
    )


HOSTILE = {
    "braces": "\\boxed" + "{" * 1_000_000,
    "boxes": "\\boxed{" * 150_000,
    "dollars": "$" * 1_000_000,
    "formulas": "\\(" * 500_000,
    "brackets": "\\[ " * 300_000,
    "fractions": "\\frac{1}{" * 100_000,
    "texts": "\\text{" * 100_000,
    "texts and spaces": "1" + " \\text{ " * 100_000,
    "tags": "<answer>" * 100_000,
    "markers": "answer " * 150_000,
    "markers and stars": "answer" + "*_ " * 300_000,
    "spaces": "<answer>1" + " " * 1_000_000 + "</answer>",
    "box of spaces": "\\boxed{1" + " " * 4_000 + "x}",
    "box of roots": "\\boxed{" + "\\sqrt " * 600 + "}",
    "box of signs": "\\boxed{" + "^ " * 2_000 + "}",
    "box of letters": "\\boxed{" + "a " * 2_000 + "1}",
    "box of fractions": "\\boxed{" + "\\frac{" * 600 + "}",
    "words": "ab " * 400_000,
    "nines": "9" * 1_000_000,
    "thousands": "1,000" * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_milliseconds(name):
    began = time.perf_counter()
    assert len(final_answer(HOSTILE[name])) < 5000
    assert time.perf_counter() - began < 0.5  # at most 30 ms on an idle machine


@given(st.text(alphabet="\\{}$().,^_ 0123abfrcxte*<>=", max_size=200))
def test_normalising_twice_changes_nothing_that_is_a_number_and_never_raises(text):
    once = normalised(text)
    assert final_answer(text) is not None and (not once.isdigit() or normalised(once) == once)


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data here")
def test_the_solutions_of_math500_end_in_their_answers():
    problems = json.loads((DATA / "math500.json").read_text())
    same = [final_answer(problem["solution"]) == normalised(problem["answer"]) for problem in problems]
    assert sum(same) == len(problems)
