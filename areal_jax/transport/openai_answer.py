"""Answers of OpenAI's completions and chat completions API, from chunks of tokens.

In: what was asked, and chunks as the engine hands them over. Out: JSON objects, whole or as a stream of parts. Called
by `http_server`. Waits for nobody.

Text leaves out the token that ended the answer, and the stop string with what follows it. With `return_token_ids` each
choice also has `prompt_token_ids`, `token_ids`, `token_logprobs` and `versions`: exactly what was sampled, with the
token that ended the answer or completed the stop string; -1 is the version of weights that no trainer has published.
"""

import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal_jax.transport.jetstream_decode import TextStream
from areal_jax.transport.openai_request import Asked, Tokenizer
from areal_jax.types import UNPUBLISHED, Chunk, GenerateRequest


def fingerprint(version: int) -> str:
    """The weights' version as OpenAI's `system_fingerprint`: "version-3"."""
    return "unpublished" if version == UNPUBLISHED else f"version-{version}"


class ShownText:
    """Text in pieces, without the stop string that ends it: what may be the beginning of one is held back.

    Whether one has ended the answer is the scheduler's word, which does not look for them before `min_tokens`.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def add(self, piece: str) -> str:
        """What is safe to show."""
        text = self._held + piece
        kept = max((_beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def stop(self, piece: str) -> str:
        """What is left to show when the last piece completes a stop string, which is then in `held` + piece."""
        text, self._held = self._held + piece, ""
        return text[: min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))]

    def end(self, piece: str) -> str:
        """What is left to show when the answer ends otherwise."""
        text, self._held = self._held + piece, ""
        return text


def _beginning(text: str, stop: str) -> int:
    """Characters at the end of the text that begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


Likeliest = tuple[tuple[str, float], ...]  # text and log-probability of tokens, the likeliest first


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What one chunk adds to a choice. `texts` are those of the tokens, one by one, and `offset` where they begin."""

    text: str
    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    texts: tuple[str, ...]
    alternatives: tuple[Likeliest, ...]  # of each token; none where they are not asked for
    offset: int  # characters
    finish_reason: str  # "" while the choice goes on


class Choice:
    """One answer as it grows."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer):
        self.request = request
        self.tokens = 0  # so far
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._shown = ShownText(request.sampling.stop_strings)
        self._characters = 0
        self._before = int(request.prompt_tokens[-1])  # the token before the next one

    def add(self, chunk: Chunk) -> Part:
        """What a chunk adds."""
        texts = self._texts(chunk)
        *before, last = texts or [""]
        shown = "".join(map(self._shown.add, before)) + self._close(chunk)(last)
        offset = self._characters
        self._characters += sum(map(len, texts))
        self.tokens += len(chunk.tokens)
        return Part(
            text=shown,
            tokens=chunk.tokens,
            logprobs=chunk.logprobs,
            versions=chunk.versions,
            texts=tuple(texts),
            alternatives=self._alternatives(chunk, texts),
            offset=offset,
            finish_reason=chunk.finish_reason,
        )

    def _alternatives(self, chunk: Chunk, texts: Sequence[str]) -> tuple[Likeliest, ...]:
        if chunk.alternatives is None:
            return ()
        made, found = [], zip(chunk.alternatives.tokens.tolist(), chunk.alternatives.logprobs.tolist(), strict=True)
        for own, text, (tokens, logprobs) in zip(chunk.tokens.tolist(), texts, found, strict=True):
            pairs = [pair for pair in zip(tokens, logprobs, strict=True) if math.isfinite(pair[1])]  # that may be drawn
            made.append(tuple((text if token == own else self._spelled(token), logprob) for token, logprob in pairs))
            self._before = own
        return tuple(made)

    def _spelled(self, token: int) -> str:
        """A token as it reads behind the one before, as that of a word may begin with a space only there.

        Tokens may read alike: parts of a character, or what ends an answer.
        """
        before, both = (self._tokenizer.decode(ids) for ids in ([self._before], [self._before, token]))
        return both[len(before) :] if both.startswith(before) else self._tokenizer.decode([token])

    def _texts(self, chunk: Chunk) -> list[str]:
        """A text for each token: "" for one that ends the answer, or is only the beginning of a character."""
        spelled = [[token] for token in chunk.tokens.tolist()]
        if spelled and self._ends_by_token(chunk):
            spelled[-1] = []
        last = len(spelled) - 1 if chunk.finish_reason else -1
        return [self._stream.add(token, ended=at == last) for at, token in enumerate(spelled)]

    def _close(self, chunk: Chunk) -> Callable[[str], str]:
        """How the text of the chunk's last token is shown."""
        if not chunk.finish_reason:
            return self._shown.add
        by_string = chunk.finish_reason == "stop" and not self._ends_by_token(chunk)
        return self._shown.stop if by_string else self._shown.end

    def _ends_by_token(self, chunk: Chunk) -> bool:
        ids = self.request.sampling.stop_tokens
        return chunk.finish_reason == "stop" and len(chunk.tokens) > 0 and int(chunk.tokens[-1]) in ids


