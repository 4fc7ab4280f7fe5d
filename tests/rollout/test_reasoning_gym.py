"""reasoning-gym prompts by position: the same in every process, disjoint splits, stages that survive a restart."""

import json
import os
import subprocess
import sys
import time

import pytest

from areal_jax import gym_tasks
from areal_jax.rewards.reasoning_gym import solves
from areal_jax.rollout.prompts import load_source
from areal_jax.rollout.reasoning_gym import MOST_DRAWS, Ramp, Tasks
from tests.rollout.fakes import FakeTokenizer

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}}
FIRST_PROMPTS = """
import hashlib, json, sys
from areal_jax.rollout.reasoning_gym import Tasks
from tests.rollout.test_reasoning_gym import Asking

tasks = json.loads(sys.argv[1])
print(json.dumps({task: [Tasks(split="train", seed=3, tokenizer=Asking(), tasks={task: {}})[uid].answer
                         for uid in (900, 1, 0)][::-1] for task in reversed(tasks)}))
"""


class Asking(FakeTokenizer):
    """A chat template of one line, a token for each character."""

    def ask(self, problem, *, system=""):
        text = f"{system}|user: {problem}|"
        return text, [ord(character) for character in text]


def source(split="train", seed=1, **options):
    return Tasks(split=split, seed=seed, tokenizer=Asking(), **options)


def asked(tasks, count=40, first=0):
    return [tasks[uid].text for uid in range(first, first + count)]


def parameters(prompt):
    return json.loads(prompt.answer)["parameters"]


