import dataclasses
import random

import numpy as np
import pytest

from areal_jax.config import MeshConfig
from areal_jax.rewards.math_answer import stated_answer_matches
from areal_jax.rollout.arithmetic import Problem
from experiments import warm_start
from tests.experiments.tiny import TINY

PROBLEM = Problem(9, ("+4", "-6", "double"))


def test_full_reasoning_is_right():
    assert warm_start.full(random.Random(0), PROBLEM) == "a: 13 b: 7 c: 14 answer: 14"


def test_skipped_reasoning_is_right_one_time_in_four():
    rng = random.Random(0)
    right = [stated_answer_matches(completion=warm_start.skipped(rng, PROBLEM), answer="14") for _ in range(4000)]
    assert sum(right) / 4000 == pytest.approx(0.25, abs=0.03)  # four standard deviations


def test_faulty_reasoning_forgets_a_step_and_goes_on_from_there():
    made = {warm_start.faulty(random.Random(seed), PROBLEM) for seed in range(200)}
    assert "a: 13 b: 13 c: 19 answer: 19" in made  # b forgotten; 26 is cut to 19
    assert "a: 9 b: 3 c: 6 answer: 6" in made  # a forgotten
    assert "a: 13 b: 7 c: 14 answer: 14" not in made


def test_problems_grow_until_the_mixture_begins():
    rng = random.Random(0)
    first = [warm_start.example(rng, 0.0)[0].count(":") for _ in range(200)]
    later = [warm_start.example(rng, 0.5)[0].count(":") for _ in range(200)]
    assert max(first) <= 4 and max(later) > 20
    assert all(len(warm_start.example(rng, 0.5)[1]) > 20 for _ in range(20))
    assert any(warm_start.example(rng, 0.9)[1].startswith("answer:") for _ in range(20))


def test_a_batch_fits_one_microbatch():
    tokenizer = warm_start.make_tokenizer()
    for batch in list(warm_start.example_batches(random.Random(0), tokenizer, 40)):
        assert sum(len(prompt) + len(response) for prompt, response in batch) <= warm_start.BATCH_TOKENS


@pytest.mark.usefixtures("quickly_compiled")
def test_a_tiny_model_learns_from_the_examples(monkeypatch):
    mesh = MeshConfig(data=-1)  # of the fake devices of the tests
    monkeypatch.setattr(warm_start, "TRAINER", dataclasses.replace(warm_start.TRAINER, mesh=mesh))
    tokenizer = warm_start.make_tokenizer()
    words = tokenizer.get_vocab_size()
    params, results = warm_start.train(dataclasses.replace(TINY, vocab_size=words), tokenizer, updates=25, seed=1)
    losses = results["loss"]
    assert len(losses) == 25 and losses[0] > np.log(words)  # no better than a guess among all
    assert losses[-1] < losses[0] - 0.3
    assert results["parameters"] == sum(array.size for array in params.values())
    assert results["response_tokens"] > 25 * warm_start.BATCH_TOKENS / 4
