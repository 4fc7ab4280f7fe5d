"""The model of `model.path` as every part of a run holds it.

In: a checked config, and the model's files. Out: its configuration, or an error that says what does not fit. Called by
the parts of a run and by the plans before it; waits for nobody.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from areal_jax.config import Config
from areal_jax.hub import model_directory

if TYPE_CHECKING:  # the controller starts without jax
    from areal_jax.models.transformer import TransformerConfig


def model_config(config: Config) -> "TransformerConfig":
    """The model of `model.path` as every part of the run holds it: trainer and generators agree on its arrays.

    The vocabulary is padded to what the tensor axes of both divide, and ids that the tokenizer does not define are
    never sampled. Raises ValueError when the tokenizer has more ids than the model, or when a sequence can be longer
    than the model was made for: beyond, it computes nonsense silently.
    """
    made_of = (
        f"generation.max_length={config.generation.max_length}"
        if config.generation.max_length
        else f"data.max_prompt_tokens={config.data.max_prompt_tokens} and rollout.max_new_tokens="
        f"{config.rollout.max_new_tokens}, or eval.max_new_tokens"
    )
    return _shape_for(config, config.cache_length, made_of)  # no sequence of the trainer is longer


def supervised_model_config(config: Config) -> "TransformerConfig":
    """The same for supervised fine-tuning, whose sequences are examples."""
    return _shape_for(config, config.sft.max_length, "sft.max_length")


def _shape_for(config: Config, longest: int, made_of: str) -> "TransformerConfig":
    """The model, checked for sequences of `longest` tokens, which `made_of` (settings) allow."""
    from areal_jax.models.huggingface import load_config
    from areal_jax.tokenizer import Tokenizer

    directory = model_directory(config.model.path)
    shape = load_config(directory, vocab_multiple=config.vocab_multiple)
    if config.model.shape:
        check_shape(config, shape)
    ids = Tokenizer.load(directory).vocab_size
    if ids > shape.vocab_size:
        raise ValueError(
            f"model.path={directory}: the tokenizer defines {ids} token ids, and config.json has vocab_size="
            f"{shape.vocab_size}: the model has no weights for the last ones. The files there belong to different "
            "models, or tokens were added without resizing the embedding"
        )
    if longest > shape.max_positions:
        raise ValueError(
            f"the longest sequence has {longest} tokens ({made_of}), and the model of "
            f"model.path={config.model.path} is made for max_position_embeddings={shape.max_positions}; lower them"
        )
    kernels = "batch_invariant" if config.generation.batch_invariant else config.model.attention
    return dataclasses.replace(shape, live_vocab=ids, kernels=kernels)


def check_shape(config: Config, shape: "TransformerConfig") -> None:
    """Raises ValueError that names the fields in which a model differs from `model.shape`."""
    from areal_jax.models.huggingface import load_config

    wanted = dataclasses.asdict(load_config(pathlib.Path(config.model.shape)))
    here = dataclasses.asdict(shape) | dict.fromkeys(("padded_vocab", "live_vocab"), 0)  # how it lies in memory
    differing = [name for name in wanted if wanted[name] != here[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"config.model.path={config.model.path} has {name}={here[name]!r}, where config.model.shape="
            f"{config.model.shape} says {wanted[name]!r} ({len(differing)} such fields: {', '.join(differing)}); give "
            "the model that this recipe is for, or leave model.shape empty"
        )
