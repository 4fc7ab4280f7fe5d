r"""The symbolic verifier: whether the final answer of a completion is the same mathematical object as the reference.

In: a completion and a reference answer in LaTeX or plain text. Out: 1.0 or 0.0. Called by the reward pool's workers.
Waits for nobody, but may compute for ever on a hostile text: it belongs in the pool, where a completion that is left
unanswered is wrong, logged and counted by cause. It never raises on account of a completion, but for MemoryError: what
sympy cannot make sense of (`(-1)!`, `3 \mod 5`) is wrong.

Where the answer stands and how its spelling is made uniform say the rules of `final_answer.py`; two equal spellings,
or two numbers, need no more. Everything else is taken apart in `symbolic.py`, whose imports (sympy, 1 to 2 s) are made
when the worker starts. What is equal to what:

| gold | right | wrong |
| --- | --- | --- |
| a number: `\frac{1}{2}` | `0.5`, `2^{-1}`; `50` for `50\%`, `90` for `90^\circ` | `0.333` for 1/3; `50\%` for 1/2 |
| a mixed number: `1\frac{4}{5}` | `9/5`, `1.8` | `\frac45` |
| units: `15\mbox{ cm}^2` | `15`, `15 \text{ square centimetres}`: units are not compared | `15 \text{ or more}` |
| a scale: `7 \text{ million}` | `7000000` | `7` |
| an expression: `(a+5)(b+2)` | any equal one; upper and lower case are two letters, `I` is not `i` | |
| primes: `f'`; a division by zero | the same spelling, also `f^\prime` | `f`; another division by zero |
| `\pm 2021`, `1 \pm \sqrt{19}` | both values as a list | one of them |
| a list or set: `1,-2` | in any order, in braces or not, `x=1 \text{ or } x=-2` | `(1,-2)`, one too many or few |
| a point or interval: `(2,3)` | the same brackets and order; `2 < x < 3`; `(x,y)=(2,3)` | `2,3`, `[2,3]`, `(3,2)` |
| a letter's range: `x < 2` | `2 > x`, `(-\infty,2)` without a letter | `y < 2` |
| a union: `(-\infty,1)\cup(2,\infty)` | in any order; `x < 1 \text{ or } x > 2` | joined by `and` or a comma |
| an equation: `y=2x+3` | a multiple of it, `2x-y+3=0`; the right side alone after a name | another equation |
| a matrix | entry by entry, in round or square brackets | a tuple |
| a text: `\text{Evelyn}`, `\text{(C)}` | the same words in any case; `C` | |
| two or three letters: `\text{AB}` | `AB`, `\text{ab}`: text, as one side says so | `\text{BA}`, `BA` |
| the same without `\text`: `xy` | `yx`, a product (but `yes`, `no`, `odd` are words) | |
| a time or ratio: `12:00`, `1:2` | part by part | `1:00`, `2:4`, `1/2` |
| a base: `2516_8` | `2516_{8}` | `2516`, which leaves the base out; its decimal value; another base |

A reference that cannot be parsed is compared by spelling alone. Answers that are too long or deep to be parsed safely
(`symbolic.py`) are wrong unless they are spelled as the reference is.
"""

from areal_jax.rewards.declared import declare
from areal_jax.rewards.final_answer import final_answer, normalised, one_number


def _prepare() -> None:
    """Imports sympy and fills the parser's tables, which takes the first verdicts a tenth of a second each."""
    from areal_jax.rewards import symbolic

    for text in (r"\frac{1}{2}x^{2}+\sqrt{3}", r"(1,2]", "y=2x+3", r"\sin(\pi)-3!"):
        symbolic.same(text, text + "+1")


@declare(unanswered="wrong", prepare=_prepare)
def answers_match(*, completion: str, answer: str, prompt: str = "") -> float:
    """1.0 if the completion's final answer equals `answer`, else 0.0."""
    said, gold = final_answer(completion), normalised(answer)
    if not said or not gold:
        return 0.0
    if said == gold:
        return 1.0
    if one_number(said) is not None and one_number(gold) is not None:
        return 0.0
    from areal_jax.rewards import symbolic

    return float(symbolic.same(gold, said))
