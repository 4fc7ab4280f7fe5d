"""No float32 array of tokens x vocabulary, at the sizes of a real run: 8,192 tokens and the 151,936 ids of Qwen 2.5.

The programs are compiled, not run. The measure is the temporary memory that XLA plans for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.models import logprobs, sharding, transformer
from areal_jax.trainer import step

V = 151936
MODEL = transformer.TransformerConfig(vocab_size=V, d_model=8, layers=1, heads=1, kv_heads=1, head_size=8, d_ff=8)
ROWS, LENGTH = 32, 256
EVERYTHING = 4 * ROWS * LENGTH * V  # 4.98 GB
BLOCK = 4096
ONE_BLOCK = 4 * ROWS * LENGTH * BLOCK  # 134 MB
# Its logits and their gradients live at once; the model's own arrays are small beside them.
LEAST, MOST = ONE_BLOCK, 4 * ONE_BLOCK

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def temporary_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


def of_tokens(block, outputs):
    """Forward and backward of the log-probabilities and entropies of all tokens, each weighted by itself."""

    def loss(params, hidden, tokens, weights):
        model = transformer.bind(transformer.graph(MODEL), params)
        return jnp.vdot(weights, outputs(logprobs.token_logprobs(model, hidden, tokens, temperature=0.7, block=block)))

    shape = (ROWS, LENGTH)
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
    hidden = jax.ShapeDtypeStruct((*shape, MODEL.d_model), jnp.float32)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return temporary_bytes(value_and_grad.lower(transformer.param_shapes(MODEL), hidden, tokens, numbers))


def both(results):
    return results[0] + results[1]


def test_logprobs_and_entropies_hold_the_logits_of_one_block_forward_and_backward():
    assert LEAST <= of_tokens(BLOCK, both) < MOST < EVERYTHING / 4


def test_the_measure_sees_the_logits_of_all_tokens():
    assert of_tokens(V, both) >= EVERYTHING


def test_the_trainers_programs_hold_the_logits_of_one_block():
    one = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    programs = step.Programs(
        MODEL,
        one,
        optax.sgd(1.0),
        optax.constant_schedule(1.0),
        step.decoupled_objective,
        {"temperature": np.float32(1.0), "clip_eps": np.float32(0.2)},
        compute_dtype="float32",
        export_dtype="float32",
        vocab_block=BLOCK,
    )
    params, rows = programs.abstract.params, programs._abstract_rows((ROWS, LENGTH))
    number = jax.ShapeDtypeStruct((), np.float32)
    context = {name: rows[name] for name in step.CONTEXT}
    assert LEAST <= temporary_bytes(programs.logprobs.lower(params, context, number)) < MOST
    accumulate = programs.accumulate.lower(params, params, rows, number, programs.with_own_prox(False))
    assert LEAST <= temporary_bytes(accumulate) < MOST
