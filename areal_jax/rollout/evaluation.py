"""Evaluation: the score on held-out prompts, with the versions that it measured.

In: a prompt source and the two services. Out: an `Evaluation`, which makes one line of evaluations.jsonl and a few of
completions.jsonl. Called by the rollout controller before, during and after training. Waits for the generation servers
and the reward pool; rollouts and training go on meanwhile. A weight swap in the middle is no error: each token carries
the version that sampled it, and the record names them all.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from areal_jax.rollout.prompts import PromptTooLong, take
from areal_jax.rollout.workflow import Judged, Scorer, first_error, generate_and_score, group_request
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import GenerateFn, Prompt, PromptSource, Sampling

log = logging.getLogger(__name__)

SHOWN = 8  # completions kept for a person to read


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Judged completions by prompt, in the order of the source, and the prompts that were too long to be asked."""

    prompts: Sequence[Prompt]
    groups: Sequence[Sequence[Judged]]
    too_long: Sequence[int]

    def figures(self) -> dict[str, Any]:
        """What a line of evaluations.jsonl says; weights of `version_min` to `version_max` sampled the tokens."""
        judged = [each for group in self.groups for each in group]
        versions = np.unique(np.concatenate([each.completion.versions for each in judged]))
        return {
            "version_min": int(versions[0]),
            "version_max": int(versions[-1]),
            "accuracy": sum(each.right for each in judged) / len(judged),
            "prompts": len(self.prompts),
            "samples": len(self.groups[0]),
            "length_mean": sum(len(each.completion.tokens) for each in judged) / len(judged),
            "truncated": sum(each.truncated for each in judged) / len(judged),
            "too_long": len(self.too_long),
        }

    def examples(self) -> list[dict[str, Any]]:
        """The first sample of the first prompts, with their texts."""
        return [
            {
                "uid": prompt.uid,
                "version": int(group[0].completion.versions[-1]),
                "prompt": prompt.text,
                "answer": prompt.answer,
                "completion": group[0].text,
                "right": group[0].right,
                "finish_reason": group[0].completion.finish_reason,
            }
            for prompt, group in list(zip(self.prompts, self.groups, strict=True))[:SHOWN]
        ]


async def evaluate(
    source: PromptSource,
    *,
    prompts: int,
    samples: int,
    in_flight: int,
    sampling: Sampling,
    max_prompt_tokens: int,
    generate: GenerateFn,
    scorer: Scorer,
    tokenizer: Tokenizer,
) -> Evaluation:
    """The first `prompts` prompts of a source (all of it, if it has fewer), `in_flight` of them at a time.

    Prompts that are too long are left out and counted. Everything else that fails raises (RolloutFailed): a score with
    holes in it, or with failures counted as wrong, would be another figure under the same name.
    """
    asked, too_long = _askable(source, prompts, max_prompt_tokens)
    room = asyncio.Semaphore(in_flight)

    async def one(prompt: Prompt) -> list[Judged]:
        request = dataclasses.replace(group_request(prompt, samples=samples, sampling=sampling), evaluation=True)
        async with room:
            return await generate_and_score(request, prompt, generate=generate, scorer=scorer, tokenizer=tokenizer)

    with first_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(prompt)) for prompt in asked]
    return Evaluation(prompts=asked, groups=[task.result() for task in running], too_long=too_long)


def _askable(source: PromptSource, prompts: int, max_prompt_tokens: int) -> tuple[list[Prompt], list[int]]:
    asked: list[Prompt] = []
    too_long: list[int] = []
    for uid in range(min(prompts, len(source)) if isinstance(source, Sized) else prompts):
        try:
            asked.append(take(source, uid, max_prompt_tokens=max_prompt_tokens))
        except PromptTooLong:
            too_long.append(uid)
    if too_long:
        log.warning(
            "%d held-out prompts are longer than data.max_prompt_tokens=%d and left out: %s",
            len(too_long),
            max_prompt_tokens,
            too_long,
        )
    if not asked:
        raise ValueError(
            f"data.max_prompt_tokens={max_prompt_tokens} leaves out all {len(too_long)} held-out prompts; raise it"
        )
    return asked, too_long
