"""Which requests, and which weights, a generation server takes.

In: a request or weights, and the engine they are for. Out: nothing, or a ValueError that names what was given and the
rule. Called by the scheduler on the caller's thread, so that what can never run is refused before it waits.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

from areal_jax.generation import stop_strings
from areal_jax.generation.engine import STOP_TOKENS, Engine
from areal_jax.models.transformer import param_shapes
from areal_jax.types import LEAST_TEMPERATURE, MOST_TEMPERATURE, GenerateRequest, Sampling


def check(request: GenerateRequest, engine: Engine) -> None:
    """Raises ValueError for a request that can never run."""
    _check_lengths(request, engine.options.max_length)
    _check_ids(request, engine.config.vocab_size)
    _check_distribution(request.sampling)
    _check_ends(request.sampling, has_tokenizer=engine.tokenizer is not None)
    if not 0 <= request.top_logprobs <= engine.options.top_logprobs:
        raise ValueError(
            f"top_logprobs={request.top_logprobs} must be at least 0 and at most generation.top_logprobs="
            f"{engine.options.top_logprobs} of this server; ask for fewer, or start it with more"
        )
    if not 0 <= request.timeout_s < math.inf:
        raise ValueError(f"timeout_s={request.timeout_s} must be positive, or 0 for no limit")


def check_weights(params: Mapping[str, np.ndarray | jax.Array], version: int, engine: Engine) -> None:
    """Raises ValueError for weights whose names, shapes or dtypes are not those of the engine's model."""
    wanted = {name: shape.shape for name, shape in param_shapes(engine.config).items()}
    given = {name: tuple(array.shape) for name, array in params.items()}
    if given != wanted:
        differing = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        first = differing[0]
        raise ValueError(
            f"weights of version {version} do not fit this model in {len(differing)} tensors; {first}: "
            f"given {given.get(first, 'nothing')}, needed {wanted.get(first, 'nothing')}"
        )
    dtype = np.dtype(engine.options.dtype)
    differing = sorted(name for name, array in params.items() if np.dtype(array.dtype) != dtype)
    if differing:
        raise ValueError(
            f"weights of version {version} are not {dtype} in {len(differing)} tensors; {differing[0]}: given "
            f"{params[differing[0]].dtype}, needed {dtype}, which is generation.dtype: publish in it"
        )


def _check_ids(request: GenerateRequest, vocab_size: int) -> None:
    tokens, samples = np.asarray(request.prompt_tokens), request.samples
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"token {wrong[0]} of prompt {request.uid} lies outside of the vocabulary of {vocab_size}; is the "
            "tokenizer that of another model?"
        )
    if not samples or len(set(samples)) < len(samples) or not all(0 <= each < 2**31 for each in samples):
        raise ValueError(f"samples={samples} of prompt {request.uid} must be at least one index, each once, from 0 on")


def _check_lengths(request: GenerateRequest, max_length: int) -> None:
    new = request.sampling.max_new_tokens
    length = len(request.prompt_tokens) + new
    if not len(request.prompt_tokens):
        raise ValueError(f"prompt {request.uid} is empty; a prompt needs at least one token")
    if new < 1:
        raise ValueError(f"max_new_tokens={new} must be at least 1")
    if not 0 <= request.sampling.min_new_tokens <= new:
        raise ValueError(
            f"min_new_tokens={request.sampling.min_new_tokens} must lie between 0 and max_new_tokens={new}"
        )
    if length > max_length:
        raise ValueError(
            f"prompt {request.uid} has {len(request.prompt_tokens)} tokens and max_new_tokens={new}"
            f", together {length}; this server holds {max_length} per sequence: shorten one of them"
        )
    for sample, partial in request.partial.items():
        if len(partial.tokens) >= new:
            raise ValueError(f"sample {sample} of prompt {request.uid} already has its {new} tokens")


def _check_distribution(sampling: Sampling) -> None:
    if sampling.temperature != 0 and not LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE:
        raise ValueError(
            f"temperature={sampling.temperature} must be 0 (greedy) or lie between {LEAST_TEMPERATURE} and "
            f"{MOST_TEMPERATURE}"
        )
    if sampling.top_k < 0:
        raise ValueError(f"top_k={sampling.top_k} must be positive, or 0 for all tokens")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p={sampling.top_p} must be above 0 and at most 1 (all tokens)")
    if not 0 <= sampling.min_p < 1:
        raise ValueError(f"min_p={sampling.min_p} must be at least 0 (all tokens) and below 1")


def _check_ends(sampling: Sampling, *, has_tokenizer: bool) -> None:
    if len(sampling.stop_tokens) > STOP_TOKENS:
        raise ValueError(f"{len(sampling.stop_tokens)} stop tokens; a request may have {STOP_TOKENS}")
    wrong = [token for token in sampling.stop_tokens if not 0 <= token < 2**31]
    if wrong:
        raise ValueError(f"stop token {wrong[0]} is no token id; leave it out")
    stop_strings.check(sampling.stop_strings)
    if sampling.stop_strings and not has_tokenizer:
        raise ValueError("stop_strings need a tokenizer, and this engine has none; use stop_tokens")
