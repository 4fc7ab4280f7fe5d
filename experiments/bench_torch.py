"""A plain training step in torch on the CPU: a `transformers` model, padded microbatches, AdamW.

In: a model of ours, and its sequences. Out: seconds of an update, and its loss. Called by `bench_trainer`. Waits for
torch.

As the Trainer of transformers does it: float32, scaled-dot-product attention, `per_device` sequences at a time padded
to the longest of them with an attention mask, the loss divided by the tokens of all of them, gradients accumulated,
clipped and given to torch's AdamW in its fused form. Loss and settings of the optimizer are those of our step.

Shapes: R sequences of a microbatch, L tokens of its longest.
"""

import os
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import transformers
from jax import Array

from areal_jax.config import OptimizerConfig
from areal_jax.models import safetensors_files
from areal_jax.models.transformer import TransformerConfig

IGNORED = -100  # label of a token that has no loss


class TorchTraining:
    """The same weights under training in transformers, on as many threads as this process has cores."""

    def __init__(self, model: TransformerConfig, params: Mapping[str, Array], settings: OptimizerConfig):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch) / "model"
            safetensors_files.save_model(directory, model, params)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, sequences: Sequence[np.ndarray], per_device: int) -> float:
        """Seconds of one update from the tokens of these sequences."""
        return self.step_with_loss(sequences, per_device)[0]

    def step_with_loss(self, sequences: Sequence[np.ndarray], per_device: int) -> tuple[float, float]:
        """The same, and the cross-entropy per token before it, in nats."""
        began = time.monotonic()
        trained = sum(len(tokens) - 1 for tokens in sequences)
        total = 0.0
        for first in range(0, len(sequences), per_device):
            loss = self._loss(sequences[first : first + per_device], trained)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.monotonic() - began, total

    def _loss(self, sequences: Sequence[np.ndarray], trained: int) -> torch.Tensor:
        """The sum over a microbatch, over the tokens that train in the whole batch."""
        tokens_RL, mask_RL = padded(sequences)
        labels_RL = np.where(mask_RL > 0, tokens_RL, IGNORED)
        return self._model(
            input_ids=torch.from_numpy(tokens_RL),
            attention_mask=torch.from_numpy(mask_RL),
            labels=torch.from_numpy(labels_RL),
            num_items_in_batch=trained,
            use_cache=False,
        ).loss


def padded(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and attention mask [R, L] int64, padded behind each sequence to the longest."""
    longest = max(map(len, sequences))
    tokens_RL = np.zeros((len(sequences), longest), np.int64)
    mask_RL = np.zeros((len(sequences), longest), np.int64)
    for r, tokens in enumerate(sequences):
        tokens_RL[r, : len(tokens)] = tokens
        mask_RL[r, : len(tokens)] = 1
    return tokens_RL, mask_RL
