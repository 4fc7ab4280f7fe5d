"""The two classes that google-jetstream imports, with the attributes that it touches.

Stands in for `seqio.vocabularies` of seqio 0.0.20 (Apache-2.0, https://github.com/google/seqio). JetStream subclasses
`Vocabulary` in `mock_utils` (its subclass brings every attribute itself) and builds a `SentencePieceVocabulary` in
`token_utils.load_vocab`. Neither class can tokenize; each use of one says so.
"""

from typing import NoReturn


class Vocabulary:
    """Base class of vocabularies: declares what JetStream reads and leaves all of it to the subclass."""

    pad_id: int
    eos_id: int
    bos_id: int

    def encode_tf(self, s: str) -> NoReturn:
        """Raises `NotImplementedError`; a subclass turns text into token ids."""
        _refuse(f"{type(self).__name__}.encode_tf")

    def decode(self, ids: object) -> NoReturn:
        """Raises `NotImplementedError`; a subclass turns token ids into text."""
        _refuse(f"{type(self).__name__}.decode")


class SentencePieceVocabulary(Vocabulary):
    """Raises `NotImplementedError` when it is built: reading SentencePiece files takes the real package."""

    def __init__(self, sentencepiece_model_file: str, extra_ids: int = 0) -> None:
        _refuse(f"SentencePieceVocabulary({sentencepiece_model_file!r}, extra_ids={extra_ids})")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: this is areal_jax's stand-in for seqio, which has no tokenizer. Override Engine.build_tokenizer to "
        "return your own jetstream.engine.tokenizer_api.Tokenizer, or install the real package "
        "(pip install --force-reinstall seqio==0.0.20; it brings TensorFlow)."
    )
