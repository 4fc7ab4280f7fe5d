"""Problems of the package reasoning-gym without end: tasks by name, with weights, parameters and a curriculum.

    data.train   = "areal_jax.rollout.reasoning_gym:Tasks"
    data.options = {"tasks": {"chain_sum": {"weight": 2, "min_terms": 2, "max_terms": 3}, "gcd": {}}}

In: a split, a seed, a position. Out: the problem at that position, the same one for ever and in any process.
A quarter of all questions, chosen by the hash of their text, are held out: no training split of any seed contains one,
however few different questions a task has. Called by `rollout.prompts.load_source`; waits for nobody. Which tasks may
be asked for, and why not the others: `areal_jax.gym_tasks`. The verifier: `areal_jax.rewards.reasoning_gym:solves`.
"""

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax import gym_tasks
from areal_jax.rollout.prompts import SETTINGS
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Prompt

HELD_OUT_OF = 4  # one question of so many
MOST_DRAWS = 200  # for one prompt; a task with many questions needs more than that once in 10^25 prompts
NUMBERS = 2**31  # items of a task: reasoning_gym makes each one from a number
INSTRUCTIONS = {
    "tags": "End with the answer between <answer> and </answer>, with nothing else between them.",
    "text": "Reply with the answer and nothing else.",
    "number": "Reply with the answer, a number.",
}


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A parameter that goes from `first` to `last` over so many prompts of its stage, and stays there."""

    first: float
    last: float
    over: int

    def at(self, position: int) -> float:
        done = min(position, self.over)
        if isinstance(self.first, int) and isinstance(self.last, int):
            return self.first + (self.last - self.first) * done // self.over
        return self.first + (self.last - self.first) * done / self.over


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    weight: float
    parameters: Mapping[str, Any]  # a value may be a Ramp

    def parameters_at(self, position: int) -> dict[str, Any]:
        return {key: value.at(position) if isinstance(value, Ramp) else value for key, value in self.parameters.items()}


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is asked from prompt `start` on."""

    start: int
    tasks: tuple[Task, ...]

    @property
    def end(self) -> int:
        """A position at which every ramp has come to its last value."""
        return max([0, *(r.over for task in self.tasks for r in task.parameters.values() if isinstance(r, Ramp))])


