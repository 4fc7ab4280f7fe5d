"""One prompt to one group: generate, score, and build the trajectories.

In: a prompt and the two services (a `GenerateFn` and a `Scorer`). Out: judged completions, and from them `Trajectory`s.
Called by the rollout controller and by evaluation, one task per prompt. Waits for the generation servers, then for the
reward pool.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Completion, GenerateFn, GenerateRequest, Prompt, Sampling, Trajectory


class Scorer(Protocol):
    """Judges the completions of one prompt; the reward pool is one."""

    async def score(self, completions: Sequence[str], *, answer: str, prompt: str) -> list[float]:
        """One verdict between 0.0 (wrong) and 1.0 (right) per completion. Raises when one cannot be judged."""
        ...


class RolloutFailed(Exception):
    """A prompt without a whole group of judged completions. `cause` is what it is counted under."""

    def __init__(self, uid: int, cause: str, error: Exception) -> None:
        super().__init__(f"prompt {uid} failed ({cause}): {type(error).__name__}: {error}")
        self.uid = uid
        self.cause = cause


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A completion, its text and the verdict on it (1.0 right, 0.0 wrong)."""

    completion: Completion
    text: str
    verdict: float

    @property
    def right(self) -> bool:
        return self.verdict >= 1.0

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"


@contextlib.contextmanager
def failing_as(uid: int, cause: str) -> Iterator[None]:
    """Turns what others' code raises inside into RolloutFailed; an exception may carry a `cause` of its own.

    It stands around the prompt source, the generation servers and the reward, and nowhere else: what is wrong in our
    own code ends the run.
    """
    try:
        yield
    except Exception as error:
        raise RolloutFailed(uid, getattr(error, "cause", cause), error) from error


@contextlib.contextmanager
def first_error() -> Iterator[None]:
    """Around a TaskGroup: what it raises is the first thing that went wrong, not a group with one member."""
    try:
        yield
    except ExceptionGroup as errors:
        error = errors.exceptions[0]
        raise error from error.__cause__


def group_request(prompt: Prompt, *, samples: int, sampling: Sampling) -> GenerateRequest:
    return GenerateRequest(
        uid=prompt.uid, prompt_tokens=prompt.tokens, samples=tuple(range(samples)), sampling=sampling
    )


async def generate_and_score(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    generate: GenerateFn,
    scorer: Scorer,
    tokenizer: Tokenizer,
    cut_off: str,
) -> list[Judged]:
    """All samples of the request, judged, in its order. Raises RolloutFailed when a single one is missing.

    With `cut_off="wrong"` (reward.cut_off) a completion that does not end by itself is wrong, whatever it says.
    """
    with failing_as(prompt.uid, "generation"):
        completions = await generate(request)
        lengths = [len(completion.tokens) for completion in completions]
        if len(lengths) != len(request.samples) or 0 in lengths:
            raise ValueError(f"asked for {len(request.samples)} completions, got completions of {lengths} tokens")
    texts = [tokenizer.decode(completion.tokens) for completion in completions]
    with failing_as(prompt.uid, "reward"):
        verdicts = await scorer.score(texts, answer=prompt.answer, prompt=prompt.text)
    judged = [Judged(*each) for each in zip(completions, texts, verdicts, strict=True)]
    if cut_off == "wrong":
        return [dataclasses.replace(each, verdict=0.0) if each.truncated else each for each in judged]
    return judged


def build_trajectories(
    prompt: Prompt, group: Sequence[Judged], *, correct: float, incorrect: float
) -> list[Trajectory]:
    """The group's trajectories; reward = incorrect + verdict * (correct - incorrect)."""
    return [
        Trajectory(
            uid=prompt.uid,
            sample=sample,
            prompt_tokens=prompt.tokens,
            tokens=judged.completion.tokens,
            behav_logprobs=judged.completion.logprobs,
            versions=judged.completion.versions,
            reward=incorrect + judged.verdict * (correct - incorrect),
            truncated=judged.truncated,
        )
        for sample, judged in enumerate(group)
    ]
