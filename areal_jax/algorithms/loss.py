"""Token losses: functions of arrays that return sums.

In: log-probabilities of the same tokens under several policies, and a mask. Out: a scalar sum and a dict of metric sums
over the masked tokens. Called inside the trainer's gradient program; the division by the token count of the whole
minibatch happens there, so that a loss does not depend on how its tokens were split into rows and microbatches.

Every array has the same shape (packed rows [R, L], or any other); nothing is known here of models or configs.
"""

import jax
import jax.numpy as jnp
from jax import Array

Sums = dict[str, Array]  # name -> float32 scalar: a sum over tokens, or a maximum where the name ends in "_max"


def decoupled_ppo_loss(
    logprobs: Array,
    prox_logprobs: Array,
    behav_logprobs: Array,
    advantages: Array,
    loss_mask: Array,
    *,
    clip_eps: float | Array,
) -> tuple[Array, Sums]:
    """Decoupled PPO (AReaL, arXiv 2505.24298, equation 5; Hilton et al., arXiv 2110.00641), summed over tokens.

        loss = - sum_t mask_t * w_t * min(u_t A_t, clip(u_t, 1 - eps, 1 + eps) A_t)
        u_t = exp(logprobs - prox_logprobs)           `ratio`, clipped around the proximal policy
        w_t = exp(prox_logprobs - behav_logprobs)     `behav_weight`, a constant

    With prox = behav it is plain PPO, bit for bit (w = exp(0) = 1). What masked tokens hold, not even nan, matters not.

    Args:
      logprobs: log p(token) under the policy being optimised; the only argument that a gradient flows through.
      prox_logprobs: under the weights at the start of the training step.
      behav_logprobs: under the policy that sampled the token, whichever version that was.
      advantages: per token.
      loss_mask: 1 on the tokens that train, 0 elsewhere.
      clip_eps: half-width of the interval in which the ratio may move.

    Returns:
      The loss sum and sums of: tokens, ratio, clipped (tokens whose gradient the clip cuts off), behav_weight,
      behav_weight_max, approx_kl (the estimate u - 1 - log u of KL(prox || policy), never negative).
    """
    trains = loss_mask > 0
    prox_logprobs, behav_logprobs = jax.lax.stop_gradient((prox_logprobs, behav_logprobs))
    log_ratio = jnp.where(trains, logprobs - prox_logprobs, 0.0)
    ratio = jnp.exp(log_ratio)
    behav_weight = jnp.exp(jnp.where(trains, prox_logprobs - behav_logprobs, 0.0))
    advantages = jnp.where(trains, advantages, 0.0)
    free = ratio * advantages
    limited = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps) * advantages

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(trains, jax.lax.stop_gradient(values), 0.0), dtype=jnp.float32)

    sums = {
        "tokens": total(jnp.ones_like(ratio)),
        "ratio": total(ratio),
        "clipped": total((limited < free).astype(jnp.float32)),
        "behav_weight": total(behav_weight),
        "behav_weight_max": jnp.max(jnp.where(trains, behav_weight, 0.0)),
        "approx_kl": total(ratio - 1.0 - log_ratio),
    }
    return -jnp.sum(loss_mask * behav_weight * jnp.minimum(free, limited)), sums


def supervised_loss(logprobs: Array, loss_mask: Array) -> tuple[Array, Sums]:
    """Cross-entropy of given tokens: loss = - sum_t mask_t * logprobs_t, and the sum of `tokens`."""
    loss = -jnp.sum(jnp.where(loss_mask > 0, logprobs, 0.0) * loss_mask)
    return loss, {"tokens": jnp.sum(loss_mask > 0, dtype=jnp.float32)}
