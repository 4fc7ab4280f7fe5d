"""The counting rule of model FLOPs, by hand and against what XLA counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import flops, transformer
from areal_jax.models.transformer import TransformerConfig

# Kernels of a layer: query 4 x 2 x 2, key and value 4 x 1 x 2, out 2 x 2 x 4, gate, up and down 4 x 6.
TINY = TransformerConfig(vocab_size=10, d_model=4, layers=2, heads=2, kv_heads=1, head_size=2, d_ff=6, qkv_bias=True)
LAYER = 16 + 8 + 8 + 16 + 3 * 24  # 120


@pytest.mark.parametrize("shape", [{}, {"tied_embeddings": True}, {"padded_vocab": 16}, {"qk_norm": True}])
def test_weights_of_products_leave_out_lookup_norms_biases_and_padding(shape):
    assert flops.matrix_weights(dataclasses.replace(TINY, **shape)) == 2 * LAYER + 4 * 10


def test_a_sequence_of_three_tokens_by_hand():
    # 2 * 280 * 3 tokens; attention: 2 layers, 2 heads of 2, 1 + 2 + 3 pairs, multiply and add for scores and for values
    forward = 2 * 280 * 3 + 2 * 4 * (2 * 2) * 6
    assert flops.forward_flops(TINY, [3]) == forward == 1872
    assert flops.train_flops(TINY, [3]) == 3 * forward
    assert flops.forward_flops(TINY, []) == flops.train_flops(TINY, []) == 0


def test_sequences_do_not_attend_to_one_another():
    # 3 + 3 tokens have 6 + 6 pairs, one of 6 has 21
    apart, whole = flops.forward_flops(TINY, [3, 3]), flops.forward_flops(TINY, [6])
    assert apart == 2 * flops.forward_flops(TINY, [3]) and whole - apart == 2 * 4 * 4 * (21 - 12)


def test_a_frozen_weight_has_no_gradient_of_its_own():
    # 4 instead of 6 for a weight and token; norms and lookups are not counted, frozen or not
    frozen = {"layers.0.attention.query.kernel", "head.kernel", "embedding", "norm.scale"}
    saved = flops.train_flops(TINY, [3, 2]) - flops.train_flops(TINY, [3, 2], frozen=frozen)
    assert saved == 2 * (16 + 40) * 5


def test_lengths_in_packed_rows_leave_padding_out():
    rows = np.array([[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
    assert flops.sequence_lengths(rows).tolist() == [3, 2, 1]
    assert flops.sequence_lengths(np.zeros((2, 4), np.int32)).size == 0


def test_xla_counts_the_same_but_for_the_masked_half_of_attention():
    model = TransformerConfig(vocab_size=256, d_model=64, layers=2, heads=4, kv_heads=2, head_size=16, d_ff=192)
    graph, length = transformer.graph(model), 64

    def forward(params, tokens, positions, segments):
        bound = transformer.bind(graph, params)
        return bound.logits(bound(tokens, positions, segments))

    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    counted = jax.jit(forward).lower(transformer.param_shapes(model), row, row, row).cost_analysis()["flops"]
    masked = 4 * 2 * (4 * 16) * (length * length - length * (length + 1) / 2)
    # XLA counts norms, softmax and rotations too.
    assert counted == pytest.approx(flops.forward_flops(model, [length]) + masked, rel=0.1)
