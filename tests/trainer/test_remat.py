"""What the backward pass computes again changes neither a bit of the forward pass nor the gradient.

That it takes less memory is in tests/launch/test_plan.py: the plan's numbers for each policy, against the compiler's.
"""

import functools
import typing

import jax
import numpy as np
import pytest

from areal_jax.config import TrainerConfig
from areal_jax.models import attention, batch_invariant, transformer

KERNELS = {"plain": attention.PLAIN, "batch_invariant": batch_invariant.KERNELS}


@pytest.fixture(scope="module")
def hidden_and_gradient(model_config):
    """Of two packed segments, under a loss that weighs each token by its id."""
    rng = np.random.default_rng(0)
    shapes = transformer.param_shapes(model_config)
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) / 4 for name, leaf in shapes.items()}
    tokens_BL, positions_BL = np.arange(12)[None], np.arange(12)[None]

    @functools.cache
    def of(kernels, remat):
        graph = transformer.graph(model_config, KERNELS[kernels])

        def loss(params):
            hidden_BLD = transformer.bind(graph, params)(tokens_BL, positions_BL, positions_BL // 7, remat=remat)
            return (hidden_BLD**2 * tokens_BL[..., None]).sum(), hidden_BLD

        grads, hidden_BLD = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))
        del grads["head.kernel"]  # has no part in it
        return hidden_BLD, grads

    return of


@pytest.mark.parametrize(("kernels", "remat"), [("plain", "layers"), ("plain", "dots"), ("batch_invariant", "layers")])
def test_forward_and_gradient_are_the_same(hidden_and_gradient, kernels, remat):
    kept_BLD, expected = hidden_and_gradient(kernels, "none")
    hidden_BLD, grads = hidden_and_gradient(kernels, remat)
    np.testing.assert_array_equal(hidden_BLD, kept_BLD)
    for name, value in expected.items():
        assert np.linalg.norm(grads[name] - value) <= 1e-6 * np.linalg.norm(value) > 0, name


def test_every_policy_of_the_config_is_one_of_the_model():
    assert typing.get_args(typing.get_type_hints(TrainerConfig)["remat"]) == tuple(transformer.REMAT)
