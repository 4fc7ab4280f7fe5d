import jax
import numpy as np
import pytest

from areal_jax.config import OptimizerConfig, TrainerConfig
from areal_jax.models import transformer
from areal_jax.trainer import sft

CONFIG = TrainerConfig(token_budget=256, optimizer=OptimizerConfig(lr=3e-2, warmup_fraction=0.1))
EXAMPLES = [([a, b], [(a + b) % 30, 31]) for a in range(4) for b in range(4)]


def test_responses_are_learned(model_config, params):
    steps = sft.fit(model_config, params, [EXAMPLES] * 80, CONFIG, updates=80, max_length=16)
    losses = [sft.mean_loss(outcome) for _, outcome in steps]
    assert losses[0] > 2 and losses[-1] < 0.1


def test_loss_is_the_mean_over_response_tokens(model_config, params):
    examples = [([3, 4, 5], [6]), ([7], [8, 9, 10])]
    ((_, outcome),) = sft.fit(model_config, params, [examples], CONFIG, updates=1, max_length=16)
    model = transformer.bind(transformer.graph(model_config), jax.tree.map(np.asarray, params))
    logps = []
    for prompt, response in examples:
        tokens = np.array([prompt + response], np.int32)
        logits = model.logits(model(tokens, np.arange(4)[None], np.ones_like(tokens)))[0]
        logp = np.asarray(jax.nn.log_softmax(logits))[np.arange(3), tokens[0, 1:]]
        logps += logp[len(prompt) - 1 :].tolist()
    assert sft.mean_loss(outcome) == pytest.approx(-np.mean(logps), rel=1e-5)
