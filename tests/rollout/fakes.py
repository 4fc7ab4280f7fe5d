"""Stand-ins for everything that the rollout controller talks to; the trajectory queue is the real one."""

import asyncio
import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from areal_jax.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    GenerationConfig,
    ObjectiveConfig,
    RolloutConfig,
    TrainerConfig,
)
from areal_jax.rollout import controller
from areal_jax.rollout.local_queue import LocalQueue
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.types import Completion, GenerateRequest, Prompt


def make_config(
    *, prompts_per_step=2, group_size=2, slots=64, steps=100, every=0, eval_prompts=2, eval_samples=1, **rollout
) -> Config:
    return Config(
        data=DataConfig(max_prompt_tokens=8),
        rollout=RolloutConfig(**{"group_size": group_size, "max_new_tokens": 4, "max_staleness": 0, **rollout}),
        generation=GenerationConfig(slots=slots),
        trainer=TrainerConfig(prompts_per_step=prompts_per_step, steps=steps, objective=ObjectiveConfig(minibatches=1)),
        eval=EvaluationConfig(every=every, prompts=eval_prompts, samples=eval_samples),
    )


class FakeTokenizer:
    """Token i is the word "i"; 0 ends."""

    eos_ids = (0,)
    chat_template = ""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: np.ndarray) -> str:
        return " ".join(str(token) for token in ids if token)


class Characters(FakeTokenizer):
    """Any text; a token is a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


class Numbers:
    """Prompt uid is the number first + uid; some of them raise or are too long."""

    def __init__(self, *, first=0, too_long=(), raising=()):
        self.first, self.too_long, self.raising = first, too_long, raising

    def __getitem__(self, uid: int) -> Prompt:
        if uid in self.raising:
            raise KeyError(f"no problem {uid}")
        length = 9 if uid in self.too_long else 1
        number = self.first + uid
        return Prompt(uid=uid, tokens=np.full(length, number + 1, np.int32), text=str(number), answer=str(number))


class FakeServers:
    """Generates at once, or when released; remembers what was asked. `version` is that of the weights it holds."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[GenerateRequest] = []
        self.cancelled: list[int] = []
        self.active = 0
        self.most_active = 0
        self.most_evaluations = 0
        self.evaluations = 0
        self.evaluated_samples = 0  # in flight
        self.most_evaluated_samples = 0
        self.hold: Callable[[GenerateRequest], asyncio.Event | None] = lambda request: None
        self.answer: Callable[[GenerateRequest, int], Completion | Exception] = lambda request, sample: completion(
            request, self.version
        )

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        self.asked.append(request)
        self._count(request, 1)
        try:
            await asyncio.sleep(0)
            event = self.hold(request)
            if event is not None:
                await event.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.uid)
            raise
        finally:
            self._count(request, -1)
        answers = [self.answer(request, sample) for sample in request.samples]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _count(self, request: GenerateRequest, change: int) -> None:
        self.active += change * len(request.samples)
        self.evaluations += change * request.evaluation
        self.evaluated_samples += change * request.evaluation * len(request.samples)
        self.most_evaluated_samples = max(self.most_evaluated_samples, self.evaluated_samples)
        self.most_active = max(self.most_active, self.active)
        self.most_evaluations = max(self.most_evaluations, self.evaluations)

    def uids(self) -> list[int]:
        """Prompts of rollouts, in the order in which they were asked."""
        return [request.uid for request in self.asked if not request.evaluation]


def completion(request: GenerateRequest, version: int, *, length=3, reason="stop") -> Completion:
    """`length` tokens: the prompt's first one again and again, and the end."""
    tokens = np.full(length, request.prompt_tokens[0], np.int32)
    if reason == "stop":
        tokens[-1] = 0
    return Completion(tokens, np.full(length, -0.5, np.float32), np.full(length, version, np.int32), reason)


class FakeScorer:
    """Calls a function in this process; an exception stays one."""

    def __init__(self, verdict: Callable[[str, str], float] | None = None) -> None:
        self.verdict = verdict or (lambda text, answer: float(int(answer) % 2))
        self.calls = 0

    async def score(self, completions, *, answer: str, prompt: str) -> list[float]:
        self.calls += 1
        await asyncio.sleep(0)
        return [self.verdict(text, answer) for text in completions]


class Run:
    """A controller with its surroundings; the test plays the trainer."""

    def __init__(
        self, config: Config, *, queue=None, train=None, held_out=None, scorer=None, servers=None, tokenizer=None
    ) -> None:
        self.config = config
        self.queue = queue or TrajectoryQueue(
            batch_size=config.batch_size,
            group_size=config.rollout.group_size,
            max_staleness=config.rollout.max_staleness,
            overdue=config.rollout.overdue,
        )
        self.servers = servers or FakeServers()
        self.lines: dict[str, list[dict]] = collections.defaultdict(list)
        self.kept: dict[str, list[dict]] = {}
        self.stop = asyncio.Event()
        self.now = 0.0
        self.services = controller.Services(
            generate=self.servers,
            scorer=scorer or FakeScorer(),
            queue=LocalQueue(self.queue),
            tokenizer=tokenizer or FakeTokenizer(),
            record=lambda name, line: self.lines[name].append(line),
            keep=lambda name, lines: self.kept.update({name: lines}),
            final_answer=lambda text: text.split(" ")[-1],
            clock=lambda: self.now,
            report_s=0.01,
        )
        self.task = asyncio.ensure_future(
            controller.run(
                config,
                self.services,
                train=train or Numbers(),
                held_out=held_out or Numbers(first=1000),
                stop=self.stop,
            )
        )

    async def settle(self, seconds: float = 0.15) -> None:
        """Lets everything happen that can."""
        await asyncio.sleep(seconds)

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                if self.task.done():
                    self.task.result()
                    assert condition(), "the controller ended before"
                await asyncio.sleep(0.005)

    async def step(self, version: int):
        """One training step from `version` to the next, with the weights at the servers before the announcement."""
        await self.until(lambda: self.queue.waiting >= self.config.batch_size)
        batch = self.queue.get(version, timeout_s=0.0)
        self.servers.version = version + 1
        self.queue.announce(version + 1)
        return batch

    async def finish(self) -> None:
        self.queue.announce(self.queue.progress().version, finished=True)
        async with asyncio.timeout(10):
            await self.task

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(10):
            await self.task


def play(scenario: Callable[[], object]) -> None:
    """Runs an async test, and fails when it left a task behind."""

    async def checked():
        try:
            await scenario()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
        assert not left, left

    asyncio.run(checked())


def with_data(config: Config, **data) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))
