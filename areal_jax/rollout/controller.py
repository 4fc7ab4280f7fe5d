"""The rollout controller: keeps as many rollouts going as the staleness gate allows, and evaluates beside them.

    for uid in prompts that are not done:
        wait until gate and slots have room            <- announcements (version, lost) of the trainer
        group = generate, score                        -> queue.put(group), or queue.discard(uid, count, cause)

Consumes: prompts, and the trajectory queue's announcements. Produces: whole groups for the queue; lines of
rollout.jsonl, evaluations.jsonl and completions.jsonl; a file of records for each evaluation. Waits for: the gate.
Unblocked by: the announcement of a version, which comes after every generation server holds it. Ends: when training is
announced as finished (it then evaluates once more), when `stop` is set, or by an error.

It stores nothing: on a restart the queue's `Progress` says which prompts are done; all others are started, in order.
"""

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from areal_jax.config import Config
from areal_jax.rollout.evaluation import askable, evaluate, plan
from areal_jax.rollout.gate import StalenessGate
from areal_jax.rollout.prompts import PromptTooLong, epoch_size, take
from areal_jax.rollout.tally import Tally
from areal_jax.rollout.workflow import (
    Judged,
    RolloutFailed,
    Scorer,
    build_trajectories,
    failing_as,
    first_error,
    generate_and_score,
    group_request,
)
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Announcement, GenerateFn, Progress, Prompt, PromptSource, Sampling, Trajectory

log = logging.getLogger(__name__)

IN_FLIGHT_PER_SLOT = 2  # one that runs and one that waits, so that a freed slot is filled at once
EVALUATION_SHARE = 4  # during training, evaluation takes one slot of this many: rollouts never stop for it
FILTERED_BATCHES = 4  # batches' worth of groups without variance, one after the other, that end the run


class QueueClient(Protocol):
    """The trajectory queue, in this process or in the trainer's."""

    async def put(self, group: Sequence[Trajectory]) -> bool: ...
    async def discard(self, uid: int, count: int, cause: str) -> None: ...
    async def progress(self) -> Progress: ...
    def announcements(self) -> AsyncIterator[Announcement]: ...


@dataclasses.dataclass(frozen=True)
class Services:
    """What the controller works with.

    `record` takes a file's name without ".jsonl" and a line for it, `keep` a name and the records of an evaluation.
    """

    generate: GenerateFn
    scorer: Scorer
    queue: QueueClient
    tokenizer: Tokenizer
    record: Callable[[str, dict[str, Any]], None]
    keep: Callable[[str, Sequence[dict[str, Any]]], None]
    final_answer: Callable[[str], str]  # of a completion, "" for none: its vote in maj@k
    clock: Callable[[], float] = time.time
    report_s: float = 1.0  # between two lines of rollout.jsonl


async def run(
    config: Config, services: Services, *, train: PromptSource, held_out: PromptSource, stop: asyncio.Event
) -> None:
    """Works until training is finished, `stop` is set or something fails; nothing is in flight when it returns.

    Raises RuntimeError when too many prompts in a row fail or are filtered; what else goes wrong is raised as it is.
    """

    async def work_from_progress() -> None:
        progress = await services.queue.progress()  # comes when the trainer is ready
        await Controller(config, services, progress, train=train, held_out=held_out).work()

    work = asyncio.ensure_future(work_from_progress())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        stopped.cancel()
        await asyncio.wait({work, stopped})
    if not work.cancelled():
        work.result()


def unfinished(progress: Progress) -> Iterator[int]:
    """The prompts to start, in order, without end."""
    done = frozenset(progress.done)
    return (uid for uid in itertools.count(progress.low) if uid not in done)


