"""An evaluation's records, figures and requests, on fake servers; the figures of a hand-built file by hand."""

import asyncio
import dataclasses
import json
import math

import numpy as np
import pytest

from areal_jax.config import Config, EvaluationConfig, GenerationConfig, RewardConfig, RolloutConfig, RunConfig
from areal_jax.rollout.evaluation import askable, evaluate, figures, plan
from areal_jax.rollout.workflow import RolloutFailed
from tests.rollout.fakes import FakeScorer, FakeServers, FakeTokenizer, Numbers, completion


def make_plan(*, prompts=2, samples=1, in_flight=3, per_request=64, max_waiting=4096, **other):
    config = Config(
        rollout=RolloutConfig(max_new_tokens=4),
        eval=EvaluationConfig(prompts=prompts, samples=samples),
        generation=GenerationConfig(max_waiting=max_waiting),
    )
    found = plan(config, stop_tokens=(0,), in_flight=in_flight, per_request=per_request)
    return dataclasses.replace(found, max_prompt_tokens=8, **other)


def score(source, *, servers=None, scorer=None, final_answer=lambda text: text, **other):
    arguments = {name: other.pop(name) for name in ("known", "on_start", "on_record") if name in other}
    planned = make_plan(**other)
    return asyncio.run(
        evaluate(
            askable(source, planned),
            planned,
            generate=servers or FakeServers(),
            scorer=scorer or FakeScorer(lambda text, answer: float(answer in ("0", "1", "2"))),
            tokenizer=FakeTokenizer(),
            final_answer=final_answer,
            **arguments,
        )
    )


