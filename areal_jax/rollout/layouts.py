r"""What a row of a data set asks and what the reference answer is: known layouts, by name or by their columns.

In: a row with named columns. Out: (problem, reference answer), the problem as a text or as a list of messages.
Called by `rollout.prompts`. Waits for nobody.

| layout | problem | reference answer |
| --- | --- | --- |
| gsm8k | question | what follows the last `####` of answer |
| math, math500 | problem | answer, or the last `\boxed{}` of solution where there is no answer |
| aime | problem, Problem | answer, Answer: an integer of 0 to 999, `025` is 25 |
| amc | problem | answer: a number, 27.0 is 27 |
| deepscaler | problem | answer |
| dapo-math | prompt (messages) | reward_model.ground_truth |
| messages | messages | answer |
| plain | prompt, question, problem | answer |

A column inside of a column is named with a dot. In any layout a problem may be a list of messages.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from areal_jax.rollout.data_sets import Row
from areal_jax.tokenizer import Message

Problem = str | Sequence[Message]
Reader = Callable[[Any], str]  # from what an answer column holds to the reference answer
CODE_COLUMNS = ("entry_point", "test", "test_list", "test_cases", "input_output", "canonical_solution")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns that may hold the problem, and those that may hold the answer with how each is read.

    The first column that is there counts.
    """

    prompts: tuple[str, ...]
    answers: Mapping[str, Reader]


def answer_text(value: Any) -> str:
    """A reference as text: a whole float as an integer, of an explained answer what follows the last `####`."""
    if isinstance(value, list) and len(value) == 1:
        return answer_text(value[0])
    if isinstance(value, bytes | bool):
        raise ValueError(f"the answer is {value!r} of type {type(value).__name__}; it must be one text or number")
    if isinstance(value, dict | list):
        raise ValueError(f"the answer is a {type(value).__name__}, {str(value)[:80]!r}; it must be one text or number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the answer is {value}, by which tables often mean that there is none")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).rsplit("####", 1)[-1].strip()


def marked_answer(value: Any) -> str:
    if "####" not in str(value):
        raise ValueError(f"the answer has no ####, after which GSM8K gives it: {str(value)[-80:]!r}")
    return answer_text(value)


def whole_number(value: Any) -> str:
    """An answer of the AIME, 0 to 999, without the zeros in front that they are written with."""
    text = answer_text(value)
    if not (text.isascii() and text.isdigit() and int(text) <= 999):
        raise ValueError(f"the answer {text[:80]!r} is not an integer from 0 to 999, as those of the AIME are")
    return str(int(text))


def last_boxed(text: str) -> str:
    r"""What the last `\boxed{...}` (or `\fbox`, `\framebox`, or `\boxed 5`) of a solution holds, braces matched."""
    begin, mark = max((text.rfind(mark), mark) for mark in ("\\boxed", "\\fbox", "\\framebox"))
    if begin < 0:
        raise ValueError(f"the solution has no \\boxed{{}} to take the answer from; it ends {text[-80:]!r}")
    inside = text[begin + len(mark) :].lstrip()
    if not inside.startswith("{"):
        return inside.partition("$")[0].partition(" ")[0].strip()
    depth = 0
    for position, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:position].strip()
    raise ValueError(f"the last \\boxed{{ of the solution is not closed: {inside[:80]!r}")


def named_answer(value: Any) -> str:
    r"""The answer of a column that only the user knows: a `\boxed{}` in it, or else all of it."""
    return last_boxed(value) if isinstance(value, str) and "\\boxed" in value else answer_text(value)


PLAIN = Layout(("prompt", "question", "problem", "Problem", "messages"), {"answer": answer_text, "Answer": answer_text})
MATH = Layout(("problem",), {"answer": answer_text, "solution": last_boxed})
LAYOUTS = {
    "gsm8k": Layout(("question",), {"answer": marked_answer}),
    "math": MATH,
    "math500": MATH,
    "aime": Layout(("problem", "Problem"), {"answer": whole_number, "Answer": whole_number}),
    "amc": Layout(("problem",), {"answer": answer_text}),
    "deepscaler": Layout(("problem",), {"answer": answer_text}),
    "dapo-math": Layout(("prompt", "messages"), {"reward_model.ground_truth": answer_text}),
    "messages": Layout(("messages",), {"answer": answer_text}),
    "plain": PLAIN,
}


