"""The default task: arithmetic in named steps, whose answer is reached by writing out the steps.

    start 9 a: +4 b: -6 find b          a: 13 b: 7 answer: 7
    start 7 a: double b: half find b    a: 14 b: 7 answer: 7

In: a seed, a split, a position. Out: the problem at that position, the same one for ever; problems without end. A tenth
of all problems, chosen by the hash of their text, are held out: no training split of any seed contains one.
Called by `rollout.prompts.load_source`, and with their reasoning written out, as examples to imitate, by
`rollout.examples.load_examples`. The number of steps has a long tail (median 4, 99th percentile 26), so that the
answers of a batch do. The verifier is `areal_jax.rewards.math_answer:stated_answer_matches`.
"""

import dataclasses
import hashlib
import random
import string
from collections.abc import Iterator, Sequence

import numpy as np

from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Prompt

LARGEST = 19  # totals stay within 0..19, each a token of its own
MOST_STEPS = 26  # one letter each
SKEW = 3.5  # steps = 2 + 25 * uniform ** SKEW
HELD_OUT = 10  # one problem in so many
DOUBLINGS = 0.35  # share of steps that double or halve, where that is possible


@dataclasses.dataclass(frozen=True)
class Problem:
    """`start`, then one operation per step: "+4", "-6", "double" or "half"."""

    start: int
    operations: tuple[str, ...]

    @property
    def text(self) -> str:
        steps = [
            f"{letter}: {operation}" for letter, operation in zip(string.ascii_lowercase, self.operations, strict=False)
        ]
        return f"start {self.start} {' '.join(steps)} find {string.ascii_lowercase[len(self.operations) - 1]}"

    @property
    def totals(self) -> list[int]:
        """The total after each step; the last one is the answer."""
        total, totals = self.start, []
        for operation in self.operations:
            total = apply(operation, total)
            totals.append(total)
        return totals

    @property
    def held_out(self) -> bool:
        return int(hashlib.md5(self.text.encode()).hexdigest(), 16) % HELD_OUT == 0


def apply(operation: str, total: int) -> int:
    if operation == "double":
        return 2 * total
    return total // 2 if operation == "half" else total + int(operation)


def written_out(totals: Sequence[int]) -> str:
    """The answer with its reasoning: the total after each step, then the last one."""
    steps = [f"{letter}: {total}" for letter, total in zip(string.ascii_lowercase, totals, strict=False)]
    return f"{' '.join(steps)} answer: {totals[-1]}"


def words() -> list[str]:
    """Every word that prompts and answers are made of."""
    signed = [f"{sign}{n}" for sign in "+-" for n in range(1, 10)]
    labels = [f"{letter}:" for letter in string.ascii_lowercase]
    numbers = [str(n) for n in range(LARGEST + 1)]
    return ["start", "find", "answer:", *numbers, *signed, "double", "half", *labels, *string.ascii_lowercase]


def sample_problem(rng: random.Random, *, held_out: bool, most_steps: int = MOST_STEPS, skew: float = SKEW) -> Problem:
    """A problem of the wanted split, with 2 to `most_steps` steps: the more `skew`, the fewer long ones."""
    steps = min(most_steps, 2 + int((most_steps - 1) * rng.random() ** skew))
    while True:
        problem = _problem(rng, steps)
        if problem.held_out == held_out:
            return problem


def _problem(rng: random.Random, steps: int) -> Problem:
    total = start = rng.randint(0, LARGEST)
    operations: list[str] = []
    while len(operations) < steps:
        operation = _operation(rng, total)
        if 0 <= apply(operation, total) <= LARGEST:
            operations.append(operation)
            total = apply(operation, total)
    return Problem(start, tuple(operations))


def _operation(rng: random.Random, total: int) -> str:
    doublings = ["double"] * (1 <= total <= LARGEST // 2) + ["half"] * (total > 0 and total % 2 == 0)
    if doublings and rng.random() < DOUBLINGS:
        return rng.choice(doublings)
    return rng.choice("+-") + str(rng.randint(1, 9))


class ArithmeticPrompts:
    """Problems without end. The held-out split is the same for every run; the training split depends on its seed."""

    def __init__(
        self, *, split: str, seed: int, tokenizer: Tokenizer, most_steps: int = MOST_STEPS, skew: float = SKEW
    ) -> None:
        if not 2 <= most_steps <= MOST_STEPS:
            raise ValueError(
                f"data.options.most_steps={most_steps} must be 2 to {MOST_STEPS}, for steps are named by letters"
            )
        self._stream = _stream(split, seed)
        self._tokenizer = tokenizer
        self._most_steps, self._skew = most_steps, skew

    def __getitem__(self, uid: int) -> Prompt:
        rng = random.Random(f"{self._stream}/{uid}")
        problem = sample_problem(rng, held_out=self._stream == "held_out", most_steps=self._most_steps, skew=self._skew)
        tokens = np.array(self._tokenizer.encode(problem.text), np.int32)
        return Prompt(uid=uid, tokens=tokens, text=problem.text, answer=str(problem.totals[-1]), task="arithmetic")


def examples(*, split: str, seed: int, tokenizer: Tokenizer, count: int = 2000) -> Iterator[dict[str, str]]:
    """The first `count` problems of a split, each with its reasoning written out: rows for supervised fine-tuning."""
    del tokenizer  # they are words
    for number in range(count):
        problem = sample_problem(random.Random(f"{_stream(split, seed)}/{number}"), held_out=split == "held_out")
        yield {"prompt": problem.text, "response": written_out(problem.totals)}


def _stream(split: str, seed: int) -> str:
    """The name of a stream of problems: one for every run that is held out, one for each seed to train."""
    return "held_out" if split == "held_out" else f"train/{seed}"
