"""The allow-list of reasoning-gym tasks, held against every scorer on it; and verdicts from a real pool."""

import ast
import inspect
import json
import sys
import textwrap
import time

import pytest

from areal_jax import gym_tasks
from areal_jax.rewards.pool import RewardError, RewardPool
from areal_jax.rewards.reasoning_gym import solves, stated_answer

reasoning_gym = pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")

NUMBERS = (5, 1_234_567, 2_000_000_001)
ALLOWED = sorted(gym_tasks.ALLOWED)
JUNK = [
    *("", "0", "x", "-1", "nan", "[NaN, NaN, NaN]", "inf", "True", "null", "[]", "{}", '{"0": 1}', "()", "1e999999999"),
    *("1/0", "82**67**50**20", "9" * 5000, "[" * 50_000, "a " * 20_000, "\ud800", "²×", ",,,", "1:1:1." + "9" * 400),
]


def reference(task, entry, answer_in="tags", **parameters):
    answer = {key: entry[key] for key in ("answer", "metadata")}
    return json.dumps({"task": task, "parameters": parameters, "answer_in": answer_in, **answer})


def verdict(task, entry, text):
    return solves(completion=f"So it is\n<answer>{text}</answer>", answer=reference(task, entry))


def entries(task):
    return [gym_tasks.entry(task, {}, number) for number in NUMBERS]


def same(text, entry):
    return text.strip().lower() == entry["answer"].strip().lower()


def test_every_task_of_the_package_is_either_allowed_or_excluded_with_a_reason():
    assert gym_tasks.ALLOWED | set(gym_tasks.EXCLUDED) == set(reasoning_gym.factory.DATASETS)
    assert not gym_tasks.ALLOWED & set(gym_tasks.EXCLUDED)
    assert all(gym_tasks.EXCLUDED.values())


def test_a_task_of_a_newer_release_is_refused_until_it_has_been_examined():
    with pytest.raises(
        ValueError, match="'chain_sums' is not allowed: it is no task that has been examined.*nearest .* is chain_sum$"
    ):
        gym_tasks.check_allowed("chain_sums", "data.options")


def test_an_excluded_task_is_refused_with_its_reason_and_the_place_of_the_list():
    with pytest.raises(ValueError, match=r"'n_queens' is not allowed: its scorer calls eval.*ALLOWED of areal_jax/gym"):
        solves(completion="<answer>1</answer>", answer=reference("n_queens", {"answer": "1", "metadata": {}}))


@pytest.mark.parametrize("task", ALLOWED)
def test_the_answer_is_right_and_survives_the_way_through_json(task):
    for entry in entries(task):
        assert verdict(task, entry, entry["answer"]) == 1.0


@pytest.mark.parametrize("task", ALLOWED)
def test_junk_is_wrong_and_raises_nothing(task):
    for entry in entries(task):
        for text in JUNK:
            began = time.perf_counter()
            assert verdict(task, entry, text) == float(same(text, entry)), text[:40]
            assert time.perf_counter() - began < 2.0, text[:40]  # most take microseconds


@pytest.mark.parametrize("task", sorted(gym_tasks.ALLOWED - {"jugs"}))  # where several answers may be right
def test_the_answer_to_another_problem_is_wrong(task):
    for entry in entries(task):
        for other in entries(task):
            if not same(other["answer"], entry):
                assert verdict(task, entry, other["answer"]) == 0.0


@pytest.mark.parametrize("task", ALLOWED)
def test_no_code_in_an_answer_is_executed(task, tmp_path):
    file = tmp_path / "executed"
    call = f"open({str(file)!r}, 'w').close()"
    probes = [call, f"[{call}]", f"({call},)", f"[[{call}]]", f'__import__("os").system("touch {file}")', f"1 + {call}"]
    for entry in entries(task):
        for text in probes:
            assert verdict(task, entry, text) == 0.0
    assert not file.exists()


def test_the_probe_finds_a_scorer_that_executes(tmp_path):
    file = tmp_path / "executed"
    dataset = reasoning_gym.create_dataset("n_queens", seed=1, size=1)
    dataset.score_answer(f"[open({str(file)!r}, 'w').close()]", dataset[0])
    assert file.exists()


