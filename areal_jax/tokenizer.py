"""The tokenizer of a model directory in the Hugging Face format, by the `tokenizers` library alone.

In: a directory with `tokenizer.json`, and the files that name its end-of-sequence tokens. Out: token ids and text.
Called by the prompt sources, the rollout controller and the generation server. Waits for nobody.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

EOS_FILES = ("generation_config.json", "tokenizer_config.json", "config.json")


class Tokenizer:
    """Text to token ids and back. Make it with `Tokenizer.load`.

    `eos_ids` are all tokens that end a completion, `pad_id` is what padding holds (it is always masked, never read as
    an end), `vocab_size` is one more than the largest token id.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...], pad_id: int) -> None:
        tokenizer.no_truncation()  # tokenizer.json may ask for both; a prompt is never cut silently
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """The tokenizer of a directory. Raises FileNotFoundError or ValueError that say what was looked for and where.

        The ends of a completion are those that `generation_config.json` names (one id or a list) and the `eos_token` of
        `tokenizer_config.json`, or those of `config.json` where neither names one. Padding is the pad token of the same
        files, or the first end token.
        """
        directory = pathlib.Path(path)
        tokenizer = _read_tokenizer(directory)
        generation, special, model = (_read_json(directory / name) for name in EOS_FILES)
        eos = [*_ids(generation.get("eos_token_id")), *_special(tokenizer, special, "eos_token")]
        eos = list(dict.fromkeys(eos or _ids(model.get("eos_token_id"))))
        if not eos:
            raise ValueError(
                f"model.path={directory}: no end-of-sequence token; looked for eos_token_id in generation_config.json "
                'and config.json and for eos_token in tokenizer_config.json there: add {"eos_token_id": ID} to '
                "generation_config.json, or a completion would only ever end at its length limit"
            )
        pad = [
            *_special(tokenizer, special, "pad_token"),
            *_ids(generation.get("pad_token_id")),
            *_ids(model.get("pad_token_id")),
        ]
        found = cls(tokenizer, eos_ids=tuple(eos), pad_id=(pad or eos)[0])
        if not all(0 <= token < found.vocab_size for token in (*eos, found.pad_id)):
            raise ValueError(
                f"model.path={directory}: eos ids {eos} or pad id {found.pad_id} lie outside of the vocabulary of "
                f"{found.vocab_size} in tokenizer.json; the files there belong to different models"
            )
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens (BOS) that the tokenizer itself adds."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text without special tokens. Not the inverse of `encode`: completions stay token ids wherever they train."""
        return self._tokenizer.decode(np.asarray(ids, np.int64).tolist())


def _read_tokenizer(directory: pathlib.Path) -> tokenizers.Tokenizer:
    file = directory / "tokenizer.json"
    if not file.exists():
        there = "it is not a directory" if not directory.is_dir() else "it has no tokenizer.json"
        raise FileNotFoundError(
            f"model.path={directory}: {there}; a model directory in the Hugging Face format is needed (config.json, "
            "tokenizer.json, *.safetensors). Where a model has only a vocabulary of its own, the package transformers "
            "makes the file: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type, and does not name the file
        raise ValueError(f"{file}: the tokenizers library {tokenizers.__version__} cannot read it: {error}") from error


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON file's content, or nothing where the model does not have that file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _special(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> list[int]:
    """The id of a special token, which the config gives as a text or as an object with its `content`."""
    token = config.get(name)
    text = token["content"] if isinstance(token, dict) else token
    found = None if text is None else tokenizer.token_to_id(text)
    return [] if found is None else [found]