def find_layout(row: Row, *, layout: str = "", prompt: str = "", answer: str = "") -> tuple[str, Layout]:
    """(name, layout) of a data set by its first row, or the one that `layout` names.

    `prompt` and `answer` are columns that the user has named, "" otherwise; they take the place of the layout's own.
    Raises ValueError for a name that is not known.
    """
    if layout and layout not in LAYOUTS:
        near = difflib.get_close_matches(layout, LAYOUTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"layout={layout!r} is not known; the nearest is {near!r}, all are {', '.join(LAYOUTS)}")
    name = layout or _recognise(row)
    known = LAYOUTS[name]
    return name, Layout(
        prompts=(prompt,) if prompt else known.prompts, answers={answer: named_answer} if answer else known.answers
    )


def _recognise(row: Row) -> str:
    if _first(row, ("reward_model.ground_truth",)) and "answer" not in row:
        return "dapo-math"
    if "messages" in row and "prompt" not in row:
        return "messages"
    if "question" in row and "problem" not in row and "####" in str(row.get("answer")):
        return "gsm8k"
    if "Problem" in row or ("problem" in row and "AIME" in str(row.get("url"))):
        return "aime"
    return "math" if "problem" in row else "plain"


def read_problem(row: Row, layout: Layout) -> tuple[Problem, str]:
    """(problem, reference answer) of a row. ValueError that says what is missing or wrong, and which columns it has."""
    prompt, answer = _first(row, layout.prompts), _first(row, layout.answers)
    if not prompt or not answer:
        raise ValueError(_unknown(row, layout))
    value = look_up(row, answer)
    if isinstance(value, dict):
        raise ValueError(
            f"the answer in the column {answer} is a dict; name one column inside of it: "
            f"{' or '.join(f'answer={answer}.{inner}' for inner in value)}"
        )
    reference = layout.answers[answer](value)
    if not reference:
        raise ValueError(f"the answer in the column {answer} is empty; leave the row out, or name another column")
    return as_problem(look_up(row, prompt)), reference


def _first(row: Row, columns: Iterable[str]) -> str:
    """The first of the columns that holds something, "" if none does."""
    return next((column for column in columns if look_up(row, column) is not None), "")


def look_up(row: Row, name: str) -> Any:
    """What a column holds, or one inside of it (`reward_model.ground_truth`); None if there is none."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    inside = row.get(outer)
    return look_up(inside, inner) if inner and isinstance(inside, dict) else None


def _names(column: str, value: Any) -> list[str]:
    """A column and those inside of it, as the options name them: `sol`, `sol.value`."""
    inside = value if isinstance(value, dict) else {}
    return [column, *(name for inner, each in inside.items() for name in _names(f"{column}.{inner}", each))]


def as_problem(value: Any) -> Problem:
    """A problem as it stands in a column, checked: a text, or messages of which the last is the user's."""
    if isinstance(value, str | int | float):
        if not str(value).strip():
            raise ValueError("the problem is empty; leave the row out, or name another column")
        return str(value)
    if not isinstance(value, list) or not all(map(_is_message, value)):
        raise ValueError(f"a problem is a text, or a list of {{role, content}} with texts; this is {str(value)[:80]!r}")
    if not value or value[-1]["role"] != "user":
        raise ValueError(
            f"the conversation ({', '.join(each['role'] for each in value)}) must end with what the user says, so that "
            "the model's answer comes next"
        )
    return [{"role": each["role"], "content": each["content"]} for each in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("content"), str)


def _unknown(row: Row, layout: Layout) -> str:
    """What is said of a row without problem or answer."""
    columns = [name for outer, value in row.items() if value is not None for name in _names(outer, value)]
    empty = [name for name, value in row.items() if value is None]
    here = f"columns {', '.join(columns)}" + (f" (and without a value: {', '.join(empty)})" if empty else "")
    if any(name in row for name in CODE_COLUMNS):
        return (
            f"no column with a reference answer, but those of programming problems: {here}. Their reward runs the "
            "problem's tests, which takes a reward function for code and a prompt source of your own (module:factory)"
        )
    return (
        f"needs the problem under {' or '.join(layout.prompts)} and the reference under {' or '.join(layout.answers)}; "
        f"it has the {here}. Name them by the options prompt=COLUMN and answer=COLUMN (a.b is b inside of a)"
    )