@pytest.mark.parametrize("task", ALLOWED)
def test_no_scorer_on_the_list_names_a_call_that_executes_text(task):
    dangerous = {"eval", "exec", "parse_expr", "sympify", "compile", "literal_eval"}
    source = inspect.getsource(reasoning_gym.factory.DATASETS[task][0].score_answer)
    called = {
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Call)
    }
    assert not called & dangerous  # the functions that scorers call were read by hand, and are probed above


@pytest.mark.parametrize(
    ("task", "answer", "text"),
    [
        ("complex_arithmetic", None, "nan"),
        ("coin_flip", "0.375", "0"),
        ("game_of_life_halting", None, "no idea"),
        ("number_sorting", None, "nan"),
        ("polynomial_equations", "", "none"),
    ],
)
def test_what_is_excluded_for_full_marks_on_wrong_texts_gives_them(task, answer, text):
    dataset = reasoning_gym.create_dataset(task, seed=1, size=20)
    entry = next(e for e in (dataset[i] for i in range(20)) if task != "game_of_life_halting" or e["answer"] == "True")
    if task == "number_sorting":
        text = json.dumps([float("nan")] * len(ast.literal_eval(entry["answer"])))
    entry["answer"] = entry["answer"] if answer is None else answer
    assert dataset.score_answer(text, entry) >= 1.0


def test_partial_marks_are_worth_nothing():
    entry = {"answer": "214", "metadata": {}}
    assert 0 < gym_tasks.score("chain_sum", {}, "answer: 214", entry) < 1
    assert verdict("chain_sum", entry, "answer: 214") == 0.0
    assert verdict("chain_sum", entry, "+214.0") == 1.0


def test_the_parameters_of_the_prompt_decide_the_tolerance():
    entry = {"answer": "1.234", "metadata": {}}
    for places, expected in ((1, 1.0), (3, 0.0)):
        answer = reference(
            "decimal_arithmetic", entry, min_num_decimal_places=1, max_num_decimal_places=places, precision=9
        )
        assert solves(completion="<answer>1.2</answer>", answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no, <answer> 5\n</answer> done", "5"),
        ("<answer>5</answer> <answer>6", "5"),
        ("<answer>4 <answer>5</answer>", "5"),
        ("<answer>1 2\n3 4</answer>", "1 2\n3 4"),
        ("5", ""),
        ("<answer>5", ""),
        ("5</answer>", ""),
        ("</answer>5<answer>", ""),
    ],
)
def test_the_last_closed_tags_count(completion, text):
    assert stated_answer(completion) == text


def test_with_answer_in_text_the_whole_completion_counts():
    answer = reference("gcd", {"answer": "6", "metadata": {}}, answer_in="text")
    texts = [" 6\n", "It is 6", "<answer>6</answer>", " "]
    assert [solves(completion=text, answer=answer) for text in texts] == [1.0, 0.0, 0.0, 0.0]


def test_with_answer_in_number_the_final_number_counts_in_any_form():
    answer = reference("gcd", {"answer": "6", "metadata": {}}, answer_in="number")
    texts = ["It is 6.", "4 and 18, so 6.0", "**6**", "6 is not 7", "six", ""]
    assert [solves(completion=text, answer=answer) for text in texts] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_pool_gives_verdicts_and_refuses_what_is_not_allowed(tmp_path):
    entry = gym_tasks.entry("chain_sum", {}, 7)
    file = tmp_path / "executed"
    hostile = f"<answer>[open({str(file)!r}, 'w').close()]</answer>"
    with RewardPool("areal_jax.rewards.reasoning_gym:solves", timeout_s=5.0) as pool:
        right = f"<answer>{entry['answer']}</answer>"
        answer = reference("chain_sum", entry)
        assert pool.score_now([right, "<answer>x</answer>", hostile, ""], answer=answer, prompt="") == [1.0, 0, 0, 0]
        with pytest.raises(RewardError, match="task 'spiral_matrix' is not allowed"):
            pool.score_now([hostile], answer=reference("spiral_matrix", entry), prompt="")
        assert pool.score_now([right], answer=answer, prompt="") == [1.0]
    assert not file.exists()


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match="pip install reasoning-gym"):
        gym_tasks.library()
