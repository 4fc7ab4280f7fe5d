"""Evaluation: the score on held-out prompts, as papers report it, with the versions that it measured.

In: a prompt source and the services that generate and judge. Out: an `Evaluation`: a record for each problem with all
of its completions (a line of JSONL that a person can read), and figures of them. Called by the rollout controller
before, during and after training, and by `areal_jax.evaluate`. Waits for the generation servers and the reward pool;
rollouts and training go on meanwhile. A weight swap in the middle is no error: each token carries the version that
sampled it, and the records name them.

A record:
    uid, prompt, answer, task   the problem: its position in the source, the text as asked, the reference
    n, right                    samples, and how many of them are right
    samples                     for each: text, verdict, right, final_answer ("" = none), tokens (their number),
                                finish_reason ("length" = cut off), version_min, version_max (-1 = never trained here)
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from areal_jax.algorithms import estimators
from areal_jax.config import Config
from areal_jax.metrics import percentiles
from areal_jax.rollout.prompts import PromptTooLong, take
from areal_jax.rollout.workflow import Judged, Scorer, first_error, generate_and_score, group_request
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import GenerateFn, Prompt, PromptSource, Sampling

log = logging.getLogger(__name__)

SHOWN = 8  # completions that the summary of a run chooses from
SEED_MASK = 0x6576616C  # "eval": the sampling keys of evaluation are none of training's, whose seed is run.seed itself

Record = dict[str, Any]
FinalAnswer = Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked, and how much of it at a time."""

    prompts: int  # the first ones of the source; 0 = all of it
    samples: int  # of each
    sampling: Sampling
    max_prompt_tokens: int
    in_flight: int  # samples that are generated and judged at a time
    per_request: int  # samples of a prompt that one request to a server asks for; the others follow in more of them
    cut_off: str  # reward.cut_off


def plan(config: Config, *, stop_tokens: tuple[int, ...], in_flight: int, per_request: int) -> Plan:
    """What the section `eval` of a config asks for. The one place where the sampling of evaluation is made.

    A server takes no request of more samples than may wait there, so that no request asks for more.
    """
    settings = config.eval
    return Plan(
        prompts=settings.prompts,
        samples=settings.samples,
        sampling=Sampling(
            max_new_tokens=config.eval_max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=config.run.seed ^ SEED_MASK,
            stop_tokens=stop_tokens,
        ),
        max_prompt_tokens=config.data.max_prompt_tokens,
        in_flight=max(1, in_flight),
        per_request=max(1, min(per_request, in_flight, settings.samples, config.generation.max_waiting)),
        cut_off=config.reward.cut_off,
    )


@dataclasses.dataclass(frozen=True)
class Asked:
    """The prompts to ask, in the order of the source, and the uids of those that are too long to be asked."""

    prompts: Sequence[Prompt]
    too_long: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Records in the order of the source, and the prompts that were too long to be asked."""

    records: Sequence[Record]
    too_long: Sequence[int]
    sampling: Sampling

    def figures(self) -> dict[str, Any]:
        """What a line of evaluations.jsonl says: `figures` of the records, and how they came about."""
        return {
            **figures(self.records),
            "too_long": len(self.too_long),
            "too_long_uids": list(self.too_long),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "max_new_tokens": self.sampling.max_new_tokens,
            "sampling_seed": self.sampling.seed,
        }

    def examples(self) -> list[dict[str, Any]]:
        """The first sample of the first prompts, with their texts."""
        return [
            {
                "uid": record["uid"],
                "version": record["samples"][0]["version_max"],
                "prompt": record["prompt"],
                "answer": record["answer"],
                "completion": record["samples"][0]["text"],
                "right": record["samples"][0]["right"],
                "finish_reason": record["samples"][0]["finish_reason"],
            }
            for record in self.records[:SHOWN]
        ]


def figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of an evaluation, from its records alone; all have the same number n of samples.

    `accuracy` is avg@n, also given under that name. Lengths are in tokens. Weights of `version_min` to `version_max`
    sampled the tokens.
    """
    judged = [sample for record in records for sample in record["samples"]]
    right_PN = np.array([[sample["right"] for sample in record["samples"]] for record in records], np.bool_)
    answers = [[sample["final_answer"] for sample in record["samples"]] for record in records]
    n = right_PN.shape[1]
    average = estimators.average_at_n(right_PN)
    return {
        "version_min": min(sample["version_min"] for sample in judged),
        "version_max": max(sample["version_max"] for sample in judged),
        "accuracy": average,
        f"avg@{n}": average,
        **({"standard_error": estimators.standard_error(right_PN)} if len(records) > 1 else {}),
        **{f"pass@{k}": estimators.pass_at_k(right_PN, k) for k in estimators.ks(n)},
        **{f"maj@{k}": estimators.majority_at_k(right_PN, answers, k) for k in estimators.ks(n)},
        "prompts": len(records),
        "samples": n,
        **{f"length_{name}": value for name, value in _lengths(judged).items()},
        "right": _with_count([sample for sample in judged if sample["right"]]),
        "wrong": _with_count([sample for sample in judged if not sample["right"]]),
        "truncated": sum(sample["finish_reason"] == "length" for sample in judged) / len(judged),
        "without_answer": sum(not sample["final_answer"] for sample in judged) / len(judged),
    }


