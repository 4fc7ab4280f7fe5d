import pathlib
import random

import numpy as np
import pytest

from areal_jax.rewards.math_answer import stated_answer_matches
from areal_jax.rollout.arithmetic import ArithmeticPrompts, Problem, sample_problem, words
from areal_jax.tokenizer import Tokenizer

MODEL = pathlib.Path(__file__).parents[2] / "configs" / "arithmetic_model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def test_totals_follow_the_steps():
    problem = Problem(7, ("double", "half", "+1", "-6"))
    assert problem.text == "start 7 a: double b: half c: +1 d: -6 find d"
    assert problem.totals == [14, 7, 8, 2]


def test_every_total_is_a_word():
    rng = random.Random(0)
    problems = [sample_problem(rng, held_out=False, skew=0.5) for _ in range(200)]
    assert all(0 <= total <= 19 for problem in problems for total in problem.totals)
    assert max(len(problem.operations) for problem in problems) == 26


def test_the_same_place_holds_the_same_problem_for_ever(tokenizer):
    first, again = (ArithmeticPrompts(split="train", seed=3, tokenizer=tokenizer) for _ in range(2))
    assert [first[uid].text for uid in (5, 0, 900)] == [again[uid].text for uid in (5, 0, 900)]
    other = ArithmeticPrompts(split="train", seed=4, tokenizer=tokenizer)
    assert [first[uid].text for uid in range(20)] != [other[uid].text for uid in range(20)]


def test_no_held_out_problem_is_trained_on(tokenizer):
    held_out = ArithmeticPrompts(split="held_out", seed=1, tokenizer=tokenizer)
    train = ArithmeticPrompts(split="train", seed=1, tokenizer=tokenizer)
    asked = {held_out[uid].text for uid in range(300)}
    assert not asked & {train[uid].text for uid in range(3000)}
    assert asked == {ArithmeticPrompts(split="held_out", seed=9, tokenizer=tokenizer)[uid].text for uid in range(300)}


def test_answers_have_a_long_tail(tokenizer):
    prompts = ArithmeticPrompts(split="train", seed=1, tokenizer=tokenizer)
    steps = [prompts[uid].text.count(":") for uid in range(2000)]
    # an answer that is written out has 2 * steps + 3 tokens
    assert (2 * np.percentile(steps, 99) + 3) / (2 * np.percentile(steps, 50) + 3) >= 4


def test_the_tokenizer_has_one_token_for_each_word(tokenizer):
    text = " ".join(words())
    assert len(tokenizer.encode(text)) == len(words()) and tokenizer.decode(tokenizer.encode(text)) == text


def test_the_longest_prompt_and_answer_fit_the_default_config(tokenizer):
    from areal_jax.config import build
    from configs import math

    config = build(math.get_config())
    problem = sample_problem(random.Random(0), held_out=False, skew=1e-9)
    answer = " ".join(
        f"{letter}: {total}" for letter, total in zip("abcdefghijklmnopqrstuvwxyz", problem.totals, strict=True)
    )
    assert len(problem.operations) == 26
    assert len(tokenizer.encode(problem.text)) == config.data.max_prompt_tokens
    assert len(tokenizer.encode(f"{answer} answer: {problem.totals[-1]}")) + 1 <= config.rollout.max_new_tokens


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("a: 13 b: 7 answer: 7", 1.0),
        ("answer: 7", 1.0),
        ("a: 13 b: 7 answer: 8", 0.0),
        ("a: 13 b: 7", 0.0),
        ("answer: 8 answer: 7", 0.0),
        ("answer: 7 7", 0.0),
        ("answer:", 0.0),
        ("", 0.0),
    ],
)
def test_the_stated_answer_must_be_the_only_one_and_the_last_word(completion, verdict):
    assert stated_answer_matches(completion=completion, answer="7") == verdict


def test_too_many_steps_are_refused(tokenizer):
    with pytest.raises(ValueError, match="most_steps=27 must be 2 to 26"):
        ArithmeticPrompts(split="train", seed=1, tokenizer=tokenizer, most_steps=27)
