"""Requests of OpenAI's completions and chat completions API, read whole or refused by name.

In: the JSON object of a request, the tokenizer, the tokens that this server holds per sequence. Out: `Asked`, with a
`GenerateRequest` per prompt. Called by `http_server`. Waits for nobody.

A field that would change the answer in a way that this server does not know is refused unless it has its neutral value;
an unknown one is always refused: no request is answered by something else than it asked for. Beyond OpenAI's fields:

    top_k, min_p, min_tokens    truncate the distribution (0 = not), and hold back its ends for the first tokens
    stop_token_ids              tokens that end an answer beside the model's own
    return_token_ids            token ids, log-probabilities and versions of prompt and answer, per token
    timeout_s                   the request's deadline
    chat_template_kwargs        variables of the model's chat template, like enable_thinking
"""

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.types import LEAST_TEMPERATURE, MOST_TEMPERATURE, GenerateRequest, Sampling

MAX_TOKENS = 16  # of a completion that does not say: OpenAI's default; a chat answer may fill the context
MAX_CHOICES = 128  # OpenAI's limit of n
MOST_TIMEOUT_S = 1e9
SLACK = 8  # times the characters of a sequence of longest tokens: a tokenizer may drop or join some
MAX_ALTERNATIVES = 20  # OpenAI's limit of top_logprobs
# RL's prompts have uids from 0 on and far below this, evaluation's too; sampling keys see 32 bits of a uid.
FIRST_UID = 2**31

NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # what is not served, and the values with which it changes nothing
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # name who asks, and change no answer


class Tokenizer(Protocol):
    """`areal_jax.tokenizer.Tokenizer`."""

    vocab_size: int
    longest_token: int  # characters

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def chat_variables(self) -> frozenset[str]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ApiError(Exception):
    """An answer that is an error: HTTP status, what to say, and OpenAI's `param` and `code` for it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 408: "timeout_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request of the API: one `GenerateRequest` per prompt, n samples each, and what the answer shall hold."""

    requests: tuple[GenerateRequest, ...]
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool

    @property
    def samples(self) -> int:
        return len(self.requests[0].samples)

    @property
    def choices(self) -> int:
        return len(self.requests) * self.samples


class Fields:
    """The fields of a JSON object. Each is taken once; null is the same as absent; what is left over is unknown."""

    def __init__(self, body: Any, *, inside: str = ""):
        self._inside = inside
        if not isinstance(body, dict):
            raise ApiError(400, f"{inside.rstrip('.') or 'the body'} must be a JSON object, not {_shown(body)}")
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, of one of the kinds (a bool is no int), or the default."""
        if name not in self._left:
            return default
        value = self._left.pop(name)
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_NAMES[kind] for kind in kinds if kind is not int or float not in kinds)
            raise ApiError(400, f"{self._inside}{name}={_shown(value)} must be {wanted}", param=f"{self._inside}{name}")
        return value

    def number(self, name: str, kinds: type | tuple[type, ...], default: Any, least: float, most: float) -> Any:
        value = self.take(name, kinds, default)
        if value is not None and not least <= value <= most:
            bounds = f"at least {least}" if math.isinf(most) else f"between {least} and {most:g}"
            raise ApiError(400, f"{name}={_shown(value)} must be {bounds}", param=name)
        return value

    def refuse_rest(self, server: str) -> None:
        """ApiError for everything that nobody took, but labels and neutral values."""
        for name, value in self._left.items():
            if name in LABELS or value in NEUTRAL.get(name, ()):
                continue
            if name in NEUTRAL:
                neutral = " or ".join(_shown(each) for each in NEUTRAL[name])
                raise ApiError(
                    400,
                    f"{name}={_shown(value)} is not supported by {server}; leave it out (or give {neutral})",
                    param=name,
                    code="unsupported_parameter",
                )
            raise ApiError(400, f"unknown parameter {self._inside}{name}", param=name, code="unknown_parameter")


_NAMES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}
NUMBER = (int, float)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_completion(body: Any, tokenizer: Tokenizer, *, max_length: int, top_logprobs: int) -> Asked:
    """A request of /v1/completions, to a server of at most these. Raises ApiError."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt", (str, list)), tokenizer, max_length)
    wants_logprobs = _alternatives(fields, "logprobs", None, top_logprobs)
    longest = max(map(len, prompts))
    max_tokens = fields.number("max_tokens", int, min(MAX_TOKENS, max(1, max_length - longest)), 1, math.inf)
    _check_length("prompt", longest, max_tokens, max_length)
    return _asked(fields, tokenizer, prompts, max_tokens, chat=False, logprobs=wants_logprobs)


