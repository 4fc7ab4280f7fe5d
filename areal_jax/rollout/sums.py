"""Sums and differences asked in words: a small real task for a real language model.

In: the size of the numbers. Out: prompts by position, as every prompt source gives them. Named by `data.train` and
`eval.data`; called by the rollout controller. Waits for nobody.

A quarter of all problems is held out, by a hash of the problem itself, so that no seed can train on them.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Prompt

HELD_OUT_OF = 4  # one problem of so many


class Sum(NamedTuple):
    left: int
    operator: str
    right: int

    @property
    def text(self) -> str:
        return f"What is {self.left} {self.operator} {self.right}?"

    @property
    def answer(self) -> str:
        return str(self.left + self.right if self.operator == "+" else self.left - self.right)

    @property
    def held_out(self) -> bool:
        return hashlib.md5(self.text.encode(), usedforsecurity=False).digest()[0] % HELD_OUT_OF == 0


def all_sums(largest: int, operators: str) -> list[Sum]:
    """Every problem of two numbers from 1 to `largest`."""
    numbers = range(1, largest + 1)
    return [Sum(a, operator, b) for a in numbers for operator in operators for b in numbers]


class Sums:
    """Two numbers from 1 to `largest`, and one of `operators` ("+", "-" or both, "+-").

    `template` is the text to ask, with "{prompt}" where the question goes, its special tokens written out. The held-out
    stream draws without repetition, so it is finite; with small numbers all held-out problems are in it.
    """

    def __init__(
        self,
        *,
        split: str,
        seed: int,
        tokenizer: Tokenizer,
        largest: int = 9,
        operators: str = "+",
        template: str = "{prompt}",
    ) -> None:
        if largest < 2 or not operators or set(operators) - {"+", "-"}:
            raise ValueError(
                f"largest={largest}, operators={operators!r}: numbers go up to 2 or more, operators are + and -"
            )
        if "{prompt}" not in template:
            raise ValueError(f'template={template!r} must contain "{{prompt}}", where the question goes')
        held_out = split == "held_out"
        self._problems = [problem for problem in all_sums(largest, operators) if problem.held_out == held_out]
        self._seed = 0 if split == "held_out" else seed  # the same held-out problems in every run
        self._tokenizer, self._template = tokenizer, template

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, uid: int) -> Prompt:
        epoch, position = divmod(uid, len(self))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self))
        problem = self._problems[order[position]]
        text = self._template.replace("{prompt}", problem.text)
        return Prompt(
            uid=uid, tokens=np.array(self._tokenizer.encode(text), np.int32), text=text, answer=problem.answer
        )
