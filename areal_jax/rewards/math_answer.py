r"""The number verifier: whether the final answer of a completion is the reference's number, exactly.

In: a completion and a reference answer that is one number. Out: 1.0 or 0.0. Called by the reward pool's workers, and as
a plain function. Waits for nobody; takes microseconds, whatever the text is: nothing in it is ever evaluated.

Numbers are integers, decimals (`3.50`, `.5`, `1.5e3`) and fractions (`3/4`, `\frac{3}{4}`), with a sign directly before
them and `,` between thousands. They are compared as exact rationals: 0.5 = 1/2, 0.333 is not 1/3, and
9007199254740993 is not 9007199254740992. Dollar and percent signs, degrees, Markdown and HTML marks and words after
the number (units) are passed over; 50% is therefore 50.

The final answer is looked for in the text of the last `<answer>...</answer>`, or in all of the text. There it is
1. the last `\boxed{...}`, which must hold one number and nothing else: `\boxed{4} or maybe \boxed{5}` answers 5, and a
   last box that is cut off or holds something else answers nothing, whatever stands before it;
2. else the last word with a digit in it, which must be one number, or end in `= number`: `**73**`, `x=5`, `(5).`, `5%`.
   A word like `9^9`, `5x`, `12:00` or `2,3`, and a number right after an operator (`2 * 3`), answers nothing.
An answer of nothing is wrong. So is a number of more than `MOST_DIGITS` characters, and a power of any size.

Refused, by ValueError, is a reference that is not one number: an expression, equation, set, interval, list, power,
root, time, mixed number or text. Telling whether those are equal takes a symbolic verifier, which this one is not.
"""

import re
from fractions import Fraction

MOST_DIGITS = 200  # characters of a number; exact arithmetic on it stays in the microseconds
MOST_EXPONENT = 99  # of 1.5e99
WINDOW = 4096  # characters at the end of a text without a box in which the last number is looked for

_NUMBER = re.compile(
    r"([+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]+)|/([0-9]+))?"
)
_ALONE = re.compile(r"(?:[A-Za-z]\s*=\s*)?(\S+)(?:\s+[A-Za-z][A-Za-z ]+)?")  # `5`, `x = 5`, `5 apples`
_BEFORE = re.compile(r".*(?<![<>!])[=≈]|[^0-9]*:")  # what stands before the number in `x=5`, `Answer:5`
_LEADING, _TRAILING = "([{*_\"'`#~:;,€£¥", ")]}*_\"'`~:;,.!?%€£¥"
_OPERATORS = frozenset(["+", "-", "*", "/", "^", "**", "×", "·", "÷", "\\times", "\\cdot", "\\div"])
_OPERAND = re.compile(r".*[0-9)].*|[A-Za-z]")
_PLAIN = [  # LaTeX and markup around numbers, in this order
    (re.compile(r"\\!|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile("\N{MINUS SIGN}"), "-"),
    (re.compile(r"(?<![0-9])\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r"\1/\2"),
    (re.compile(r"(?<![0-9])\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|bm)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[,;:()\[\] $%]|\$|</?[A-Za-z][A-Za-z0-9]*/?>|<\|[A-Za-z_]+\|>"), " "),
    (re.compile(r"([=:]\s*)-\s+(?=[.0-9])"), r"\1-"),
]


def last_number_matches(*, completion: str, answer: str, prompt: str = "") -> float:
    """1.0 if the completion's final answer equals `answer`, else 0.0. ValueError when `answer` is not one number."""
    reference = _one_number(answer)
    if reference is None:
        raise ValueError(
            f"the reference answer {answer[:80]!r} is not one number (integer, decimal or fraction), which is all that "
            "areal_jax.rewards.math_answer decides; use a symbolic verifier for this data set (reward.function)"
        )
    return float(final_number(completion) == reference)


def stated_answer_matches(*, completion: str, answer: str, prompt: str = "") -> float:
    """1.0 if the completion ends in `answer: X`, says "answer:" once, and X is the reference to the letter."""
    return float(completion.count("answer:") == 1 and completion.split()[-2:] == ["answer:", answer])


def final_number(text: str) -> Fraction | None:
    """The number that a text gives as its final answer, by the rules above; None for none."""
    if "<answer>" in text:
        text = text.rsplit("<answer>", 1)[1].split("</answer>", 1)[0]
    if "\\boxed" in text:
        return _one_number(_last_box(text))
    return _last_number(text)


def _last_number(text: str) -> Fraction | None:
    words = _plain(text[-WINDOW:]).split()
    if len(text) > WINDOW:
        words = words[1:]  # the window may begin inside of a number
    last = next((i for i in reversed(range(len(words))) if re.search("[0-9]", words[i])), None)
    if last is None or _goes_on(words[:last], words[last]):
        return None
    return _number(words[last])


def _goes_on(before: list[str], word: str) -> bool:
    """Whether the last word only ends an expression: `2 * 3`, `1 3/4`."""
    if len(before) > 1 and before[-1] in _OPERATORS:
        return _OPERAND.fullmatch(before[-2]) is not None
    return bool(before) and "/" in word and before[-1].isdigit()


def _last_box(text: str) -> str:
    """What the last box holds; nothing when it is not closed."""
    content = text.rsplit("\\boxed", 1)[1].lstrip()
    depth = 0
    for i, character in enumerate(content[:WINDOW]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return content[1:i]
    return ""


def _one_number(text: str) -> Fraction | None:
    """The number that a text consists of, but for what is passed over."""
    match = _ALONE.fullmatch(_plain(text[:WINDOW]).strip(" \t\n."))
    return _number(match[1]) if match and len(text) <= WINDOW else None


def _number(word: str) -> Fraction | None:
    word = word.lstrip(_LEADING)
    before = _BEFORE.match(word)
    word = word[before.end() if before else 0 :].lstrip(_LEADING).rstrip(_TRAILING)
    match = _NUMBER.fullmatch(word) if len(word) <= MOST_DIGITS else None
    if match is None:
        return None
    mantissa, exponent, denominator = match.groups()
    value = Fraction(mantissa.replace(",", ""))
    if exponent:
        return value * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MOST_EXPONENT else None
    if denominator:
        return value / int(denominator) if int(denominator) else None
    return value


def _plain(text: str) -> str:
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text
