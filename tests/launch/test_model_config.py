"""The model as every part of a run holds it."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from areal_jax import config as config_lib
from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.launch.model_config import model_config
from areal_jax.models.safetensors_files import load_model, read_params
from configs import math

MODEL = pathlib.Path(__file__).parents[2] / "configs" / "arithmetic_model"
WORDS = 97


def settings(model=MODEL, **mesh):
    values = math.get_config()
    values.model.path = str(model)
    values.trainer.mesh.update(mesh)
    return config_lib.build(values)


def copy_of_model(directory, words: int) -> pathlib.Path:
    """The model with that many words in its tokenizer."""
    shutil.copytree(MODEL, directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"new{i}": i for i in range(WORDS, words)}
    tokenizer["model"]["vocab"] = {word: i for word, i in vocab.items() if i < words}
    file.write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize(("tensor", "rows"), [(1, 97), (2, 98), (8, 104), (-1, 97)])
def test_the_vocabulary_is_padded_to_what_the_trainers_tensor_axis_divides(tensor, rows):
    shape = model_config(settings(data=1, tensor=tensor))
    assert (shape.vocab_size, shape.vocab_rows, shape.live_rows) == (WORDS, rows, WORDS)


@pytest.mark.parametrize(("trainer", "generation", "rows"), [(1, 2, 98), (2, 3, 102), (-1, 4, 100)])
def test_the_vocabulary_fits_the_tensor_axes_of_trainer_and_servers(trainer, generation, rows):
    config = settings(data=1, tensor=trainer)
    config = dataclasses.replace(config, generation=dataclasses.replace(config.generation, tensor=generation))
    assert model_config(config).vocab_rows == rows


def test_a_run_may_do_without_kernels():
    config = settings()
    assert model_config(config).kernels == "auto"
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="plain"))
    assert model_config(plain).kernels == "plain"


def test_ids_that_the_tokenizer_does_not_define_are_not_live(tmp_path):
    shape = model_config(settings(copy_of_model(tmp_path / "model", words=90)))
    assert (shape.vocab_size, shape.vocab_rows, shape.live_rows) == (WORDS, WORDS, 90)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer defines 99 token ids, and config.json has vocab_size=97"):
        model_config(settings(copy_of_model(tmp_path / "model", words=99)))


def test_sequences_longer_than_the_model_was_made_for_are_refused():
    values = math.get_config()
    values.data.max_prompt_tokens, values.rollout.max_new_tokens = 64, 64  # 128, max_position_embeddings of the model
    assert model_config(config_lib.build(values)).max_positions == 128
    values.eval.max_new_tokens = 65
    with pytest.raises(ValueError, match=r"longest sequence has 129 tokens .*max_position_embeddings=128"):
        model_config(config_lib.build(values))


def test_an_engine_takes_weights_that_are_in_their_places_without_a_copy():
    shape = model_config(settings(tensor=2))
    engine = Engine(shape, EngineOptions(slots=1, max_length=32, dtype="bfloat16"))
    params = read_params(MODEL, shape, engine.places)
    loaded = engine.load(params, 0).params
    expected = load_model(MODEL)[1]
    for name, array in params.items():
        assert array.unsafe_buffer_pointer() == loaded[name].unsafe_buffer_pointer()
        assert array.dtype == "bfloat16"
    assert loaded["embedding"].shape == (98, 64)
    np.testing.assert_array_equal(loaded["embedding"][:WORDS], expected["embedding"].astype("bfloat16"))
    assert not np.asarray(loaded["embedding"][WORDS:]).any()
