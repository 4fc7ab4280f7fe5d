r"""The number verifier: whether the final answer of a completion is the reference's number, exactly.

In: a completion and a reference answer that is one number. Out: 1.0 or 0.0. Called by the reward pool's workers, and as
a plain function. Waits for nobody; takes microseconds, whatever the text is: nothing in it is ever evaluated.

Where the final answer stands and what passes for a number say the rules of `final_answer.py`. Numbers are compared as
exact rationals: 0.5 = 1/2, 0.333 is not 1/3, and 9007199254740993 is not 9007199254740992. An answer that is anything
else, or a number of more than `MOST_DIGITS` characters, or a power of any size, is wrong.

Refused, by ValueError, is a reference that is not one number: an expression, equation, set, interval, list, power,
root, time, mixed number or text. Telling whether those are equal takes the symbolic verifier (`math_verdict.py`).
"""

from fractions import Fraction

from areal_jax.rewards.final_answer import final_answer, one_number


def last_number_matches(*, completion: str, answer: str, prompt: str = "") -> float:
    """1.0 if the completion's final answer equals `answer`, else 0.0. ValueError when `answer` is not one number."""
    reference = one_number(answer)
    if reference is None:
        raise ValueError(
            f"the reference answer {answer[:80]!r} is not one number (integer, decimal or fraction), which is all that "
            "areal_jax.rewards.math_answer decides; set reward.function to areal_jax.rewards.math_verdict:answers_match"
        )
    return float(final_number(completion) == reference)


def stated_answer_matches(*, completion: str, answer: str, prompt: str = "") -> float:
    """1.0 if the completion ends in `answer: X`, says "answer:" once, and X is the reference to the letter."""
    return float(completion.count("answer:") == 1 and completion.split()[-2:] == ["answer:", answer])


def final_number(text: str) -> Fraction | None:
    """The number that a text gives as its final answer; None for none."""
    return one_number(final_answer(text))
