"""Products with weights, and the sums of backward passes, in the form in which each backend computes them fastest.

In: activations of tokens and a kernel. Out: the sum over the axes that they share. Called by the layers and the head of
the transformer, and by adapters. In bfloat16 the result is float32, rounded after: what is summed over devices, a
kernel's gradient above all, is summed before it is rounded. And XLA's CPU backend uses its kernels for bfloat16 only
then; for any other result it makes float32 of the operands, which takes several times as long. In float32 accelerators
get the product as it stands, and the CPU backend one of two matrices, as tokens or heads with axes of their own send
the backward pass through transposed copies.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

ROUNDED = "rounded product"  # what `jax.checkpoint` calls a result of `product` that a float32 one comes before


def product(x: Array, kernel: Array, contracted: int) -> Array:
    """The sum over the last `contracted` axes of x and the first of the kernel, in their dtype."""
    if x.dtype == jnp.bfloat16:
        return _rounded_product(contracted, x, kernel)
    return product_in_float32(x, kernel, contracted).astype(x.dtype)


def product_in_float32(x: Array, kernel: Array, contracted: int) -> Array:
    """As `product`, before it is rounded to the operands' dtype."""
    if jax.default_backend() != "cpu":
        return jnp.tensordot(x, kernel, axes=contracted, preferred_element_type=jnp.float32)
    tokens, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    x, kernel = _matrix(x, len(tokens)), _matrix(kernel, contracted)
    alone = x.dtype == jnp.bfloat16 and len(x) == 1
    if alone:  # the kernels for bfloat16 take no single row: it gets a row of zeros beside it
        x = jnp.pad(x, ((0, 1), (0, 0)))
    summed = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    return (summed[:1] if alone else summed).reshape(*tokens, *outputs)


def sum_of_products(left: Array, right: Array) -> Array:
    """The sum of left * right over the last axis, in float32."""
    products = left.astype(jnp.float32) * right.astype(jnp.float32)
    if jax.default_backend() != "cpu":
        return jnp.sum(products, axis=-1)
    # XLA's CPU backend takes a sum of products for one product of two vectors per token, ten times as slow as this.
    return jnp.matmul(products, jnp.ones(products.shape[-1]))


def sum_over_tokens(array: Array, tokens: int) -> Array:
    """The sum over the first `tokens` axes, in float32."""
    numbers = array.astype(jnp.float32)
    if jax.default_backend() != "cpu":
        return jnp.sum(numbers, axis=tuple(range(tokens)))
    rows = _matrix(numbers, tokens)
    return jnp.matmul(jnp.ones(len(rows)), rows).reshape(array.shape[tokens:])


@jax.custom_vjp
def add_bias(x: Array, bias: Array) -> Array:
    """x + bias, which has the last axes of x; its gradient is summed over tokens in float32 and rounded after."""
    return x + bias


def _add_bias_forward(x: Array, bias: Array) -> tuple[Array, Array]:
    return x + bias, bias


def _add_bias_backward(bias: Array, out: Array) -> tuple[Array, Array]:
    return out, sum_over_tokens(out, out.ndim - bias.ndim).astype(bias.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _matrix(array: Array, rows: int) -> Array:
    """Its first `rows` axes as one, and the others as one."""
    return array.reshape(math.prod(array.shape[:rows]), math.prod(array.shape[rows:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_product(contracted: int, x: Array, kernel: Array) -> Array:
    """`product`, whose gradients are such products too: autodiff would make them of float32 gradients and operands."""
    return _rounded(contracted, x, kernel)


def _rounded(contracted: int, x: Array, kernel: Array) -> Array:
    return checkpoint_name(product_in_float32(x, kernel, contracted).astype(x.dtype), ROUNDED)


def _rounded_product_forward(contracted: int, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rounded(contracted, x, kernel), (x, kernel)  # in sight of `jax.checkpoint`, as a custom_vjp is not


def _rounded_product_backward(contracted: int, saved: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
    """dx = dy K^T, dK = x^T dy; `out` is dy."""
    x, kernel = saved
    tokens = x.ndim - contracted
    flat_x, flat_kernel, flat_out = _matrix(x, tokens), _matrix(kernel, contracted), _matrix(out, tokens)
    dx = jnp.matmul(flat_out, flat_kernel.T, preferred_element_type=jnp.float32)
    dkernel = jnp.matmul(flat_x.T, flat_out, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype).reshape(x.shape), dkernel.astype(kernel.dtype).reshape(kernel.shape)


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_backward)