def read_chat(body: Any, tokenizer: Tokenizer, *, max_length: int, top_logprobs: int) -> Asked:
    """A request of /v1/chat/completions, to a server of at most these. Raises ApiError."""
    fields = Fields(body)
    messages = _messages(fields.take("messages", list))
    _check_text("messages", sum(len(message["content"] or "") for message in messages), tokenizer, max_length)
    variables = fields.take("chat_template_kwargs", dict, {})
    unknown = sorted(variables.keys() - tokenizer.chat_variables)
    if unknown:
        known = ", ".join(sorted(tokenizer.chat_variables)) or "no variables"
        raise ApiError(400, f"chat_template_kwargs: the model's template reads {known}, and not {', '.join(unknown)}")
    try:
        prompt = tokenizer.encode_chat(messages, **variables)
    except ValueError as error:
        raise ApiError(400, f"{error}; /v1/completions takes a prompt as it is", param="messages") from error
    wants_logprobs = fields.take("logprobs", bool, False)
    alternatives = _alternatives(fields, "top_logprobs", 0, top_logprobs)
    if alternatives and not wants_logprobs:
        raise ApiError(400, f"top_logprobs={alternatives} needs logprobs=true", param="top_logprobs")
    limits = [fields.number(name, int, None, 1, math.inf) for name in ("max_tokens", "max_completion_tokens")]
    given = sorted({limit for limit in limits if limit is not None})
    if len(given) == 2:
        raise ApiError(400, f"max_tokens={limits[0]} and max_completion_tokens={limits[1]} are one thing; give one")
    max_tokens = given[0] if given else max(1, max_length - len(prompt))
    _check_length("messages", len(prompt), max_tokens, max_length)
    logprobs = alternatives if wants_logprobs else None
    return _asked(fields, tokenizer, [np.array(prompt, np.int32)], max_tokens, chat=True, logprobs=logprobs)


def _alternatives(fields: Fields, name: str, default: int | None, most: int) -> int | None:
    """How many of the likeliest tokens are shown beside each that was sampled."""
    given: int | None = fields.number(name, int, default, 0, MAX_ALTERNATIVES)
    if given is not None and given > most:
        raise ApiError(
            400, f"{name}={given}: this server shows at most {most} alternatives (generation.top_logprobs)", param=name
        )
    return given


def _asked(
    fields: Fields,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    max_tokens: int,
    *,
    chat: bool,
    logprobs: int | None,
) -> Asked:
    """What both kinds of request have in common. `logprobs` is how many alternatives they show; None: show none."""
    model = fields.take("model", str)
    if model is None:
        raise ApiError(400, "model is missing; /v1/models lists what is served", param="model")
    samples = tuple(range(fields.number("n", int, 1, 1, MAX_CHOICES)))
    seed = fields.take("seed", int)
    seed = secrets.randbits(63) if seed is None else seed
    timeout_s = fields.number("timeout_s", NUMBER, 0.0, 0, MOST_TIMEOUT_S)
    sampling = _sampling(fields, tokenizer, max_tokens)
    stream = fields.take("stream", bool, False)
    options = Fields(fields.take("stream_options", dict, {}), inside="stream_options.")
    include_usage = options.take("include_usage", bool, False)
    options.take("include_obfuscation", bool)  # of OpenAI's own transport
    options.refuse_rest("this server")
    token_ids = fields.take("return_token_ids", bool, False)
    fields.refuse_rest("this server")
    requests = []
    for index, prompt in enumerate(prompts):
        key, uid = sampling_identity(seed, index)
        own = dataclasses.replace(sampling, seed=key)
        requests.append(
            GenerateRequest(uid, prompt, samples, own, timeout_s=float(timeout_s), top_logprobs=logprobs or 0)
        )
    return Asked(tuple(requests), model, chat, stream, include_usage, logprobs is not None, token_ids)


def _sampling(fields: Fields, tokenizer: Tokenizer, max_tokens: int) -> Sampling:
    top_k = fields.number("top_k", int, 0, -1, math.inf)
    top_p = fields.number("top_p", NUMBER, 1.0, 0, 1)
    if top_p == 0:
        raise ApiError(400, "top_p=0 keeps no token; temperature=0 takes the most likely one", param="top_p")
    min_tokens = fields.number("min_tokens", int, 0, 0, math.inf)
    if min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens={min_tokens} exceeds the most tokens, {max_tokens}", param="min_tokens")
    return Sampling(
        max_new_tokens=max_tokens,
        temperature=_temperature(fields.number("temperature", NUMBER, 1.0, 0, MOST_TEMPERATURE)),
        top_k=min(max(0, top_k), tokenizer.vocab_size),  # some clients say -1 for all
        top_p=float(top_p),
        min_p=float(fields.number("min_p", NUMBER, 0.0, 0, 1)),
        min_new_tokens=min_tokens,
        stop_tokens=tuple(dict.fromkeys([*tokenizer.eos_ids, *_stop_token_ids(fields, tokenizer)])),
        stop_strings=_stop_strings(fields.take("stop", (str, list), [])),
    )


