"""Examples for supervised fine-tuning: what `sft.data` and `sft.eval_data` name, as tokens with what trains of them.

In: a data set (`rollout.data_sets` says which) or "module:factory", whose `factory(split=..., seed=..., tokenizer=...,
**options)` gives rows. Out: examples in the order of the rows, and by place those that are too long. Called by the
launchers. Waits for the disk.

| columns of a row | trains |
| --- | --- |
| `sft.prompt` (a text, or messages that end with the user's) and `sft.response` (a text) | the response, and the end |
| `messages`, where there is no response column | every turn of the assistant, as the chat template writes and ends it |

The prompt is asked as a run of reinforcement learning asks it: the options are those of `rollout.prompts.Problems` that
say how (template, system, chat, variables of the chat template). The response follows it as it is, and after it the
token that ends a text. A column inside of a column is named with a dot.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.config import DATA_FILES, HUB, SftConfig, resolve
from areal_jax.rollout.data_sets import Placed, Row, read_rows
from areal_jax.rollout.layouts import as_problem, look_up
from areal_jax.rollout.prompts import ASKING, Asking, make
from areal_jax.tokenizer import Message, Tokenizer, conversation
from areal_jax.types import Example

log = logging.getLogger(__name__)

MESSAGES = "messages"
TOLD = 5  # places of examples that are too long which the log names; the caller has all


class TooLong(NamedTuple):
    """An example that is left out: where it stands ("line 3"), and its tokens."""

    place: str
    tokens: int


class Loaded(NamedTuple):
    """The examples of a data set, and those that are left out."""

    examples: list[Example]
    too_long: list[TooLong]


def load_examples(settings: SftConfig, *, split: str, seed: int, tokenizer: Tokenizer) -> Loaded:
    """The examples of `sft.data` (split "train") or `sft.eval_data` ("held_out"); none is ever cut.

    Raises ValueError or FileNotFoundError that name the setting, and the line of an example that cannot be read.
    """
    key, spec, options_key, options = {
        "train": ("sft.data", settings.data, "sft.options", settings.options),
        "held_out": ("sft.eval_data", settings.eval_data, "sft.eval_options", settings.eval_options),
    }[split]
    if spec.startswith(HUB) or spec.endswith(DATA_FILES):
        asking, rows = _asking(tokenizer, options, options_key), read_rows(spec, split=split, key=key)
    else:
        asking = Asking(tokenizer)
        rows = _made_rows(spec, key, options_key, options, {"split": split, "seed": seed, "tokenizer": tokenizer})
    reader = Reader(asking, settings.prompt, settings.response)
    loaded = _read(reader, rows, f"{key}={spec!r}", settings.max_length)
    _tell(loaded, f"{key}={spec!r}", settings.max_length)
    return loaded


def _asking(tokenizer: Tokenizer, options: Mapping[str, Any], options_key: str) -> Asking:
    """How the options of a file or a hub name say that its prompts are asked."""
    own = {name: value for name, value in options.items() if name in ASKING}
    variables = {name: value for name, value in options.items() if name not in ASKING}
    asking = Asking(tokenizer, **own, variables=variables)
    asking.check(options_key, ASKING)
    return asking


def _made_rows(
    spec: str, key: str, options_key: str, options: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[Placed]:
    rows: Iterable[Row] = make(resolve(spec, key), given, options, named=f"{key}={spec!r}", options_key=options_key)
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _read(reader: "Reader", rows: Iterable[Placed], setting: str, max_length: int) -> Loaded:
    loaded = Loaded([], [])
    for place, row in rows:
        try:
            example = reader.example(row)
        except ValueError as error:
            raise ValueError(f"{setting}, {place}: {error}") from error
        if len(example) > max_length:
            loaded.too_long.append(TooLong(place, len(example)))
        else:
            loaded.examples.append(example)
    if not loaded.examples:
        longest = f"; all {len(loaded.too_long)} are longer than sft.max_length={max_length}" if loaded.too_long else ""
        raise ValueError(f"{setting}: there is no example to use{longest}")
    return loaded


def _tell(loaded: Loaded, setting: str, max_length: int) -> None:
    log.info("%s: %d examples", setting, len(loaded.examples))
    if loaded.too_long:
        told = ", ".join(f"{place} ({tokens})" for place, tokens in loaded.too_long[:TOLD])
        more = f" and {len(loaded.too_long) - TOLD} more" if len(loaded.too_long) > TOLD else ""
        log.warning(
            "%s: %d examples have more tokens than sft.max_length=%d and are left out: %s%s",
            setting, len(loaded.too_long), max_length, told, more,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reader:
    """Rows to examples; `prompt` and `response` are columns."""

    asking: Asking
    prompt: str
    response: str

    def example(self, row: Row) -> Example:
        """Raises ValueError for a row that lacks something, and says which columns it has."""
        response = look_up(row, self.response)
        if response is None and isinstance(look_up(row, MESSAGES), list):
            return self._from_turns(look_up(row, MESSAGES))
        prompt = look_up(row, self.prompt)
        if prompt is None or response is None:
            raise ValueError(
                f"needs a text in each of the columns {self.prompt} and {self.response} (sft.prompt, sft.response), or "
                f"a list of turns in {MESSAGES}; it has the columns {', '.join(row) or 'none at all'}"
            )
        return self._from_pair(prompt, response)

    def _from_pair(self, prompt: Any, response: Any) -> Example:
        if not isinstance(response, str) or not response.strip():
            raise ValueError(f"the response is {str(response)[:80]!r}; it must be a text that says something")
        _, asked = self.asking.ask(as_problem(prompt))
        tokenizer = self.asking.tokenizer
        said = [*tokenizer.encode_rendered(response), tokenizer.end_id]
        return _example([*asked, *said], [False] * len(asked) + [True] * len(said))

    def _from_turns(self, messages: Any) -> Example:
        """Each turn of the assistant is what the chat template adds to the conversation before it."""
        turns = self._checked(messages)
        tokenizer, variables = self.asking.tokenizer, self.asking.variables
        text, tokens, trains = "", list[int](), list[bool]()
        for i in (i for i, turn in enumerate(turns) if turn["role"] == "assistant"):
            if not turns[i]["content"].strip():
                raise ValueError(
                    f"turn {i + 1} of the conversation, the assistant's, must be a text that says something"
                )
            asked = tokenizer.render_chat(turns[:i], **variables)
            answered = tokenizer.render_answered(turns[: i + 1], **variables)
            if not asked.startswith(text) or not answered.startswith(asked):
                raise ValueError(
                    f"the chat template writes turn {i + 1} of the conversation otherwise than it asks for it (some "
                    "take out thoughts or earlier turns), so that nobody would ever be asked this way; give a prompt "
                    "and a response column instead"
                )
            context = tokenizer.encode_rendered(asked[len(text) :])
            answer = tokenizer.encode_rendered(answered[len(asked) :])
            trained = self._trained(answer)
            tokens += context + answer
            trains += [False] * len(context) + [True] * trained + [False] * (len(answer) - trained)
            text = answered
        return _example(tokens, trains)

    def _checked(self, messages: Any) -> list[Message]:
        if self.asking.template != "{prompt}":
            raise ValueError("the option template has no place in a conversation; write the turns as they are")
        if not all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in messages):
            raise ValueError(f"a conversation is a list of {{role, content}} with texts; it is {str(messages)[:80]!r}")
        turns = conversation(messages, system=self.asking.system)
        roles = [str(turn.get("role")) for turn in turns]
        if "assistant" not in roles or roles[0] == "assistant":
            raise ValueError(
                f"a conversation ({', '.join(roles) or 'empty'}) must have a turn of the assistant, with one before it"
            )
        return turns

    def _trained(self, answer: Sequence[int]) -> int:
        """How many of the tokens of an answer train: up to the one that ends it."""
        ends = [i for i, token in enumerate(answer) if token in self.asking.tokenizer.eos_ids]
        if not ends:
            raise ValueError(
                f"the chat template ends the assistant's turn with none of the model's end tokens "
                f"{self.asking.tokenizer.eos_ids}, so generation would not stop there; add the token that it writes to "
                "eos_token_id in generation_config.json of the model directory"
            )
        return ends[-1] + 1


def _example(tokens: Sequence[int], trains: Sequence[bool]) -> Example:
    """Cut after the last token that trains: what follows it is no context of anything."""
    first, last = trains.index(True), len(trains) - 1 - trains[::-1].index(True)
    if first == 0:
        raise ValueError("the prompt has no token; a model needs at least one to go on from")
    ids = np.array(tokens[: last + 1], np.int32)
    return Example(ids[:first], ids[first:], np.array(trains[first : last + 1], np.bool_))
