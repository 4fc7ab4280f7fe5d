r"""The final answer of a completion, as a normalised string: what a verifier compares and what a majority vote counts.

In: any text. Out: `final_answer(text)`, "" when there is none. Called by the verifiers in the reward pool and by maj@k.
Waits for nobody; milliseconds, whatever the text is: every search runs in a window of fixed size, and nothing in it is
evaluated.

Where the answer stands. In the text of the last `<answer>...</answer>`, or in all of the text:
1. the last `\boxed{...}`: `\boxed{4} or maybe \boxed{5}` answers 5, and a last box that is cut off answers nothing,
   whatever stands before it;
2. else all that is between the tags, unless it is a sentence;
3. else what follows the last "answer is" or "answer:", to the end of its sentence, unless it goes on as prose;
4. else the last formula in `$...$`, `\(...\)` or `\[...\]`, when no number follows it;
5. else the last word with a digit in it, or what stands after `=` or `:` in it; `minus 2`, `negative 2` and
   `is - 2` are -2, and `- 2` at the beginning of a line is the 2 of a list. It answers nothing where it only ends
   something longer: a number right after an operator, a relation, a function or a word such as `not` or `mod`
   (`2 * 3`, `x >= 3`, `log 2`), a fraction right after a number (`1 3/4`), the second of two numbers joined by `or` or
   `and`, a word that closes a bracket which it did not open (`[1, 2]`), a number before `pi`, `squared` and the like.

How it is written. An answer that is one number (integer, decimal, fraction, with a sign, `,` or a thin space between
thousands, dollar and percent signs, degrees, a one-letter name and `=` before it, units after it) becomes that number
in lowest terms: `\$18.50`, `37/2` and `x = 18.5 \text{ dollars}` are all `37/2`; 50% is 50. `7 \text{ million}` and
`3 dozen` are multiplied out. Words that are no units (`3 \text{ or more}`, `3 \text{ halves}`, `3 factorial`) keep an
answer from being a number. In anything else only the spelling is made uniform: sizes, spaces, fonts, `\dfrac`,
`\frac43`, primes, degree and percent signs, units at the end. A text of two or three letters keeps its `\text{}`, for
without it `\text{AB}` would be a product.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

MOST_DIGITS = 200  # characters of a number; exact arithmetic on it stays in the microseconds
MOST_EXPONENT = 99  # of 1.5e99
WINDOW = 4096  # characters at the end of a text without a box that are searched; the longest box that is read

Rules = Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]  # what is replaced by what

_NUMBER = re.compile(
    r"([+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]+)|/([0-9]+))?"
)
_ALONE = re.compile(r"(?:[A-Za-z]\s*=\s*)?(\S+)((?:\s+[A-Za-z]{2,})*)")  # `5`, `x = 5`, `5 apples`
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = re.compile(
    r"\b(?:pi|or|and|nor|but|except|to|by|sqrt|root|sin|cos|tan|cot|sec|csc|ln|log|exp|times|plus|minus|over|mod|"
    r"modulo|base|choose|factorial|squared|cubed|is|are|was|were|be|not|than|more|less|fewer|greater|below|above|half|"
    rf"halves|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s?|"
    rf"(?:{'|'.join(_SCALES)})s?)\b",
    re.IGNORECASE,
)
WORDS = re.compile(  # letters that are a text; three or fewer may also be a product
    r"(?<![\\A-Za-z])(?:(?!sqrt|frac|sinh|cosh|tanh)[A-Za-z]{4,}|(?i:yes|no|odd)(?![A-Za-z]))"
)
_SHORT_TEXT = re.compile(r"(?!.*\b(?:and|or)\b)[A-Za-z\s().,'-]*[A-Za-z]{2}[A-Za-z\s().,'-]*")
_BEFORE = re.compile(r".*(?<![<>!])[=≈]|[^0-9]*:")  # what stands before the number in `x=5`, `Answer:5`
_LEADING, _TRAILING = "([{*_\"'`#~:;,€£¥", ")]}*_\"'`~:;,.%€£¥"
_MARKS = " \t\r\n*_`"  # Markdown around an answer
_OPERATORS = frozenset(["+", "-", "*", "/", "^", "**", "×", "·", "÷", "\\times", "\\cdot", "\\div"])
_OPERAND = re.compile(r".*[0-9)].*|[A-Za-z]")
_MINUS = frozenset(["-", "minus", "negative"])
_EQUALS = frozenset(["is", "are", "be", "was", "were", "equals", "gives", "get"])
_JOINS = frozenset(["or", "and", "over"])
_BULLET = re.compile(r"^[ \t]*-[ \t]+", re.MULTILINE)
_LEADS_ON = re.compile(  # a word after which a number is only the end of something
    r"[<>≤≥≠±∓√]|[<>!]=|\\(?:[lg]eq?|[lg]t|neq?|pm|mp|(?:b|p)?mod)|not|choose|mod|modulo|than|"
    r"\\?(?:sqrt|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan)(?:_\S*)?",
    re.IGNORECASE,
)
_LEADS_BACK = re.compile(r"(?:\\?pi|factorial|squared|cubed|halves|thirds|quarters)\b|π", re.IGNORECASE)
_SAME: Rules = [  # what both lists below begin with
    (re.compile(r"(?<![0-9.])[0-9]{1,3}(?:\\,[0-9]{3})+(?![0-9])"), lambda match: match[0].replace("\\,", "")),
    (re.compile(r"(?<![^\s=(\[{,:])\N{EN DASH}(?=[.0-9\\])"), "-"),
    (re.compile(r"\{:\}"), ":"),
]
_PLAIN: Rules = [  # LaTeX and markup around numbers, in this order
    *_SAME,
    (re.compile(r"\\!|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile("\N{MINUS SIGN}"), "-"),
    (re.compile(r"(?<![0-9])\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r"\1/\2"),
    (re.compile(r"(?<![0-9])\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
    (re.compile(r"\\(?:text|mbox|textbf|mathrm|mathbf|bm)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[,;:()\[\] $%]|\$|</?[A-Za-z][A-Za-z0-9]*/?>|<\|[A-Za-z_]+\|>"), " "),
    (re.compile(r"([=:]\s*)-\s+(?=[.0-9])"), r"\1-"),
]
_TEXTS = r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm)"
_FONTS = r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm|operatorname)"
_UNIFORM: Rules = [  # the spelling of LaTeX that is no number, in this order
    *_SAME,
    (re.compile(r"<\|[A-Za-z_]+\|>|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?"), ""),
    (re.compile(r"([0-9]),\\!\s*(?=[0-9]{3})|([0-9])\{,\}(?=[0-9]{3})"), r"\1\2"),  # thousands
    (re.compile(r"(?<!\\)\\[()\[\]$%!]|\$|%"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s"), " "),
    (re.compile(r"\^ *(?:\\circ|\{ *\\circ *\})|°|\\degree(?![A-Za-z])"), ""),
    (
        re.compile(r"([0-9a-zA-Z)}]) *\\(?:text|mbox|mathrm) *\{([^{}0-9]*)\} *(?:\^ *(?:[23]|\{ *[23] *\}))? *\.?$"),
        lambda match: match[0] if _NO_UNITS.search(match[2]) else match[1],
    ),
    (re.compile(rf"^{_TEXTS} *\{{([^{{}}]*)\}}$"), lambda match: _unwrapped(match[1])),
    (re.compile(rf"^{_FONTS} *\{{([^{{}}]*)\}}$"), r"\1"),
    (re.compile(r"\^ *(\\prime|\{ *((?:\\prime *)+)\})"), lambda match: "'" * match[0].count("prime")),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac *([0-9])"), r"\\frac{\1}"),
    (re.compile(r"\\frac *(\{[^{}]*\}) *([0-9a-zA-Z])"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt *([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"√ *\(?([0-9a-zA-Z]+)\)?"), r"\\sqrt{\1}"),
    (re.compile(r"\\(le|ge|ne)q(?:slant)?(?![A-Za-z])"), r"\\\1 "),
    (re.compile(" {2,}"), " "),
    (re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])"), ""),
]
_SIGNS = str.maketrans(
    {
        "−": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "∪": "\\cup ",
        "∈": "\\in ",
        "±": "\\pm ",
    }
    | {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne "}
)
_MARKER = re.compile(r"\banswer\b[*_ ]*(?:(?:is|are)\b[*_ ]*:?|:|=)[*_]*", re.IGNORECASE)
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}\s+[A-Za-z]{2,}\s+[A-Za-z]{2,}")  # three words in a row
_FORMULA = re.compile(r"\$\$?([^$]{1,400})\$\$?|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)


def final_answer(text: str) -> str:
    """The normalised final answer of a completion by the rules above; "" when there is none."""
    tagged = "<answer>" in text
    if tagged:
        text = text.rsplit("<answer>", 1)[1].split("</answer>", 1)[0]
    if "\\boxed" in text:
        return normalised(_last_box(text))
    if tagged and not _PROSE.search(text[:WINDOW]):
        return normalised(text)
    return normalised(_stated(text))


def normalised(text: str) -> str:
    """The uniform spelling of an answer that stands alone; "" for one of more than `WINDOW` characters."""
    number = one_number(text)
    if number is not None:
        return str(number)
    text = text.strip(_MARKS).rstrip(_MARKS + ".").translate(_SIGNS) if len(text) <= WINDOW else ""
    for pattern, replacement in _UNIFORM:
        text = pattern.sub(replacement, text)
    text = text.strip(" ").rstrip(" .")
    number = one_number(text)
    return text if number is None else str(number)


def one_number(text: str) -> Fraction | None:
    """The number that a text consists of, but for what is passed over; None when it is anything else."""
    match = _ALONE.fullmatch(_plain(text).strip(_MARKS).rstrip(_MARKS + ".")) if len(text) <= WINDOW else None
    if match is None or (match[1][0] in "([{" and "," in match[1]):  # (1,234) is a pair
        return None
    scale, units = _scale(match[2].split())
    number = None if _NO_UNITS.search(" ".join(units)) else _number(match[1].rstrip(_TRAILING))
    return None if number is None else number * scale


def _scale(words: list[str]) -> tuple[int, list[str]]:
    """What the words after a number multiply it by (`hundred thousand`), and the words after these."""
    scale = 1
    while words and words[0].lower().strip(_TRAILING + "!?") in _SCALES and scale < 10**MOST_EXPONENT:
        scale *= _SCALES[words[0].lower().strip(_TRAILING + "!?")]
        words = words[1:]
    return scale, words


def _unwrapped(text: str) -> str:
    r"""The content of a `\text{}`, unless it would pass for a product of letters without it."""
    return rf"\text{{{text.strip()}}}" if _SHORT_TEXT.fullmatch(text) and not WORDS.search(text) else text


def _stated(text: str) -> str:
    """What prose without a box states as its answer."""
    window = text[-WINDOW:]
    markers = list(_MARKER.finditer(window))
    if markers:
        sentence = window[markers[-1].end() :].strip().split("\n", 1)[0].split(". ", 1)[0]
        if sentence and not _PROSE.search(sentence):
            return sentence
    formulas = list(_FORMULA.finditer(window))
    if formulas and not re.search("[0-9]", window[formulas[-1].end() :]):
        return next(group for group in formulas[-1].groups() if group)
    return _last_word_with_a_digit(text)


def _last_word_with_a_digit(text: str) -> str:
    words = _plain(_BULLET.sub("• ", text[-WINDOW:])).split()
    if len(text) > WINDOW:
        words = words[1:]  # the window may begin inside of a number
    last = next((i for i in reversed(range(len(words))) if re.search("[0-9]", words[i])), None)
    sign = 0 if last is None else _sign(words[:last], words[last])
    if last is None or not sign or _LEADS_BACK.match(" ".join(words[last + 1 : last + 2])):
        return ""
    word = words[last].lstrip(_LEADING)
    before = _BEFORE.match(word)
    number = _number(word[before.end() if before else 0 :].rstrip(_TRAILING + "!?"))
    if number is None:
        return words[last].strip("*_\"'`.,;!?")
    return str(sign * number * _scale(words[last + 1 :])[0])


def _sign(before: list[str], word: str) -> int:
    """What the last word is multiplied by, for what stands before it: 1, -1 after `minus`, and 0 where it is only the
    end of something: `2 * 3`, `x >= 3`, `1 3/4`, `[1, 2]`."""
    previous, earlier = ([""] * 2 + [each.strip("([{*_\"'`").lower() or each for each in before])[:-3:-1]
    if _closes_more(word) or _LEADS_ON.fullmatch(previous) or ("/" in word and previous.isdigit()):
        return 0
    if previous in _JOINS:
        return int(not re.search("[0-9]", earlier))
    if previous in _OPERATORS or previous in _MINUS:
        if _OPERAND.fullmatch(earlier) or (previous == "-" and earlier not in _EQUALS):
            return 0
        return -1 if previous in _MINUS else 1
    return 1


def _closes_more(word: str) -> bool:
    """Whether a word closes a bracket that it did not open: `2]` of `[1, 2]`."""
    depth = 0
    for character in word:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return True
    return False


def _last_box(text: str) -> str:
    """What the last box holds; nothing when it is not closed."""
    content = text.rsplit("\\boxed", 1)[1].lstrip()
    depth = 0
    for i, character in enumerate(content[:WINDOW]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return content[1:i]
    return ""


def _number(word: str) -> Fraction | None:
    word = word.lstrip(_LEADING)
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
