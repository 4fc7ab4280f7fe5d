"""The tokenizer wrapper on small directories made here."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from areal_jax.tokenizer import Tokenizer

WORDS = ["<pad>", "<bos>", "<eos>", "<end>", "one", "two", "<unk>"]


def write(directory, *, files=None, bos=False, cut=False):
    library = Library(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "<bos>", "<eos>", "<end>"])
    if bos:
        library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    if cut:
        library.enable_truncation(2)
        library.enable_padding(length=8)
    library.save(str(directory / "tokenizer.json"))
    for name, content in (files or {"config.json": {"eos_token_id": 2}}).items():
        (directory / name).write_text(json.dumps(content))
    return directory


def test_text_goes_in_and_comes_out_without_special_tokens(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, bos=True))
    assert tokenizer.encode("one two") == [1, 4, 5]
    assert tokenizer.decode(np.array([4, 5, 2], np.int32)) == "one two"
    assert tokenizer.vocab_size == 7


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    assert Tokenizer.load(write(tmp_path, cut=True)).encode("one two one two") == [4, 5, 4, 5]


@pytest.mark.parametrize(
    ("files", "eos", "pad"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 3], "pad_token_id": 0}}, (2, 3), 0),
        ({"generation_config.json": {"eos_token_id": 3}}, (3,), 3),
        ({"tokenizer_config.json": {"eos_token": "<eos>", "pad_token": "<pad>"}}, (2,), 0),
        ({"tokenizer_config.json": {"eos_token": {"content": "<end>"}, "pad_token": None}}, (3,), 3),
        ({"config.json": {"eos_token_id": [3, 2], "pad_token_id": 0}}, (3, 2), 0),
        # The model's default in config.json counts only where the other two name none.
        ({"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": 4}}, (3,), 3),
        ({"generation_config.json": {"eos_token_id": 2}, "tokenizer_config.json": {"eos_token": "<end>"}}, (2, 3), 2),
    ],
)
def test_ends_and_padding_come_from_the_files_that_name_them(tmp_path, files, eos, pad):
    tokenizer = Tokenizer.load(write(tmp_path, files=files))
    assert (tokenizer.eos_ids, tokenizer.pad_id) == (eos, pad)


def test_a_missing_directory_or_file_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model.path=.*gone: it is not a directory; a model directory"):
        Tokenizer.load(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"it has no tokenizer.json; .*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_a_model_without_an_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no end-of-sequence token; looked for .*generation_config.json"):
        Tokenizer.load(write(tmp_path, files={"config.json": {"eos_token_id": None}}))


def test_an_end_outside_of_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"eos ids \[151645\] .* outside of the vocabulary of 7"):
        Tokenizer.load(write(tmp_path, files={"config.json": {"eos_token_id": 151645}}))


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json: the tokenizers library .* cannot read it"):
        Tokenizer.load(tmp_path)