def _temperature(given: float) -> float:
    """Refuses what divides logits beyond float32."""
    if 0 < given < LEAST_TEMPERATURE:
        raise ApiError(
            400, f"temperature={given} must be 0 (greedy) or at least {LEAST_TEMPERATURE}", param="temperature"
        )
    return float(given)


def _stop_strings(given: str | list[Any]) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, f"stop={_shown(given)} must be a text that is not empty, or a list of such", param="stop")
    return tuple(stops)


def _stop_token_ids(fields: Fields, tokenizer: Tokenizer) -> list[int]:
    ids = fields.take("stop_token_ids", list, [])
    _check_ids("stop_token_ids", ids, tokenizer)
    return ids


def sampling_identity(seed: int, prompt_index: int) -> tuple[int, int]:
    """(seed, uid) that key the sampling: 63 bits that depend on what the client gave and on nothing else.

    The uid lies in a range of its own, so that no request of a client draws what a rollout draws.
    """
    digest = hashlib.blake2b(f"areal_jax/http/{seed}/{prompt_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4]), FIRST_UID | int.from_bytes(digest[4:]) >> 1


def _prompts(given: Any, tokenizer: Tokenizer, max_length: int) -> list[np.ndarray]:
    """The prompts of a text, several texts, token ids, or several lists of token ids."""
    if given is None:
        raise ApiError(400, "prompt is missing", param="prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list | str)
    if several and {str, list} <= {type(each) for each in given}:
        raise ApiError(400, f"prompt={_shown(given)} must be only texts, or only lists of token ids", param="prompt")
    prompts = []
    for each in given if several else [given]:
        if isinstance(each, str):
            _check_text("prompt", len(each), tokenizer, max_length)
            ids = _encode(each, tokenizer)
        else:
            ids = each
            _check_ids("prompt", ids, tokenizer)
        if not ids:
            raise ApiError(400, "prompt is empty; it needs at least one token", param="prompt")
        prompts.append(np.array(ids, np.int32))
    if len(prompts) > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts; a request may have {MAX_CHOICES}", param="prompt")
    return prompts


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error


def _check_ids(name: str, ids: Any, tokenizer: Tokenizer) -> None:
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ApiError(
            400, f"{name}={_shown(ids)} must be text or token ids, or a list of only one of the two", param=name
        )
    wrong = [each for each in ids if not 0 <= each < tokenizer.vocab_size]
    if wrong:
        raise ApiError(
            400, f"{name}: no token has id {wrong[0]}; the ids end at {tokenizer.vocab_size - 1}", param=name
        )


def _messages(given: Any) -> list[dict[str, Any]]:
    """The conversation, its texts joined where they come in parts."""
    if not given:
        raise ApiError(400, "messages is missing, or empty; it needs at least one message", param="messages")
    messages = []
    for index, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{index}] must be an object with a role", param="messages")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_part(part, index) for part in content)
        elif not isinstance(content, str | None):
            raise ApiError(400, f"messages[{index}].content must be text", param="messages")
        messages.append({**message, "content": content})
    return messages


def _text_part(part: Any, index: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ApiError(
            400, f'messages[{index}].content: this model reads text only, parts of {{"type": "text"}}', param="messages"
        )
    return part["text"]


def _check_text(param: str, characters: int, tokenizer: Tokenizer, max_length: int) -> None:
    """Refuses at once what would take long to encode and cannot fit, however long its tokens are."""
    if characters > SLACK * max_length * tokenizer.longest_token:
        raise ApiError(
            400,
            f"the prompt has {characters} characters, too many for the {max_length} tokens that this server holds per "
            "sequence (generation.max_length): shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_length(param: str, prompt: int, max_tokens: int, max_length: int) -> None:
    if prompt + max_tokens > max_length:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and {max_tokens} may follow, together {prompt + max_tokens}; this server "
            f"holds {max_length} per sequence (generation.max_length): shorten one of them",
            param=param,
            code="context_length_exceeded",
        )
