"""Log-probabilities and entropies straight from hidden states: a block of the vocabulary at a time.

The logits of all tokens never exist as a whole, forward or backward: no float32 array of tokens x vocabulary is
allocated (19.9 GB for 32,768 x 151,936). The softmax is summed while the blocks go by (arXiv 1805.02867), and the
backward pass computes each block once more from the saved log-sum-exp. It is the vocabulary that is cut and not the
tokens, as the head's weights, which are the larger array, are then read once in a pass, and each number of their
gradient is computed once and not summed over chunks. What is read and added to block after block are the hidden states
and their gradient: with more tokens than ids of a block, a larger block moves fewer bytes.

In: the head's weights, hidden states, the tokens that they are to give. Out: two numbers for each. Called by
`logprobs`; waits for nobody. Logits, sums and gradients are float32; operands of products have the dtype of the hidden
states (XLA's CPU backend makes float32 of bfloat16 ones for the gradient of the weights, and of the weights).

Over a mesh of several devices each one goes through its own part of the vocabulary for its own rows: the weights are
gathered over data and fsdp once, and their gradient is summed over them once. Left to the partitioner, both happen in
every block.

Shapes: R rows, L tokens of a row, T = R * L, D model, V vocabulary, W ids of a block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from areal_jax.models import sharding

NO_PROBABILITY = float(jnp.finfo(jnp.float32).min)  # a logit that adds nothing beside any other


@dataclasses.dataclass(frozen=True)
class Head:
    """How the weights of a head lie, and how they are gone through."""

    axes: str  # "vd" or "dv"
    ids: int  # that there are weights for
    live: int  # ids from here on have no probability
    block: int  # ids whose logits exist at a time
    mesh: Mesh | AbstractMesh | None = None

    def splitting(self, *axes: str) -> tuple[str, ...]:
        """Those of the mesh axes along which there are several devices."""
        return () if self.mesh is None else tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    @property
    def vocabulary(self) -> int:
        """Which axis of the weights is the vocabulary."""
        return self.axes.index("v")

    @property
    def spec(self) -> PartitionSpec:
        """How the weights are split where each device has the whole model axis."""
        return PartitionSpec(*("tensor" if axis == "v" else None for axis in self.axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score(head: Head, weights: Array, hidden_RLD: Array, targets_RL: Array, temperature: Array) -> tuple[Array, Array]:
    """log p(target) and the entropy of softmax(logits / temperature), both [R, L] float32.

    `temperature` is one number, or one for each token: [R, L, 1]. It gets no gradient. A target that is not live has a
    log-probability of about finfo.min, and no gradient at its own weights.
    """
    return _forward(head, weights, hidden_RLD, targets_RL, temperature)[0]


def _forward(
    head: Head, weights: Array, hidden_RLD: Array, targets_RL: Array, temperature: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    given = (weights, temperature, hidden_RLD, targets_RL)
    chosen_RL, log_z_RL, mean_RL = _on_each_device(head, functools.partial(_sums, head), sharding.ROWS)(*given)
    return (chosen_RL - log_z_RL, log_z_RL - mean_RL), (*given, log_z_RL, mean_RL)


def _backward(head: Head, saved: tuple[Array, ...], gradients: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    specs = (head.spec, sharding.ROWS)
    weights, hidden_RLD = _on_each_device(head, functools.partial(_gradients, head), specs)(*saved, *gradients)
    return weights, hidden_RLD, None, None


score.defvjp(_forward, _backward)


def _on_each_device(head: Head, run: Callable[..., Any], results: Any) -> Callable[..., Any]:
    """run(weights, temperature, *arrays of rows) for the vocabulary and the rows of each device by itself."""
    if not head.splitting(*sharding.AXES):
        return run

    def split(weights: Array, temperature: Array, *arrays: Array) -> Any:
        one_or_each = sharding.ROWS if jnp.ndim(temperature) else sharding.REPLICATED
        return jax.shard_map(
            run,
            mesh=head.mesh,
            in_specs=(head.spec, one_or_each, *[sharding.ROWS] * len(arrays)),
            out_specs=results,
            check_vma=False,  # it would have to be told what is the same on all devices along an axis
        )(weights, temperature, *arrays)

    return split


# On one device.


def _sums(
    head: Head, weights: Array, temperature: Array, hidden_RLD: Array, targets_RL: Array
) -> tuple[Array, Array, Array]:
    """Of the scaled logits of each token: the target's, the log-sum-exp, the mean under their softmax; all [R, L]."""
    temperature_T1, hidden_TD, targets_T = _by_token(temperature, hidden_RLD, targets_RL)

    def add(_: Array, weights: Array, ids_W: Array, so_far: tuple[Array, ...]) -> tuple[Array, ...]:
        highest_T, total_T, weighted_T, chosen_T = so_far
        scaled_TW = _scaled(head, weights, ids_W, temperature_T1, hidden_TD)
        new_T = jnp.maximum(highest_T, jnp.max(scaled_TW, axis=-1))
        masses_TW = jnp.exp(scaled_TW - new_T[:, None])
        kept_T = jnp.exp(highest_T - new_T)
        # XLA's CPU backend takes a bare sum of products for a product of two vectors, ten times as slow.
        more_TW = jnp.where(masses_TW > 0, masses_TW * scaled_TW, 0.0)
        return (
            new_T,
            total_T * kept_T + jnp.sum(masses_TW, axis=-1),
            weighted_T * kept_T + jnp.sum(more_TW, axis=-1),
            chosen_T + jnp.sum(jnp.where(ids_W == targets_T[:, None], scaled_TW, 0.0), axis=-1),
        )

    zeros_T = jnp.zeros(len(hidden_TD))
    # Higher than what has no probability, so that where a device has nothing else its masses are 0.
    nothing = (jnp.full_like(zeros_T, NO_PROBABILITY / 2), zeros_T, zeros_T, zeros_T)
    own_T, total_T, weighted_T, chosen_T = _over_blocks(head, add, weights, nothing)
    splitting = head.splitting("tensor")
    highest_T = jax.lax.pmax(own_T, splitting)
    kept_T = jnp.exp(own_T - highest_T)
    total_T, weighted_T, chosen_T = jax.lax.psum((total_T * kept_T, weighted_T * kept_T, chosen_T), splitting)
    chosen_RL, log_z_RL, mean_RL = (
        numbers_T.reshape(targets_RL.shape)
        for numbers_T in (chosen_T, highest_T + jnp.log(total_T), weighted_T / total_T)
    )
    return chosen_RL, log_z_RL, mean_RL