def _with_count(judged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many samples, and what is known of their lengths; for none of them only that."""
    return {"count": len(judged), **{f"length_{name}": value for name, value in _lengths(judged).items()}}


def _lengths(judged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """mean, p50, p99 and max of the samples' tokens; nothing for no sample."""
    tokens = [sample["tokens"] for sample in judged]
    return {"mean": sum(tokens) / len(tokens), **percentiles(tokens)} if tokens else {}


async def evaluate(
    asked: Asked,
    plan: Plan,
    *,
    generate: GenerateFn,
    scorer: Scorer,
    tokenizer: Tokenizer,
    final_answer: FinalAnswer,
    known: Sequence[Record] = (),
    on_start: Callable[[int], None] = lambda prompts: None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Evaluation:
    """Asks and judges the prompts, which `askable` has found by the same plan.

    `final_answer` gives what a completion votes for in maj@k. `known` are records of an earlier, unfinished evaluation
    with the same plan, which are taken as they are. `on_start` is told how many problems there are in all, `on_record`
    each new record as soon as it is whole.

    Prompts that are too long were left out and are counted. Everything that fails raises (RolloutFailed): a score with
    holes in it, or with failures counted as wrong, would be another figure under the same name.
    """
    records = {record["uid"]: record for record in known}
    _check_known(asked.prompts, records)
    on_start(len(asked.prompts))
    room = asyncio.Semaphore(plan.in_flight // plan.per_request)

    async def part(prompt: Prompt, samples: tuple[int, ...]) -> list[Judged]:
        request = group_request(prompt, samples=plan.samples, sampling=plan.sampling)
        request = dataclasses.replace(request, samples=samples, evaluation=True)
        async with room:
            return await generate_and_score(
                request, prompt, generate=generate, scorer=scorer, tokenizer=tokenizer, cut_off=plan.cut_off
            )

    async def one(prompt: Prompt) -> None:
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                parts = [tasks.create_task(part(prompt, samples)) for samples in _requests(plan)]
        record = _record(prompt, [judged for part in parts for judged in part.result()], final_answer)
        records[prompt.uid] = record
        on_record(record)

    with first_error():
        async with asyncio.TaskGroup() as tasks:
            for prompt in asked.prompts:
                if prompt.uid not in records:
                    tasks.create_task(one(prompt))
    return Evaluation([records[prompt.uid] for prompt in asked.prompts], asked.too_long, plan.sampling)


def _check_known(asked: Sequence[Prompt], known: Mapping[int, Record]) -> None:
    for prompt in asked:
        record = known.get(prompt.uid)
        if record is not None and (record["prompt"], record["answer"]) != (prompt.text, prompt.answer):
            raise ValueError(
                f"problem {prompt.uid} was {record['prompt'][-80:]!r} (answer {record['answer']!r}) when this "
                f"evaluation was begun, and is {prompt.text[-80:]!r} (answer {prompt.answer!r}) now: "
                "eval.data has changed; begin anew with another --out"
            )


def _requests(plan: Plan) -> list[tuple[int, ...]]:
    """The samples of a prompt, cut into requests."""
    samples = tuple(range(plan.samples))
    return [samples[first : first + plan.per_request] for first in range(0, plan.samples, plan.per_request)]


def _record(prompt: Prompt, group: Sequence[Judged], final_answer: FinalAnswer) -> Record:
    samples = [
        {
            "text": judged.text,
            "verdict": judged.verdict,
            "right": judged.right,
            "final_answer": final_answer(judged.text),
            "tokens": len(judged.completion.tokens),
            "finish_reason": judged.completion.finish_reason,
            "version_min": int(judged.completion.versions.min()),
            "version_max": int(judged.completion.versions.max()),
        }
        for judged in group
    ]
    problem = {"uid": prompt.uid, "prompt": prompt.text, "answer": prompt.answer, "task": prompt.task}
    return {**problem, "n": len(samples), "right": sum(judged.right for judged in group), "samples": samples}


def askable(source: PromptSource, plan: Plan) -> Asked:
    """The prompts that the plan asks, of a source that has fewer all of them. Raises ValueError if none is left."""
    prompts: list[Prompt] = []
    long: list[PromptTooLong] = []
    for uid in range(_count(source, plan.prompts)):
        try:
            prompts.append(take(source, uid, max_prompt_tokens=plan.max_prompt_tokens))
        except PromptTooLong as error:
            long.append(error)
    too_long, longest = [each.uid for each in long], max((each.tokens for each in long), default=0)
    if not prompts:
        raise ValueError(
            f"data.max_prompt_tokens={plan.max_prompt_tokens} leaves out all {len(long)} held-out prompts; their "
            f"lengths are {min(each.tokens for each in long)} to {longest} tokens; set at least {longest}"
        )
    if long:
        log.warning(
            "%d held-out prompts are longer than data.max_prompt_tokens=%d, up to %d tokens, and left out: %s",
            len(long),
            plan.max_prompt_tokens,
            longest,
            too_long,
        )
    return Asked(prompts, too_long)


def _count(source: PromptSource, prompts: int) -> int:
    if isinstance(source, Sized):
        return min(prompts or len(source), len(source))
    if prompts == 0:
        raise ValueError(
            "eval.prompts=0 means all prompts of eval.data, which goes on without end (it has no len()); say how many"
        )
    return prompts