@pytest.fixture(scope="module")
def elsewhere():
    """Three prompts of every task, drawn in another order by a process with another hash seed."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    result = subprocess.run(
        [sys.executable, "-c", FIRST_PROMPTS, json.dumps(sorted(gym_tasks.ALLOWED))],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("task", sorted(gym_tasks.ALLOWED))
def test_a_prompt_is_the_same_in_every_process(task, elsewhere):
    tasks = source(seed=3, tasks={task: {}})
    tasks[0]  # some import or read something for the first one
    began = time.perf_counter()
    assert [tasks[uid].answer for uid in (0, 1, 900)] == elsewhere[task]
    assert time.perf_counter() - began < 3.0  # a tenth of a second each, on a machine that does ten things


def test_the_prompt_says_where_the_answer_goes_and_passes_through_the_chat_template():
    prompt = source(tasks={"gcd": {}}, system="Be brief.")[7]
    assert prompt.uid == 7 and prompt.task == "gcd"
    assert prompt.text.startswith("Be brief.|user: Find the Greatest Common Divisor")
    assert "between <answer> and </answer>" in prompt.text
    assert prompt.tokens.tolist() == [ord(character) for character in prompt.text]
    plain = source(tasks={"gcd": {}}, answer_in="text")[7]
    assert "<answer>" not in plain.text and plain.text.endswith("Reply with the answer and nothing else.|")


def test_the_reward_understands_the_reference():
    for answer_in, form in (
        ("tags", "I say <answer>{}</answer>"),
        ("text", "{}"),
        ("number", "It is {}."),
    ):
        prompt = source(tasks=SUMS, answer_in=answer_in)[3]
        right = json.loads(prompt.answer)["answer"]
        assert solves(completion=form.format(right), answer=prompt.answer, prompt=prompt.text) == 1.0
        assert solves(completion=form.format(int(right) + 1), answer=prompt.answer, prompt=prompt.text) == 0.0


def test_seeds_give_different_streams_and_the_held_out_one_is_always_the_same():
    assert asked(source(seed=1, tasks=SUMS)) == asked(source(seed=1, tasks=SUMS))
    neighbours = (
        asked(source(seed=1, tasks={"base_conversion": {}})),
        asked(source(seed=2, tasks={"base_conversion": {}})),
    )
    assert not set(neighbours[0]) & set(neighbours[1])
    assert asked(source("held_out", 1, tasks=SUMS)) == asked(source("held_out", 9, tasks=SUMS))


@pytest.mark.parametrize("tasks", [SUMS, {"products": {}, "lcm": {}, "maze": {}}, {"tower_of_hanoi": {}}])
def test_no_held_out_question_is_trained_on(tasks):
    held_out = set(asked(source("held_out", tasks=tasks), 100))
    assert not held_out & set(asked(source(tasks=tasks), 2000))


def test_a_task_with_too_few_questions_says_so():
    one = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    asked(source("held_out", tasks=one))  # a few hundred questions suffice
    with pytest.raises(ValueError, match=rf"count_bits with .* of {MOST_DRAWS} drawn none belongs to the .* split"):
        for split in ("train", "held_out"):
            source(split, tasks={"count_bits": {"min_n": 5, "max_n": 5}})[0]


def test_weights_are_shares_of_the_prompts():
    tasks = source(tasks={"gcd": {"weight": 3}, "lcm": {"weight": 1}})
    share = sum(tasks[uid].task == "gcd" for uid in range(400)) / 400
    assert 0.68 < share < 0.82  # 0.75, and three standard deviations of 0.022


def test_parameters_reach_the_task():
    tasks = source(tasks={"chain_sum": {"min_terms": 5, "max_terms": 5}})
    assert all(sum(tasks[uid].text.count(sign) for sign in [" + ", " - "]) == 4 for uid in range(20))


def test_stages_begin_at_their_prompt_in_any_order_of_asking():
    curriculum = [{"from": 0, "tasks": {"gcd": {}}}, {"from": 10, "tasks": {"lcm": {}}}, {"from": 12, "tasks": SUMS}]
    tasks = source(curriculum=curriculum)
    names = [tasks[uid].task for uid in range(14)]
    assert names == ["gcd"] * 10 + ["lcm"] * 2 + ["chain_sum"] * 2
    resumed = source(curriculum=curriculum)
    assert [resumed[uid].text for uid in (13, 11, 9)] == [tasks[uid].text for uid in (13, 11, 9)]


def test_held_out_prompts_come_from_the_last_stage_or_the_one_that_is_named():
    curriculum = [{"from": 0, "tasks": {"gcd": {}}}, {"from": 10, "tasks": {"lcm": {}}}]
    assert {source("held_out", curriculum=curriculum)[uid].task for uid in (0, 9, 10)} == {"lcm"}
    assert {source("held_out", curriculum=curriculum, stage=0)[uid].task for uid in (0, 9, 10)} == {"gcd"}
    assert source("train", curriculum=curriculum, stage=1)[0].task == "lcm"
    with pytest.raises(ValueError, match=r"eval.options.stage=2: there are 2 stages, 0 to 1"):
        source("held_out", curriculum=curriculum, stage=2)


def test_a_ramp_is_linear_from_the_start_of_its_stage_and_stays_at_its_end():
    assert [Ramp(2, 6, 8).at(position) for position in (0, 1, 2, 7, 8, 100)] == [2, 2, 3, 5, 6, 6]
    assert [Ramp(0.0, 1.0, 4).at(position) for position in (0, 1, 4, 5)] == [0.0, 0.25, 1.0, 1.0]
    ramp = {"chain_sum": {"max_terms": {"ramp": [2, 4], "over": 4}}}
    tasks = source(curriculum=[{"from": 0, "tasks": {"gcd": {}}}, {"from": 10, "tasks": ramp}])
    assert [parameters(tasks[uid])["max_terms"] for uid in (10, 11, 12, 13, 14, 50)] == [2, 2, 3, 3, 4, 4]
    assert parameters(source("held_out", tasks=ramp)[0])["max_terms"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "data.options needs either tasks .* or curriculum"),
        ({"tasks": SUMS, "curriculum": [{"from": 0, "tasks": SUMS}]}, "needs either tasks .* or curriculum"),
        ({"tasks": {"countdown": {}}}, "data.options: .* task 'countdown' is not allowed: .*parse_expr"),
        (
            {"tasks": {"gcd": {"max_termz": 3}}},
            r"gcd has no parameter 'max_termz'; its own are min_numbers, ",
        ),
        ({"tasks": {"gcd": {"seed": 3}}}, "gcd has no parameter 'seed'"),
        ({"tasks": {"gcd": {"min_numbers": 9}}}, r"gcd refuses {'min_numbers': 9}: max_numbers must be"),
        ({"tasks": {"gcd": {"max_numbers": {"ramp": [3, 1], "over": 5}}}}, "gcd refuses {'max_numbers': 1}"),
        ({"tasks": {"gcd": {"max_numbers": {"ramp": [3, 5]}}}}, r"task gcd: max_numbers=.*a ramp is"),
        ({"tasks": {"gcd": {"weight": 0}}}, "task gcd: weight=0 must be more than 0"),
        ({"tasks": SUMS, "answer_in": "box"}, "answer_in='box' must be one of tags, text, number"),
        ({"curriculum": [{"from": 5, "tasks": SUMS}]}, r"has stages from \[5\]; the first is from 0"),
        ({"curriculum": [{"from": 0, "tasks": SUMS}] * 2}, r"stages from \[0, 0\]"),
        ({"curriculum": [{"from": 0, "task": SUMS}]}, "a stage is"),
    ],
)
def test_mistakes_in_the_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        source(**options)


def test_the_config_reaches_the_source_from_the_command_line_too():
    from areal_jax.config import build
    from configs import reasoning_gym

    config = reasoning_gym.get_config()
    config.data.options.tasks.products.max_digits = 3
    config.unlock()
    config.eval.options = {"curriculum": ({"from": 0, "tasks": {"gcd": {}}},)}
    built = build(config)
    train = load_source(built.data.train, split="train", seed=1, tokenizer=Asking(), options=built.data.options)
    tasks = {train[uid].task: parameters(train[uid]) for uid in range(20)}
    assert set(tasks) == {"chain_sum", "products"} and tasks["products"]["max_digits"] == 3
    held_out = load_source(built.eval.data, split="held_out", seed=1, tokenizer=Asking(), options=built.eval.options)
    assert held_out[0].task == "gcd"
    assert set(build(reasoning_gym.get_config("gcd,lcm")).data.options["tasks"]) == {"gcd", "lcm"}