class Controller:
    """One `run`. Everything here belongs to the event loop's thread; `_changed` is notified of each change."""

    def __init__(
        self, config: Config, services: Services, progress: Progress, *, train: PromptSource, held_out: PromptSource
    ) -> None:
        self._config = config
        self._services = services
        self._progress = progress
        self._train = train
        self._held_out = held_out
        self._group_size = config.rollout.group_size
        self._slots = config.generation.slots * len(config.generation.addresses)
        self._most_in_flight = max(IN_FLIGHT_PER_SLOT * self._slots, self._group_size)
        self._gate = StalenessGate(
            batch_size=config.batch_size,
            max_staleness=config.rollout.max_staleness,
            counted=progress.counted,
            version=progress.version,
            lost=progress.lost,
        )
        self._tally = Tally(
            group_size=self._group_size,
            max_failures=config.rollout.max_consecutive_failures,
            max_filtered=FILTERED_BATCHES * config.trainer.prompts_per_step,
            max_too_long=2 * epoch_size(train),  # the one that fits may come first in an epoch and last in the next
        )
        self._changed = asyncio.Condition()
        self._finished = False
        self._closed_s = 0.0
        self._closed: list[tuple[float, float]] = []  # (begin, end), since the last line
        self._closed_since: float | None = None

    async def work(self) -> None:
        """The whole job, from where the queue stands."""
        self._check_some_fit()
        if self._progress.version == 0:
            await self._evaluate("before", self._most_in_flight, self._config.generation.slots)
        with first_error():
            await self._rollouts()
        await self._evaluate("after", self._most_in_flight, self._config.generation.slots)

    async def _rollouts(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = {tasks.create_task(part) for part in (self._follow(), self._report(), self._evaluate_along())}
            for uid in unfinished(self._progress):
                if not await self._room():
                    break
                self._gate.start(self._group_size)
                task = tasks.create_task(self._rollout(uid, self._tally.start()))
                running.add(task)
                task.add_done_callback(running.discard)
            for task in list(running):
                task.cancel()

    async def _room(self) -> bool:
        """Waits until a group may start; False when training is finished."""
        async with self._changed:
            while not self._finished:
                is_open = self._gate.may_start(self._group_size)
                self._measure_gate(is_open)
                if is_open and self._tally.in_flight + self._group_size <= self._most_in_flight:
                    return True
                await self._changed.wait()
            return False

    async def _follow(self) -> None:
        """Hands the trainer's announcements to the gate."""
        async for announcement in self._services.queue.announcements():
            async with self._changed:
                self._gate.advance(announcement.version, announcement.lost)
                self._finished = announcement.finished
                self._changed.notify_all()
            if announcement.finished:
                return
        raise RuntimeError(
            f"the trainer's announcements ended at version {self._gate.version}, before training was finished; the "
            "trainer's log says why"
        )

    # One prompt.

    async def _rollout(self, uid: int, number: int) -> None:
        try:
            prompt, group = await self._generate(uid)
        except RolloutFailed as failure:
            await self._services.queue.discard(uid, self._group_size, failure.cause)
            self._count_failure(number, failure)
        else:
            self._tally.finish(group)
            await self._hand_over(number, prompt, group)
        async with self._changed:
            self._tally.end()
            self._changed.notify_all()

    def _count_failure(self, number: int, failure: RolloutFailed) -> None:
        error = failure.__cause__
        if isinstance(error, PromptTooLong):
            line = {"uid": failure.uid, "cause": failure.cause, "tokens": error.tokens, "limit": error.limit}
            self._services.record("skipped", line)
            self._tally.skip(number, failure)
        else:
            self._tally.fail(number, failure)

    def _check_some_fit(self) -> None:
        """Raises ValueError when every prompt to train on is too long; looks no further than the first that is not."""
        lengths = []
        for uid in range(epoch_size(self._train)):
            try:
                self._take(uid)
            except RolloutFailed as failure:
                if isinstance(failure.__cause__, PromptTooLong):
                    lengths.append(failure.__cause__.tokens)
                    continue
            return  # it fits, or fails in another way, which is counted when its turn comes
        raise ValueError(
            f"data.max_prompt_tokens={self._config.data.max_prompt_tokens} leaves out every prompt of data.train: of "
            f"{len(lengths)} the shortest has {min(lengths, default=0)} tokens; raise it"
        )

    def _take(self, uid: int) -> Prompt:
        with failing_as(uid, "prompt"):
            return take(self._train, uid, max_prompt_tokens=self._config.data.max_prompt_tokens)

    async def _generate(self, uid: int) -> tuple[Prompt, list[Judged]]:
        prompt = self._take(uid)
        group = await generate_and_score(
            group_request(prompt, samples=self._group_size, sampling=self._sampling()),
            prompt,
            generate=self._services.generate,
            scorer=self._services.scorer,
            tokenizer=self._services.tokenizer,
            cut_off=self._config.reward.cut_off,
        )
        return prompt, group

    async def _hand_over(self, number: int, prompt: Prompt, group: list[Judged]) -> None:
        if self._config.rollout.drop_zero_variance and len({judged.verdict for judged in group}) == 1:
            await self._services.queue.discard(prompt.uid, len(group), "zero_variance")
            self._tally.filter(number)
            return
        reward = self._config.reward
        await self._services.queue.put(
            build_trajectories(prompt, group, correct=reward.correct, incorrect=reward.incorrect)
        )

    def _sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self._config.rollout.max_new_tokens,
            temperature=self._config.rollout.temperature,
            seed=self._config.run.seed,
            stop_tokens=self._services.tokenizer.eos_ids,
        )

    # Evaluation.

    async def _evaluate_along(self) -> None:
        """One evaluation at a time, whenever another multiple of eval.every versions has been reached."""
        every = self._config.eval.every
        if every == 0:
            return
        due = self._progress.version - self._progress.version % every + every
        while True:
            async with self._changed:
                while self._gate.version < due:
                    await self._changed.wait()
            due = self._gate.version - self._gate.version % every + every
            share = self._config.generation.slots // EVALUATION_SHARE
            await self._evaluate("during", self._slots // EVALUATION_SHARE, share)

    async def _evaluate(self, phase: str, in_flight: int, per_request: int) -> None:
        services, stop_tokens = self._services, self._services.tokenizer.eos_ids
        began, version = services.clock(), self._gate.version
        planned = plan(self._config, stop_tokens=stop_tokens, in_flight=in_flight, per_request=per_request)
        evaluation = await evaluate(
            askable(self._held_out, planned),
            planned,
            generate=services.generate,
            scorer=services.scorer,
            tokenizer=services.tokenizer,
            final_answer=services.final_answer,
        )
        now = services.clock()
        await asyncio.to_thread(services.keep, f"{version:06d}-{phase}", evaluation.records)
        line = {"phase": phase, "version": version, "time": now, "seconds": now - began, **evaluation.figures()}
        services.record("evaluations", line)
        for example in evaluation.examples() if phase != "during" else ():
            services.record("completions", {"phase": phase, **example})
        log.info("version %d, evaluation %s training: %.1f %% right", version, phase, 100 * line["accuracy"])

    # What is seen of it.

    async def _report(self) -> None:
        """A line of rollout.jsonl every `report_s`, and a last one at the end."""
        try:
            while True:
                await asyncio.sleep(self._services.report_s)
                self._record()
        finally:
            self._record()

    def _record(self) -> None:
        self._measure_gate(self._closed_since is None)
        closed, self._closed = self._closed, []
        line = {"time": self._services.clock(), **self._tally.line()}
        self._services.record("rollout", {**line, "gate_closed_s": self._closed_s, "gate_closed": closed})

    def _measure_gate(self, is_open: bool) -> None:
        """Adds up the time during which the gate was the thing to wait for."""
        now = self._services.clock()
        if self._closed_since is not None:
            self._closed_s += now - self._closed_since
            unbroken = bool(self._closed) and self._closed[-1][1] == self._closed_since
            begin = self._closed.pop()[0] if unbroken else self._closed_since
            self._closed.append((begin, now))
        self._closed_since = None if is_open else now
