"""Verdicts on reasoning-gym problems by their own scorers, from the allow-list alone.

In: a completion, and the reference that `areal_jax.rollout.reasoning_gym:Tasks` put into the prompt: JSON with the
task, its parameters, where the answer stands, and what the scorer compares with. Out: 1.0 or 0.0. Runs in the workers
of the reward pool, and nowhere else. Waits for nobody.
"""

import json
from collections.abc import Callable, Mapping

from areal_jax import gym_tasks
from areal_jax.rewards.declared import declare
from areal_jax.rewards.math_answer import final_number


# "wrong": the scorers on the list judge the right answer and all that was tried in well under a second.
@declare(unanswered="wrong", prepare=gym_tasks.library)
def solves(*, completion: str, answer: str, prompt: str = "") -> float:
    """1.0 if the task's own scorer gives full marks (score >= 1; partial ones are worth nothing), else 0.0.

    What is judged says the reference's answer_in: "tags" the text between the last <answer> and its </answer>, "text"
    the whole completion, "number" the number that it gives as its final answer, in shortest form. Spaces around it are
    taken off, and where nothing is left the verdict is 0.0. Raises ValueError for a task outside of the allow-list, so
    that no completion reaches a scorer that executes it.
    """
    reference = json.loads(answer)
    gym_tasks.check_allowed(reference["task"], "the reference answer")
    text = ANSWERS[reference["answer_in"]](completion)
    if not text:
        return 0.0
    entry = {"answer": reference["answer"], "metadata": reference["metadata"]}
    return float(gym_tasks.score(reference["task"], reference["parameters"], text, entry) >= 1.0)


def stated_answer(completion: str) -> str:
    """What stands between the last closed pair of <answer> tags; "" when there is none."""
    before, closed, _ = completion.rpartition("</answer>")
    _, opened, text = before.rpartition("<answer>")
    return text.strip() if closed and opened else ""


def stated_number(completion: str) -> str:
    """The final answer by the rules of final_answer.py if it is one number, 7 for "It is 7.0."; else ""."""
    number = final_number(completion)
    return "" if number is None else str(number)


ANSWERS: Mapping[str, Callable[[str], str]] = {"tags": stated_answer, "text": str.strip, "number": stated_number}
