r"""Problem and answer of one row in each known layout, by name and by its columns; `\boxed{}` by hand."""

import pytest

from areal_jax.rollout.layouts import LAYOUTS, find_layout, last_boxed, read_problem

MESSAGES = [{"role": "user", "content": "Solve it."}]
ROWS = {  # layout: (a row as its data set has them, problem, answer)
    "gsm8k": ({"question": "How many?", "answer": "48/2 = 24\n#### 1,072"}, "How many?", "1,072"),
    "math": (
        {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": r"So $x=\boxed{\frac{1}{2}}$."},
        "Find $x$.",
        r"\frac{1}{2}",
    ),
    "math500": (
        {"problem": "Find.", "solution": r"\boxed{3}", "answer": r"\text{(A)}", "unique_id": "test/1.json"},
        "Find.",
        r"\text{(A)}",
    ),
    "aime": ({"ID": "2024-II-4", "Problem": "Let.", "Solution": "So 33.", "Answer": 33}, "Let.", "33"),
    "amc": ({"id": 0, "problem": "Cities", "answer": 27.0, "url": "", "question": "Cities"}, "Cities", "27"),
    "deepscaler": ({"problem": "Let.", "answer": "-\\frac{2}{3}", "solution": ""}, "Let.", "-\\frac{2}{3}"),
    "dapo-math": (
        {
            "data_source": "math_dapo",
            "prompt": MESSAGES,
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9"},
        },
        MESSAGES,
        "34",
    ),
    "messages": ({"messages": [{"role": "system", "content": "Hm."}, *MESSAGES], "answer": 5}, None, "5"),
    "plain": ({"prompt": "1+1", "answer": "2"}, "1+1", "2"),
}
FOUND_AS = {"math500": "math", "amc": "math", "deepscaler": "math"}  # the same columns, read in the same way


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_found_by_its_columns_and_reads_them(name):
    row, problem, answer = ROWS[name]
    found, layout = find_layout(row)
    assert found == FOUND_AS.get(name, name)
    assert read_problem(row, layout) == (problem or row["messages"], answer)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_by_name_reads_its_data_set(name):
    row, problem, answer = ROWS[name]
    assert read_problem(row, find_layout(row, layout=name)[1]) == (problem or row["messages"], answer)


def test_an_aime_answer_loses_the_zeros_in_front_of_it():
    row = {"problem": "?", "answer": "025", "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I"}
    assert find_layout(row)[0] == "aime"
    assert read_problem(row, LAYOUTS["aime"])[1] == "25"
    assert read_problem(row, LAYOUTS["plain"])[1] == "025"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27.0, "27"),
        (-1.0, "-1"),
        (0.5, "0.5"),
        (9007199254740993, "9007199254740993"),
        (10**30, "1" + "0" * 30),
        ("27.0", "27.0"),
        (["7"], "7"),
        ("so\n#### 5", "5"),
    ],
)
def test_numbers_as_answers_are_exact(value, text):
    assert read_problem({"prompt": "?", "answer": value}, LAYOUTS["plain"])[1] == text


def test_columns_that_the_user_names_come_first():
    row = {"problem": "no", "task": {"text": "yes"}, "answer": "no", "final": "so \\boxed{7}"}
    name, layout = find_layout(row, prompt="task.text", answer="final")
    assert (name, read_problem(row, layout)) == ("math", ("yes", "7"))
    assert read_problem(row, find_layout(row, answer="final")[1]) == ("no", "7")
    assert read_problem(row, find_layout(row, layout="plain", prompt="problem")[1]) == ("no", "no")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "?", "label": 1}, {}, r"under prompt or .*it has the columns text, label\. .*prompt=COLUMN"),
        ({"prompt": "?", "answer": None}, {}, r"columns prompt \(and without a value: answer\)"),
        ({"prompt": "?", "sol": {"value": 1, "unit": "m"}}, {"answer": "sol"},
         "column sol is a dict; name one column inside of it: answer=sol.value or answer=sol.unit"),
        ({"prompt": "?", "sol": {"value": {"m": 1}}}, {"answer": "sol.valu"},
         "under sol.valu; it has the columns prompt, sol, sol.value, sol.value.m. Name them"),
        ({"prompt": "?", "answer": 1}, {"answer": "gold"}, "reference under gold; it has the columns prompt, answer"),
        ({"question": "?", "answer": "5"}, {"layout": "gsm8k"}, "the answer has no ####"),
        ({"problem": "?", "answer": "1/2"}, {"layout": "aime"}, "'1/2' is not an integer from 0 to 999"),
        ({"problem": "?", "answer": "-1"}, {"layout": "aime"}, "'-1' is not an integer"),
        ({"problem": "?", "solution": "It is 5."}, {}, r"no \\boxed\{\} to take the answer from; it ends 'It is 5.'"),
        ({"prompt": "?", "answer": ["a", "b"]}, {}, "the answer is a list"),
        ({"prompt": "?", "answer": float("nan")}, {}, "the answer is nan"),
        ({"prompt": "?", "answer": " "}, {}, "the answer in the column answer is empty"),
        ({"problem": "?", "solution": r"So \boxed{}"}, {}, "the answer in the column solution is empty"),
        ({"prompt": {"text": "?"}, "answer": 1}, {}, "a problem is a text, or a list"),
        ({"prompt": "?", "answer": 1}, {"layout": "gms8k"}, "layout='gms8k' is not known; the nearest is 'gsm8k'"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "5"}], "answer": 5}, {}, "must end with what"),
        ({"messages": [], "answer": 5}, {}, "must end with what"),
        ({"messages": ["Solve it."], "answer": 5}, {}, "or a list of {role, content}"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "answer": 5}, {}, "with texts"),
        ({"prompt": "def f():", "test": "assert", "entry_point": "f"}, {}, "programming problems: columns prompt"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_says_what_is_missing(row, options, message):
    with pytest.raises(ValueError, match=message):
        read_problem(row, find_layout(row, **options)[1])


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{4} or rather \boxed{5}.", "5"),
        (r"$\boxed{\left( 3, \frac{\pi}{2} \right)}$", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"the answer $\boxed 7$ is", "7"),
        (r"$\fbox{C}$", "C"),
        (r"\boxed{x} and $\framebox{204}$ minutes", "204"),
    ],
)
def test_the_last_box_of_a_solution_is_its_answer(solution, answer):
    assert last_boxed(solution) == answer


def test_a_box_that_is_not_closed_is_no_answer():
    with pytest.raises(ValueError, match="is not closed"):
        last_boxed(r"\boxed{\frac{1}{2}")