class Lengths:
    """Prompt uid has lengths[uid] tokens."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __getitem__(self, uid):
        return dataclasses.replace(Numbers()[uid], tokens=np.ones(self.lengths[uid], np.int32))


class Short(Numbers):
    def __len__(self):
        return 4


def test_prompts_that_are_too_long_are_counted_named_and_left_out():
    figures = score(Numbers(too_long=(1, 3)), prompts=5).figures()
    assert (figures["prompts"], figures["too_long"], figures["too_long_uids"]) == (3, 2, [1, 3])
    assert figures["accuracy"] == 2 / 3  # 0 and 2 of 0, 2 and 4


def test_nothing_but_long_prompts_is_an_error():
    message = "data.max_prompt_tokens=8 leaves out all 2 held-out prompts; .* 9 to 11 tokens; set at least 11"
    with pytest.raises(ValueError, match=message):
        askable(Lengths([9, 11]), make_plan(prompts=2))


@pytest.mark.parametrize("prompts", [100, 0])
def test_each_prompt_of_a_short_file_is_taken_once(prompts):
    servers = FakeServers()
    found = score(Short(), prompts=prompts, servers=servers, samples=2, in_flight=6)
    assert found.figures()["accuracy"] == 0.75  # 0, 1, 2 of 0 to 3
    assert sorted(request.uid for request in servers.asked) == [0, 1, 2, 3]
    assert all(request.evaluation for request in servers.asked)
    assert servers.most_evaluations == 3
    assert [record["uid"] for record in found.records] == [0, 1, 2, 3]


def test_all_of_an_endless_source_is_refused():
    with pytest.raises(ValueError, match=r"eval.prompts=0 means all prompts of eval.data, which goes on without end"):
        score(Numbers(), prompts=0)


@pytest.mark.parametrize(
    ("limits", "sizes", "most"),
    [
        ({"in_flight": 128, "per_request": 64}, [8], 24),
        ({"in_flight": 8, "per_request": 3}, [3, 3, 2], 6),
        ({"in_flight": 2, "per_request": 64}, [2, 2, 2, 2], 2),
        ({"in_flight": 0, "per_request": 0}, [1] * 8, 1),  # a quarter of three slots
        ({"in_flight": 128, "per_request": 64, "max_waiting": 5}, [5, 3], 24),  # else no server would take it
    ],
)
def test_samples_are_asked_for_in_requests_that_fit(limits, sizes, most):
    servers = FakeServers()
    servers.answer = lambda request, sample: completion(request, sample)
    found = score(Numbers(), prompts=3, samples=8, servers=servers, **limits)
    assert [len(request.samples) for request in servers.asked if request.uid == 1] == sizes
    assert servers.most_evaluated_samples <= most
    versions = [[sample["version_min"] for sample in record["samples"]] for record in found.records]
    assert versions == [list(range(8))] * 3, "in the order of the samples"


def test_a_failed_generation_is_no_score():
    servers = FakeServers()
    servers.answer = lambda request, sample: ConnectionError("gone")
    with pytest.raises(RolloutFailed, match="generation"):
        score(Numbers(), prompts=4, servers=servers)


def test_a_reward_that_raises_names_the_problem_and_is_no_score():
    def verdict(text, answer):
        if answer == "2":
            raise KeyError("broken")
        return 0.0

    records = []
    with pytest.raises(RolloutFailed, match=r"prompt 2 failed .*KeyError: 'broken'"):
        score(Numbers(), prompts=3, samples=4, per_request=2, scorer=FakeScorer(verdict), on_record=records.append)
    assert 2 not in [record["uid"] for record in records]


def test_a_record_holds_what_a_person_wants_to_read():
    servers = FakeServers()
    servers.answer = lambda request, sample: dataclasses.replace(
        completion(request, 0, length=2 + sample, reason="stop" if sample else "length"),
        versions=np.arange(5, 7 + sample, dtype=np.int32),
    )
    scorer = FakeScorer(lambda text, answer: 0.5 if text.count("8") == 2 else 1.0)
    source = Numbers(first=7)
    (record,) = score(
        source, prompts=1, samples=2, servers=servers, scorer=scorer, final_answer=lambda t: t[-1:]
    ).records
    assert record == {
        "uid": 0, "prompt": "7", "answer": "7", "task": "", "n": 2, "right": 0,
        "samples": [
            {"text": "8 8", "verdict": 0.5, "right": False, "final_answer": "8", "tokens": 2,
             "finish_reason": "length", "version_min": 5, "version_max": 6},
            {"text": "8 8", "verdict": 0.5, "right": False, "final_answer": "8", "tokens": 3,
             "finish_reason": "stop", "version_min": 5, "version_max": 7},
        ],
    }  # fmt: skip
    assert json.loads(json.dumps(record)) == record


def sample(answer, right, tokens, *, reason="stop", versions=(3, 3)):
    return {
        "text": "…", "verdict": float(right), "right": bool(right), "final_answer": answer, "tokens": tokens,
        "finish_reason": reason, "version_min": versions[0], "version_max": versions[1],
    }  # fmt: skip


NO_ANSWER = sample("", 0, 50, reason="length")
BY_HAND = [
    {"uid": 0, "samples": [sample("5", 1, 10), sample("5", 1, 20), sample("7", 0, 40), NO_ANSWER]},
    {"uid": 1, "samples": [sample("1", 0, 10)] * 2 + [sample("2", 1, 30), sample("2", 1, 30, versions=(2, 4))]},
    {"uid": 2, "samples": [NO_ANSWER] * 4},
]


def test_figures_of_records_by_hand():
    found = figures(BY_HAND)
    assert (found["prompts"], found["samples"]) == (3, 4)
    assert found["accuracy"] == found["avg@4"] == found["pass@1"] == found["maj@1"] == pytest.approx(1 / 3)
    # means 1/2, 1/2, 0: squares of distances 1/36 + 1/36 + 4/36 = 1/6, / 2 = 1/12
    assert found["standard_error"] == pytest.approx(math.sqrt(1 / 12 / 3))
    assert found["pass@2"] == pytest.approx((5 / 6 + 5 / 6 + 0) / 3)  # 1 - C(2, 2) / C(4, 2)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert found["maj@2"] == pytest.approx(((1 + 0) / 2 + (0 + 1) / 2 + 0) / 3)  # (5 5) (7 -) | (1 1) (2 2) | -
    assert found["maj@4"] == pytest.approx((1 + 1 / 2 + 0) / 3)  # 5 | a tie of 1 and 2 | nobody answers
    assert [key for key in found if "@" in key] == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    assert (found["version_min"], found["version_max"]) == (2, 4)
    assert (found["length_mean"], found["length_max"]) == (400 / 12, 50)  # 120 + 80 + 200
    assert found["length_p50"] == 35  # 10 10 10 20 30 30 | 40 50 50 50 50 50
    assert found["right"]["count"] == 4 and found["right"]["length_mean"] == 90 / 4
    assert found["wrong"]["count"] == 8 and found["wrong"]["length_mean"] == 310 / 8
    assert found["truncated"] == found["without_answer"] == pytest.approx(5 / 12)


def test_one_problem_has_no_standard_error_and_no_lengths_of_right_ones():
    found = figures(BY_HAND[2:])
    assert "standard_error" not in found
    assert found["right"] == {"count": 0}
    assert found["wrong"]["count"] == 4


def test_known_records_of_other_problems_are_refused():
    record = score(Numbers(), prompts=1, samples=1).records[0]
    with pytest.raises(ValueError, match=r"problem 0 was .* \(answer '9'\) when this evaluation was begun, .* --out"):
        score(Numbers(), prompts=1, samples=1, known=[{**record, "answer": "9"}])


def test_known_records_are_taken_as_they_are():
    whole = score(Numbers(), prompts=4, samples=2)
    servers, started, new = FakeServers(), [], []
    known = [whole.records[2], whole.records[0]]
    found = score(
        Numbers(), prompts=4, samples=2, servers=servers, known=known, on_start=started.append, on_record=new.append
    )
    assert {request.uid for request in servers.asked} == {1, 3}
    assert started == [4] and sorted(record["uid"] for record in new) == [1, 3]
    assert found.records == whole.records and found.figures() == whole.figures()


def test_the_sampling_is_that_of_the_section_eval_with_keys_of_its_own():
    config = Config(
        run=RunConfig(seed=7),
        reward=RewardConfig(cut_off="wrong"),
        eval=EvaluationConfig(temperature=0.6, max_new_tokens=32768, top_p=0.95, top_k=20),
    )
    found = plan(config, stop_tokens=(5, 6), in_flight=64, per_request=16)
    assert (found.sampling.temperature, found.sampling.max_new_tokens) == (0.6, 32768)
    assert (found.sampling.top_p, found.sampling.top_k) == (0.95, 20)
    assert (found.sampling.stop_tokens, found.cut_off) == ((5, 6), "wrong")
    assert found.sampling.seed == plan(config, stop_tokens=(), in_flight=1, per_request=1).sampling.seed
    seeds = range(-2, 1000)
    mapped = {
        plan(Config(run=RunConfig(seed=s)), stop_tokens=(), in_flight=1, per_request=1).sampling.seed for s in seeds
    }
    assert len(mapped) == len(seeds) and not mapped & set(seeds)
    default = plan(Config(), stop_tokens=(), in_flight=1, per_request=1).sampling
    assert default.max_new_tokens == Config().rollout.max_new_tokens
    assert (default.top_p, default.top_k) == (1.0, 0)
