"""Model FLOPs: what a model's mathematics asks of a machine, the numerator of its utilisation (MFU).

The counting rule, in the whole project this one (PaLM's, arXiv 2204.02311, appendix B, with the causal mask exploited):

    forward    2 * W * tokens  +  4 * layers * N * H * pairs
    training   3 * forward: the backward pass multiplies twice for each product of the forward, so 6 * W * tokens;
               4 for a frozen weight, which has no gradient of its own

W are the weights of matrix products (`matrix_weights`), pairs the (query, key) pairs that a causal mask leaves:
T (T + 1) / 2 for a sequence of T tokens, half of T * T. All tokens of sequences count, prompts too, and padding does
not; neither do norms, softmax, rotations, adapters and the optimizer, nor what is computed twice (rematerialisation).

In: the shape of a model, and the lengths of sequences. Out: numbers. Called by the trainer's journal and by benchmarks.

Shapes: S sequences, R packed rows, L tokens of a row, N query heads, H head size.
"""

import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from areal_jax.models import transformer
from areal_jax.models.transformer import TransformerConfig


def matrix_weights(model: TransformerConfig, *, without: Collection[str] = ()) -> int:
    """Weights that a token is multiplied with: all kernels of the layers, and the head on the model's own vocabulary.

    A tied embedding counts once, as the head; looking a token up is no product. `without` names params to leave out.
    """
    sizes = {
        name: math.prod(leaf.shape)
        for name, leaf in transformer.param_shapes(model).items()
        if re.fullmatch(r"layers\..*\.kernel", name)
    }
    head = "embedding" if model.tied_embeddings else "head.kernel"
    sizes[head] = model.vocab_size * model.d_model  # without the rows that padding adds
    return sum(size for name, size in sizes.items() if name not in without)


def forward_flops(model: TransformerConfig, lengths: Sequence[int] | np.ndarray) -> float:
    """FLOPs of one forward pass with log-probabilities over sequences of these lengths in tokens."""
    lengths_S = np.asarray(lengths, np.float64)
    pairs = float(np.sum(lengths_S * (lengths_S + 1) / 2))
    return 2.0 * matrix_weights(model) * float(lengths_S.sum()) + (
        4.0 * model.layers * model.heads * model.head_size * pairs
    )


def train_flops(
    model: TransformerConfig, lengths: Sequence[int] | np.ndarray, *, frozen: Collection[str] = ()
) -> float:
    """FLOPs of one forward and backward pass; the params named in `frozen` do not train."""
    still = matrix_weights(model) - matrix_weights(model, without=frozen)
    return 3 * forward_flops(model, lengths) - 2.0 * still * float(np.sum(lengths))


def sequence_lengths(segment_ids_RL: np.ndarray) -> np.ndarray:
    """Tokens of each sequence in packed rows, [S] int64, row by row; segment 0 is padding and none."""
    counts = [np.bincount(row_L)[1:] for row_L in np.asarray(segment_ids_RL)]
    lengths_S = np.concatenate([np.zeros(0, np.int64), *counts])
    return lengths_S[lengths_S > 0]
