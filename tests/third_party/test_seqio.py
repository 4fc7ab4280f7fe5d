"""The stand-in for seqio: enough for JetStream's imports, and clear about what it is not."""

import importlib.metadata

import pytest
import seqio.vocabularies
from jetstream.engine import mock_utils, token_utils


def test_the_installed_seqio_is_the_stand_in_and_says_so_in_its_version():
    assert importlib.metadata.version("seqio") == "0.0.20+standin"


def test_it_satisfies_what_jetstream_requires():
    required = [r for r in importlib.metadata.requires("google-jetstream") if r.startswith("seqio")]
    assert required == ["seqio"]  # any version


def test_jetstreams_mock_vocabulary_works_on_it():
    vocabulary = mock_utils.TestVocab()
    assert isinstance(vocabulary, seqio.vocabularies.Vocabulary)
    assert vocabulary.encode_tf("AB").tolist() == [65, 66]
    assert vocabulary.decode([65, 66]) == "AB"


def test_building_a_sentencepiece_tokenizer_names_the_file_and_the_remedy():
    with pytest.raises(NotImplementedError, match=r"'model.spm'.*build_tokenizer.*pip install"):
        token_utils.load_vocab("model.spm")


def test_the_bare_vocabulary_refuses_to_tokenize():
    with pytest.raises(NotImplementedError, match="Vocabulary.encode_tf"):
        seqio.vocabularies.Vocabulary().encode_tf("1 + 1")
    with pytest.raises(NotImplementedError, match="Vocabulary.decode"):
        seqio.vocabularies.Vocabulary().decode([1])