class Tasks:
    """Prompts without end, drawn from the tasks that the stage of their position names.

    `tasks` maps a task's name to its parameters, those of the reasoning_gym config of that name, and its "weight" (1
    when left out), its share of the prompts. A number may be a ramp: {"ramp": [2, 8], "over": 20000} goes linearly from
    2 to 8 in 20,000 prompts and stays 8. `curriculum` is a list of stages instead, [{"from": 0, "tasks": {...}},
    {"from": 20000, "tasks": {...}}]; "from" counts prompts, and ramps count from the start of their stage. Without
    `stage`, training goes through the stages by position, and held-out prompts are those of the last one, its ramps at
    their ends; with `stage` (0 the first, -1 the last) all prompts come from the end of that one. `answer_in` says
    where the answer is to stand: in "tags" (<answer>...</answer>, the last ones count), as the whole "text" of the
    completion, or as the last "number" in it, for tasks whose answers are numbers. `system` is the chat's system
    message.

    Difficulty follows the position and not the success rate so that a prompt stays a pure function of its position:
    groups end out of order on asynchronous servers, and a run that is resumed or replayed must ask the same. An
    adaptive curriculum would have to be decided in one place (the trainer, which sees each reward once and in order),
    kept in the checkpoint as a list of (first position, difficulty), and told to the source before it reaches them.

    Raises ValueError for tasks, parameters and stages that do not exist, ModuleNotFoundError without reasoning-gym.
    """

    def __init__(
        self,
        *,
        split: str,
        seed: int,
        tokenizer: Tokenizer,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        curriculum: Sequence[Mapping[str, Any]] = (),
        stage: int | None = None,
        answer_in: str = "tags",
        system: str = "",
    ) -> None:
        setting = SETTINGS[split][1]
        if answer_in not in INSTRUCTIONS:
            raise ValueError(f"{setting}.answer_in={answer_in!r} must be one of {', '.join(INSTRUCTIONS)}")
        if bool(tasks) == bool(curriculum):
            raise ValueError(
                f"{setting} needs either tasks ({{task: parameters}}) or curriculum ([{{'from': 0, 'tasks': ...}}, "
                f"...]); tasks={tasks}, curriculum={curriculum}"
            )
        stages = read_stages(curriculum or [{"from": 0, "tasks": tasks}], setting)
        self._by_position = split == "train" and stage is None
        self._stages = stages if self._by_position else [_chosen(stages, -1 if stage is None else stage, setting)]
        self._held_out = split == "held_out"
        self._stream = "held_out" if self._held_out else f"train/{seed}"
        self._tokenizer, self._answer_in, self._system = tokenizer, answer_in, system

    def __getitem__(self, uid: int) -> Prompt:
        rng = random.Random(f"{self._stream}/{uid}")
        stage = next(stage for stage in reversed(self._stages) if stage.start <= uid or not self._by_position)
        task = rng.choices(stage.tasks, [task.weight for task in stage.tasks])[0]
        parameters = task.parameters_at(uid - stage.start if self._by_position else stage.end)
        entry = self._draw(task.name, parameters, rng)
        text, tokens = self._tokenizer.ask(
            f"{entry['question']}\n\n{INSTRUCTIONS[self._answer_in]}", system=self._system
        )
        reference = {
            "task": task.name,
            "parameters": parameters,
            "answer_in": self._answer_in,
            "answer": entry["answer"],
            "metadata": entry["metadata"],
        }
        return Prompt(
            uid=uid, tokens=np.array(tokens, np.int32), text=text, answer=json.dumps(reference), task=task.name
        )

    def _draw(self, task: str, parameters: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """The first of a sequence of random entries that belongs to this split."""
        for _ in range(MOST_DRAWS):
            entry = gym_tasks.entry(task, parameters, rng.randrange(NUMBERS))
            if held_out(entry["question"]) == self._held_out:
                return entry
        raise ValueError(
            f"{task} with {dict(parameters)} has too few different questions: of {MOST_DRAWS} drawn none belongs to "
            f"the {'held-out' if self._held_out else 'training'} split, which is {HELD_OUT_OF - 1} of {HELD_OUT_OF} "
            "questions for training by the hash of their text; make it harder, or take another task"
        )


def held_out(question: str) -> bool:
    return hashlib.md5(question.encode(), usedforsecurity=False).digest()[0] % HELD_OUT_OF == 0


def read_stages(curriculum: Sequence[Mapping[str, Any]], setting: str) -> list[Stage]:
    """The stages in order, with every task and parameter checked. Raises ValueError."""
    for stage in curriculum:
        if set(stage) != {"from", "tasks"} or not stage["tasks"]:
            raise ValueError(
                f'{setting}: a stage is {{"from": prompt, "tasks": {{task: parameters}}}}; this is {stage}'
            )
    starts = [stage["from"] for stage in curriculum]
    if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"{setting}.curriculum has stages from {starts}; the first is from 0, each other from a later prompt"
        )
    return [
        Stage(stage["from"], tuple(_task(name, values, setting) for name, values in stage["tasks"].items()))
        for stage in curriculum
    ]


def _task(name: str, values: Mapping[str, Any], setting: str) -> Task:
    gym_tasks.check_allowed(name, setting)
    place = f"{setting}, task {name}"
    weight = values.get("weight", 1)
    if not weight > 0:
        raise ValueError(f"{place}: weight={weight} must be more than 0; to leave the task out, take its name out")
    parameters = {key: _value(value, f"{place}: {key}") for key, value in values.items() if key != "weight"}
    task = Task(name, weight, parameters)
    ends = {ramp.over for ramp in parameters.values() if isinstance(ramp, Ramp)}
    for position in sorted({0} | ends):  # linear in between, so that these decide for all
        gym_tasks.check_parameters(name, task.parameters_at(position), place)
    return task


def _value(value: Any, place: str) -> Any:
    if not (isinstance(value, Mapping) and "ramp" in value):
        return value
    ends = value["ramp"]
    if set(value) != {"ramp", "over"} or len(ends) != 2 or value["over"] < 1:
        raise ValueError(f'{place}={dict(value)}: a ramp is {{"ramp": [first, last], "over": prompts, at least 1}}')
    return Ramp(ends[0], ends[1], value["over"])


def _chosen(stages: Sequence[Stage], number: int, setting: str) -> Stage:
    if not -len(stages) <= number < len(stages):
        raise ValueError(f"{setting}.stage={number}: there are {len(stages)} stages, 0 to {len(stages) - 1}")
    return stages[number]