def joined(parts: Sequence[Part]) -> Part:
    """All parts of a choice as one."""
    return Part(
        text="".join(part.text for part in parts),
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        texts=tuple(text for part in parts for text in part.texts),
        alternatives=tuple(each for part in parts for each in part.alternatives),
        offset=parts[0].offset,
        finish_reason=parts[-1].finish_reason,
    )


class Answer:
    """The JSON objects of one answer: all have the same id and time."""

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer):
        self._asked = asked
        self._common = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": _OBJECTS[asked.chat, asked.stream],
            "created": int(time.time()),
            "model": model,
        }
        self._version = UNPUBLISHED
        # Choices of one prompt lie together, as in OpenAI's answers.
        self.choices = [Choice(request, tokenizer) for request in asked.requests for _ in request.samples]
        self._begun: set[int] = set()  # choices that a part of the stream has begun

    def index(self, prompt: int, sample: int) -> int:
        return prompt * self._asked.samples + sample

    def whole(self, parts: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """The answer in one object, from all parts of each choice."""
        choices = []
        for index, part in enumerate(map(joined, parts)):
            message: dict[str, Any] = {"role": "assistant", "content": part.text}
            content: dict[str, Any] = {"message": message} if self._asked.chat else {"text": part.text}
            choices.append({"index": index, **content, **self._details(index, part, first=True)})
        return {**self._common, "choices": choices, "usage": self._usage(), **self._fingerprint()}

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """One object of a stream."""
        first = index not in self._begun
        self._begun.add(index)
        role = {"role": "assistant"} if first else {}
        delta = {**role, "content": part.text}
        content: dict[str, Any] = {"delta": delta} if self._asked.chat else {"text": part.text}
        choice = {"index": index, **content, **self._details(index, part, first=first)}
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._common, "choices": [choice], **usage, **self._fingerprint(part)}

    def closing(self) -> dict[str, Any]:
        """The last object of a stream that was asked to tell its usage."""
        return {**self._common, "choices": [], "usage": self._usage(), **self._fingerprint()}

    def _details(self, index: int, part: Part, *, first: bool) -> dict[str, Any]:
        details: dict[str, Any] = {"finish_reason": part.finish_reason or None, "logprobs": None}
        self._version = max(self._version, int(part.versions.max(initial=UNPUBLISHED)))
        if self._asked.logprobs:
            details["logprobs"] = _chat_logprobs(part) if self._asked.chat else _logprobs(part)
        if self._asked.token_ids:
            if first:
                details["prompt_token_ids"] = self.choices[index].request.prompt_tokens.tolist()
            details["token_ids"] = part.tokens.tolist()
            details["token_logprobs"] = part.logprobs.tolist()
            details["versions"] = part.versions.tolist()
        return details

    def _fingerprint(self, part: Part | None = None) -> dict[str, str]:
        """Of the newest weights in the answer, or of those behind the last token of a part."""
        own = part is not None and len(part.versions)
        return {"system_fingerprint": fingerprint(int(part.versions[-1]) if part and own else self._version)}

    def _usage(self) -> dict[str, int]:
        """A prompt counts once, however many answers it gets."""
        prompts = sum(len(request.prompt_tokens) for request in self._asked.requests)
        answers = sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}


_OBJECTS = {
    (False, False): "text_completion",
    (False, True): "text_completion",
    (True, False): "chat.completion",
    (True, True): "chat.completion.chunk",
}


def _logprobs(part: Part) -> dict[str, Any]:
    offsets = part.offset + np.cumsum([0, *map(len, part.texts)])[:-1]
    drawn = zip(part.texts, part.logprobs.tolist(), strict=True)
    pairs = zip(part.alternatives, drawn, strict=bool(part.alternatives))  # without any there is nothing to pair
    alternatives = [_by_text(each) | dict([own]) for each, own in pairs]
    return {
        "tokens": list(part.texts),
        "token_logprobs": part.logprobs.tolist(),
        "top_logprobs": alternatives or None,
        "text_offset": offsets.tolist(),
    }


def _by_text(alternatives: Likeliest) -> dict[str, float]:
    """As completions have them: of tokens that read alike the likeliest."""
    likeliest: dict[str, float] = {}
    for text, logprob in alternatives:
        likeliest.setdefault(text, logprob)
    return likeliest


def _chat_logprobs(part: Part) -> dict[str, Any]:
    alternatives: Sequence[Likeliest] = part.alternatives or [()] * len(part.texts)
    content = [
        {
            **_chat_logprob(text, logprob),
            "top_logprobs": [_chat_logprob(*each) for each in others],
        }
        for text, logprob, others in zip(part.texts, part.logprobs.tolist(), alternatives, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