def _gradients(
    head: Head,
    weights: Array,
    temperature: Array,
    hidden_RLD: Array,
    targets_RL: Array,
    log_z_RL: Array,
    mean_RL: Array,
    of_logprob_RL: Array,
    of_entropy_RL: Array,
) -> tuple[Array, Array]:
    """Gradients of the weights and of the hidden states.

    With p the probabilities and s the scaled logits, that of log p(target) by s is 1 - p at the target and -p
    elsewhere; that of the entropy is p (mean s - s).
    """
    temperature_T1, hidden_TD, targets_T = _by_token(temperature, hidden_RLD, targets_RL)
    log_z_T1, mean_T1 = log_z_RL.reshape(-1, 1), mean_RL.reshape(-1, 1)
    # A gradient by a scaled logit, over the temperature, is the one by the logit.
    of_logprob_T1, of_entropy_T1 = (
        numbers_RL.reshape(-1, 1) / temperature_T1 for numbers_RL in (of_logprob_RL, of_entropy_RL)
    )

    def add(start: Array, weights: Array, ids_W: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        of_weights, of_hidden_TD = so_far
        scaled_TW = _scaled(head, weights, ids_W, temperature_T1, hidden_TD)
        probabilities_TW = jnp.exp(scaled_TW - log_z_T1)
        away_TW = jnp.where(probabilities_TW > 0, mean_T1 - scaled_TW, 0.0)
        is_target_TW = _live(head, ids_W, ids_W == targets_T[:, None], False)
        of_logits_TW = of_logprob_T1 * (is_target_TW - probabilities_TW)
        of_logits_TW = (of_logits_TW + of_entropy_T1 * probabilities_TW * away_TW).astype(hidden_TD.dtype)
        of_block = _product(f"tv,td->{head.axes}", of_logits_TW, hidden_TD)
        of_weights = jax.lax.dynamic_update_slice_in_dim(of_weights, of_block, start, axis=head.vocabulary)
        return of_weights, of_hidden_TD + _product(f"tv,{head.axes}->td", of_logits_TW, weights)

    zeros = (jnp.zeros(weights.shape), jnp.zeros(hidden_TD.shape))
    of_weights, of_hidden_TD = _over_blocks(head, add, weights, zeros)
    of_weights = jax.lax.psum(of_weights, head.splitting(*sharding.ROW_AXES))
    of_hidden_TD = jax.lax.psum(of_hidden_TD, head.splitting("tensor"))
    return of_weights.astype(weights.dtype), of_hidden_TD.astype(hidden_RLD.dtype).reshape(hidden_RLD.shape)


def _by_token(temperature: Array, hidden_RLD: Array, targets_RL: Array) -> tuple[Array, Array, Array]:
    return jnp.reshape(temperature, (-1, 1)), hidden_RLD.reshape(-1, hidden_RLD.shape[-1]), targets_RL.reshape(-1)


def _over_blocks(head: Head, add: Callable[..., Any], weights: Array, so_far: Any) -> Any:
    """add(start, weights and ids of a block, what it gave for the blocks before), one block after the other."""
    V = weights.shape[head.vocabulary]
    W = min(head.block, V)
    first = V * jax.lax.axis_index("tensor") if head.splitting("tensor") else 0

    def one(start: int | Array, width: int, so_far: Any) -> Any:
        block = jax.lax.dynamic_slice_in_dim(weights, start, width, axis=head.vocabulary)
        return add(start, block, first + start + jnp.arange(width), so_far)

    whole, rest = divmod(V, W)
    so_far = jax.lax.fori_loop(0, whole, lambda i, so_far: one(i * W, W, so_far), so_far)
    return one(V - rest, rest, so_far) if rest else so_far


def _scaled(head: Head, weights: Array, ids_W: Array, temperature_T1: Array, hidden_TD: Array) -> Array:
    """The logits of a block over the temperature, `NO_PROBABILITY` where an id is not live."""
    scaled_TW = _product(f"td,{head.axes}->tv", hidden_TD, weights) / temperature_T1
    return _live(head, ids_W, scaled_TW, NO_PROBABILITY)


def _live(head: Head, ids_W: Array, array_TW: Array, otherwise: float | bool) -> Array:
    """The array, with `otherwise` where an id is not live."""
    return array_TW if head.live == head.ids else jnp.where(ids_W < head.live, array_TW, otherwise)


def _product(axes: str, left: Array, right: Array) -> Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)
