"""JetStream's own service (Decode, HealthCheck) over our scheduler, so that its clients work unchanged.

In: its messages, which know no sampling parameters: temperature, seed and the longest answer are this server's. Out:
one sample of text (asked with text) or of token ids (asked with ids), streamed; no BOS token is put before a prompt,
and the stop token is left out of the answer, as JetStream 0.2.2 does. Only its generated messages are imported: the
rest of JetStream takes jax and seconds.
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from areal_jax.transport.generation_service import Scheduler, answering, stream_chunks
from areal_jax.types import Chunk, GenerateRequest, Sampling

Content = jetstream_pb2.DecodeResponse.StreamContent


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class DecodeServicer(jetstream_pb2_grpc.OrchestratorServicer):
    """Every request is a prompt of its own: its uid, which keys the sampling, counts requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int,
        max_length: int,
        temperature: float,
        seed: int,
    ):
        """Most new tokens of an answer, and most tokens of a prompt and its answer."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._max_new_tokens, self._max_length = max_new_tokens, max_length
        self._temperature = temperature
        self._seed = seed
        self._uids = itertools.count()

    async def Decode(self, request: Any, context: Any) -> None:
        """`max_tokens` of 0, or beyond this server's limit, means the limit."""
        as_text = request.WhichOneof("content") == "text_content"
        text = TextStream(self._tokenizer)
        async with answering(context):
            stream = stream_chunks(self._scheduler, self._request(request))
            async with contextlib.aclosing(stream):
                async for chunks in stream:
                    ids, ended = _without_stop_token(chunks), bool(chunks[-1].finish_reason)
                    sample = Content.Sample(text=text.add(ids, ended=ended)) if as_text else Content.Sample()
                    sample.token_ids.extend(ids)
                    await context.write(jetstream_pb2.DecodeResponse(stream_content=Content(samples=[sample])))

    def _request(self, request: Any) -> GenerateRequest:
        ids = {
            "text_content": lambda: self._tokenizer.encode(request.text_content.text),
            "token_content": lambda: request.token_content.token_ids,
            None: list,
        }[request.WhichOneof("content")]()
        if not len(ids):
            raise ValueError("the request has no prompt; set text_content or token_content")
        if request.max_tokens < 0:
            raise ValueError(f"max_tokens={request.max_tokens} must be positive, or 0 for this server's limit")
        most = max(1, min(self._max_new_tokens, self._max_length - len(ids)))
        return GenerateRequest(
            uid=next(self._uids),
            prompt_tokens=np.array(ids, np.int32),
            samples=(0,),
            sampling=Sampling(
                max_new_tokens=min(request.max_tokens or most, most),
                temperature=self._temperature,
                seed=self._seed,
                stop_tokens=tuple(self._tokenizer.eos_ids),
            ),
        )

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return jetstream_pb2.HealthCheckResponse(is_live=self._scheduler.failure is None)


def _without_stop_token(chunks: Sequence[Chunk]) -> list[int]:
    ids = [int(token) for chunk in chunks for token in chunk.tokens]
    return ids[:-1] if chunks[-1].finish_reason == "stop" else ids


class TextStream:
    """Text of a growing list of tokens, in pieces that join to the text of them all.

    A piece is what the newest tokens add to the text of the piece before, since a token's text may depend on the one
    before it (spaces). A character whose bytes are spread over tokens waits until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []  # tokens of the piece before
        self._held: list[int] = []  # tokens since

    def add(self, ids: Sequence[int], *, ended: bool) -> str:
        self._held += ids
        known = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._held)
        if not self._held or (text.endswith("�") and not ended):
            return ""
        self._before, self._held = self._held, []
        return text[len(known) :]
