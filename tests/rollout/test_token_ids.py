"""Completions are token ids from the generator to the trainer: nothing is decoded and encoded again on the way."""

import numpy as np

from areal_jax.algorithms.packing import make_layout, pack
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Completion, Trajectory, trajectories_from_arrays, trajectories_to_arrays
from tests.rollout.fakes import FakeScorer, FakeServers, Run, make_config, play
from tests.test_chat_template import SMOLLM2, write


def test_tokens_that_text_does_not_give_back_arrive_unchanged_in_the_training_batch(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=SMOLLM2))
    half = tokenizer.encode("ü")[1]  # the first of the two bytes of a character
    letters = [tokenizer.encode(letter)[1] for letter in "What"]  # which the tokenizer itself writes as one token
    special = 3  # <|im_end|>, which decoding leaves out
    sampled = [half, half, *letters, special, *letters, 1]
    again = tokenizer.encode(tokenizer.decode(sampled))[1:]
    assert again != sampled and len(again) < len(sampled)

    servers, seen = FakeServers(), []
    servers.answer = lambda request, sample: Completion(
        np.array(sampled, np.int32), np.full(len(sampled), -0.5, np.float32), np.zeros(len(sampled), np.int32), "stop"
    )

    async def scenario():
        run = Run(make_config(), servers=servers, scorer=FakeScorer(lambda text, answer: 1.0), tokenizer=tokenizer)
        seen.extend(await run.step(0))
        await run.end()

    play(scenario)
    wired = trajectories_from_arrays(trajectories_to_arrays(seen))  # as they travel and lie in checkpoints
    for trajectory in (*seen, *wired):
        assert isinstance(trajectory, Trajectory)
        assert trajectory.tokens.tolist() == sampled
    batches = pack(
        wired,
        np.ones(len(wired)),
        make_layout((), max_length=32, token_budget=128),
        version=0,
        max_staleness=0,
    )
    trained = np.concatenate([batch.tokens[batch.loss_mask == 1] for batch in batches])
    assert trained.tolist() == sampled * len(wired)
