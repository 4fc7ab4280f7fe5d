"""Our tokenizer under the interface that JetStream's own driver asks an engine for."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jetstream.engine import token_utils, tokenizer_api

if TYPE_CHECKING:
    from areal_jax.tokenizer import Tokenizer


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Encodes without a BOS token: what the model's own tokenizer gives is the prompt."""

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[jax.Array | np.ndarray, int]:
        """Token ids padded to JetStream's next prefill length, and how many are real."""
        return token_utils.pad_tokens(
            np.array(self._tokenizer.encode(s)),
            self.bos_id,
            self.pad_id,
            is_bos=False,
            max_prefill_length=kwargs.get("max_prefill_length"),
            jax_padding=kwargs.get("jax_padding", True),
        )

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self._tokenizer.eos_ids[0]

    @property
    def bos_id(self) -> int:
        return self.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._tokenizer.eos_ids)
