"""Products with weights: in bfloat16 on the CPU summed in float32 and rounded once.

Operands are small integers, so that float32 sums are exact and the expected numbers are equal, not close.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import transformer
from areal_jax.models.products import ROUNDED, add_bias, product, product_in_float32, sum_of_products, sum_over_tokens
from areal_jax.models.transformer import TransformerConfig

SMALL = TransformerConfig(vocab_size=96, d_model=32, layers=2, heads=4, kv_heads=2, head_size=8, d_ff=64)

SHAPES = {  # name -> (x, kernel, contracted axes)
    "a head's axis comes out": ((2, 3, 8), (8, 4, 5), 1),
    "a head's axis goes in": ((2, 3, 4, 5), (4, 5, 8), 2),
    "one token": ((1, 1, 8), (8, 6), 1),
    "one token of heads": ((1, 1, 4, 5), (4, 5, 8), 2),
}
each_shape = pytest.mark.parametrize(("x_shape", "kernel_shape", "contracted"), SHAPES.values(), ids=list(SHAPES))


def integers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float64)


def rounded(exact: np.ndarray) -> np.ndarray:
    return np.asarray(exact.astype(jnp.bfloat16))


def bfloat16(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array, jnp.bfloat16)


@each_shape
def test_value_and_gradients_are_the_exact_ones_rounded_once(x_shape, kernel_shape, contracted):
    x, kernel = integers(0, x_shape), integers(1, kernel_shape)
    expected = np.tensordot(x, kernel, contracted)
    out = integers(2, expected.shape)
    found, gradients = jax.vjp(functools.partial(product, contracted=contracted), bfloat16(x), bfloat16(kernel))
    dx, dkernel = gradients(bfloat16(out))
    np.testing.assert_array_equal(found, rounded(expected))
    tokens, outputs = x.ndim - contracted, kernel.ndim - contracted
    rows, grads = x.reshape(*x.shape[:tokens], -1), out.reshape(*x.shape[:tokens], -1)
    flat_IO = kernel.reshape(rows.shape[-1], -1)
    np.testing.assert_array_equal(dx, rounded(grads @ flat_IO.T).reshape(x.shape))
    dflat_IO = rows.reshape(-1, rows.shape[-1]).T @ grads.reshape(-1, grads.shape[-1])
    np.testing.assert_array_equal(dkernel, rounded(dflat_IO).reshape(kernel.shape))
    assert outputs and found.dtype == dx.dtype == dkernel.dtype == jnp.bfloat16


def test_many_small_terms_are_not_lost():
    ones = jnp.ones((2, 1024), jnp.bfloat16)  # a sum in bfloat16 would stop at 256
    np.testing.assert_array_equal(product(ones, ones.T, 1), np.full((2, 2), 1024.0))
    assert product_in_float32(ones[:, :1023], ones.T[:1023], 1)[0, 0] == 1023.0  # bfloat16 has no such number


@each_shape
def test_in_float32_it_is_the_exact_product(x_shape, kernel_shape, contracted):
    x, kernel = integers(0, x_shape), integers(1, kernel_shape)
    found = product(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), contracted)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.tensordot(x, kernel, contracted))


def layer_loss(remat):
    """A function of bfloat16 params: the squares of a packed row's hidden states."""
    graph = transformer.graph(SMALL)
    tokens_BL, segments_BL = np.arange(12)[None], np.arange(12)[None] // 7

    def loss(params):
        hidden_BLD = transformer.bind(graph, params)(tokens_BL, tokens_BL, segments_BL, remat=remat)
        return (hidden_BLD.astype(jnp.float32) ** 2).sum()

    params = transformer.cast(transformer.init_params(SMALL, jax.random.key(0)), jnp.bfloat16)
    return loss, params


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_products_of_a_training_step_are_of_bfloat16_with_float32_sums(backend, monkeypatch):
    """So that the partitioner, too, sums a kernel's gradient over devices in float32."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    loss, params = layer_loss("none")
    found = [
        eqn for eqn in equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr) if eqn.primitive.name == "dot_general"
    ]
    # Attention's have batch axes, and of a sum's one side is a vector of ones (on the CPU).
    with_weights = [
        eqn
        for eqn in found
        if not eqn.params["dimension_numbers"][1][0] and all(operand.aval.ndim > 1 for operand in eqn.invars)
    ]
    assert len(with_weights) == 3 * 7 * SMALL.layers  # forward, and two backward; without the head
    for eqn in with_weights:
        assert [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)] == ["bfloat16", "bfloat16", "float32"], eqn


def test_the_backward_pass_keeps_rounded_products_and_no_float32_ones(capsys):
    loss, params = layer_loss("dots")
    jax.ad_checkpoint.print_saved_residuals(loss, params)
    kept = capsys.readouterr().out.splitlines()
    products = [line for line in kept if ROUNDED in line]
    assert len(products) == 6 * SMALL.layers  # all of a layer but the last, on which nothing of it depends
    assert all(line.startswith("bf16[") for line in products)
    assert not any("dot_general" in line for line in kept)


def equations(jaxpr):
    """All equations, those of inner functions too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_are_those_of_float64(dtype):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 3, 700, 24)).astype(dtype)
    exact = left.astype(np.float64), right.astype(np.float64)
    found = sum_of_products(left, right), sum_over_tokens(left, 2), sum_over_tokens(left, 1)
    for mine, theirs in zip(found, ((exact[0] * exact[1]).sum(-1), exact[0].sum((0, 1)), exact[0].sum(0)), strict=True):
        assert mine.dtype == jnp.float32 and mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * np.abs(theirs).max())


def test_the_gradient_of_a_bias_is_summed_before_it_is_rounded():
    """In bfloat16 a sum of ones stops at 256."""
    x, bias = jnp.zeros((2, 700, 3, 4), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    out, gradients = jax.vjp(add_bias, x, bias)
    of_x, of_bias = gradients(jnp.ones_like(out))
    np.testing.assert_array_equal(out, jnp.ones_like(out))
    np.testing.assert_array_equal(of_x, jnp.ones_like(x))
    assert of_bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_bias, jnp.full((3, 4), 1400.0, jnp.bfloat16))
