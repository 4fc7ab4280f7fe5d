"""Prompt sources: from a data set or a generator of problems to prompts by position.

In: what the config names, "module:factory" or a `.jsonl` file. Out: a `PromptSource`, in which prompt `uid` is always
the same one, so that a run goes on from any place with no other state than the numbers of the prompts that are done.
Called by the launchers (`load_source`) and the rollout controller (`take`). Waits for nobody.
"""

import functools
import inspect
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.config import resolve
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import Prompt, PromptSource

PROMPT_FIELDS = ("prompt", "question", "problem")


class PromptTooLong(ValueError):
    """A prompt that exceeds data.max_prompt_tokens; it is counted and replaced, never cut."""

    cause = "too_long"


SETTINGS = {"train": ("data.train", "data.options"), "held_out": ("eval.data", "eval.options")}


def load_source(spec: str, *, split: str, seed: int, tokenizer: Tokenizer, options: Mapping[str, Any]) -> PromptSource:
    """The source that `data.train` or `eval.data` names; `split` is "train" or "held_out".

    "module:factory" calls `factory(split=..., seed=..., tokenizer=..., **options)`, which returns any object with
    `source[uid] -> Prompt` (and `len`, if it is finite). A path that ends in `.jsonl` is read as `JsonLines`.
    Raises ValueError or FileNotFoundError that name the setting.
    """
    key, options_key = SETTINGS[split]
    factory = functools.partial(JsonLines, spec) if spec.endswith(".jsonl") else resolve(spec, key)
    arguments = {"split": split, "seed": seed, "tokenizer": tokenizer, **options}
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{options_key}={dict(options)} do not fit {key}={spec!r}, which takes {inspect.signature(factory)}: {error}"
        ) from error
    return factory(**arguments)


def take(source: PromptSource, uid: int, *, max_prompt_tokens: int) -> Prompt:
    """Prompt `uid` of a source, checked. Raises PromptTooLong, and ValueError for a prompt that cannot be asked."""
    prompt = source[uid]
    if prompt.uid != uid:
        raise ValueError(f"the prompt source gave prompt {prompt.uid} for uid={uid}; source[uid].uid must be uid")
    if len(prompt.tokens) == 0:
        raise ValueError(f"prompt {uid} has no tokens; a model needs at least one to go on from")
    if len(prompt.tokens) > max_prompt_tokens:
        raise PromptTooLong(
            f"prompt {uid} has {len(prompt.tokens)} tokens and data.max_prompt_tokens={max_prompt_tokens}; "
            "raise that, or take it out of the data"
        )
    return prompt


class JsonLines:
    """Problems of a `.jsonl` file, in a new seeded order each epoch: uid = epoch * len(file) + position.

    Each line is an object with the problem under "prompt", "question" or "problem" and the reference under "answer". Of
    an answer that explains itself (GSM8K) what follows the last `####` is taken. `template` is the text to ask, with
    "{prompt}" where the problem goes.
    """

    def __init__(self, path: str, *, split: str, seed: int, tokenizer: Tokenizer, template: str = "{prompt}") -> None:
        if "{prompt}" not in template:
            raise ValueError(f'data.options.template={template!r} must contain "{{prompt}}", where the problem goes')
        self._problems = _read_problems(pathlib.Path(path), f"{SETTINGS[split][0]}={path!r}")
        self._seed = seed
        self._tokenizer = tokenizer
        self._template = template

    def __len__(self) -> int:
        """Problems in the file, the prompts of one epoch."""
        return len(self._problems)

    def __getitem__(self, uid: int) -> Prompt:
        epoch, position = divmod(uid, len(self))
        problem, answer = self._problems[_order(len(self), self._seed, epoch)[position]]
        text = self._template.replace("{prompt}", problem)
        return Prompt(uid=uid, tokens=np.array(self._tokenizer.encode(text), np.int32), text=text, answer=answer)


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch: a function of its arguments only, kept because neighbours ask for the same one."""
    return np.random.default_rng((seed, epoch)).permutation(size)


def _read_problems(file: pathlib.Path, setting: str) -> list[tuple[str, str]]:
    """(problem, answer) of each line that is not blank."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{setting}: there is no such file (looked for {file.absolute()}); give the path of a .jsonl file"
        )
    lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at characters that JSON allows
    problems = [
        _problem(line, f"{setting}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not problems:
        raise ValueError(f"{setting}: the file is empty; it needs one JSON object per line")
    return problems


def _problem(line: str, place: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); each line is one object on its own") from error
    field = next((field for field in PROMPT_FIELDS if field in record), None) if isinstance(record, dict) else None
    if field is None or record.get("answer") is None:
        raise ValueError(f'{place}: needs one of {", ".join(PROMPT_FIELDS)}, and "answer"; it begins {line[:80]!r}')
    return str(record[field]), str(record["answer"]).rsplit("####", 1)[-1].strip()
