"""Prompt sources: from a data set or a generator of problems to prompts by position.

In: what the config names, a data set (`rollout.data_sets` says which) or "module:factory". Out: a `PromptSource`, in
which prompt `uid` is always the same one, so that a run goes on from any place with no other state than the numbers of
the prompts that are done. Called by the launchers (`load_source`) and the rollout controller (`take`). Waits for
nobody but the disk.
"""

import dataclasses
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from areal_jax.config import DATA_FILES, HUB, resolve
from areal_jax.rollout.data_sets import read_rows
from areal_jax.rollout.layouts import Problem, find_layout, read_problem
from areal_jax.tokenizer import Tokenizer, conversation, plain_text
from areal_jax.types import Prompt, PromptSource

log = logging.getLogger(__name__)

SETTINGS = {"train": ("data.train", "data.options"), "held_out": ("eval.data", "eval.options")}
ASKING = ("template", "system", "chat")  # options of `Asking`, beside the variables of the chat template
ORDERS = {"train": "shuffled", "held_out": "file"}  # where the options name none
ENDLESS = 1024  # prompts of an endless source that stand for all of it, when it is asked whether any is short enough


class PromptTooLong(ValueError):
    """A prompt of more `tokens` than the `limit`, data.max_prompt_tokens; it is counted and replaced, never cut."""

    cause = "too_long"

    def __init__(self, uid: int, *, tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt {uid} has {tokens} tokens and data.max_prompt_tokens={limit}; raise that, or leave it out"
        )
        self.uid, self.tokens, self.limit = uid, tokens, limit


def load_source(spec: str, *, split: str, seed: int, tokenizer: Tokenizer, options: Mapping[str, Any]) -> PromptSource:
    """The source that `data.train` or `eval.data` names; `split` is "train" or "held_out".

    "module:factory" calls `factory(split=..., seed=..., tokenizer=..., **options)`, which returns any object with
    `source[uid] -> Prompt` (and `len`, if it is finite). A file or a hub name is read as `Problems`.
    Raises ValueError or FileNotFoundError that name the setting.
    """
    key, options_key = SETTINGS[split]
    is_data = spec.startswith(HUB) or spec.endswith(DATA_FILES)
    factory = functools.partial(Problems, spec) if is_data else resolve(spec, key)
    given = {"split": split, "seed": seed, "tokenizer": tokenizer}
    return make(factory, given, options, named=f"{key}={spec!r}", options_key=options_key)


def make(
    factory: Callable[..., Any], given: Mapping[str, Any], options: Mapping[str, Any], *, named: str, options_key: str
) -> Any:
    """What a factory makes of our arguments and the user's options. Raises ValueError when it takes no such ones."""
    arguments = {**given, **options}
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{options_key}={dict(options)} do not fit {named}, which takes {inspect.signature(factory)}: {error}"
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
        raise PromptTooLong(uid, tokens=len(prompt.tokens), limit=max_prompt_tokens)
    return prompt


def epoch_size(source: PromptSource) -> int:
    """Prompts after which a source has shown all that it has: its length, or `ENDLESS` of one without an end."""
    return len(source) if isinstance(source, Sized) else ENDLESS


@dataclasses.dataclass(frozen=True)
class Asking:
    """How a problem is put to the model: the options of a data set of which `Problems` says what they mean."""

    tokenizer: Tokenizer
    template: str = "{prompt}"
    system: str = ""
    chat: str = "auto"
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def by_template(self) -> bool:
        """Whether it goes through the model's chat template."""
        return self.chat == "template" or (self.chat == "auto" and bool(self.tokenizer.chat_template))

    def check(self, options_key: str, options: Sequence[str]) -> None:
        """Raises ValueError for a value that cannot be, and for a variable that is none of `options` either."""
        for name, text in (("template", self.template), ("system", self.system)):
            if not isinstance(text, str):
                raise ValueError(f"{options_key}.{name}={text!r} is of type {type(text).__name__}; it must be a text")
        if "{prompt}" not in self.template:
            raise ValueError(
                f'{options_key}.template={self.template!r} must contain "{{prompt}}", where the problem goes'
            )
        _choice(f"{options_key}.chat", self.chat, ("auto", "plain", "template"))
        read = self.tokenizer.chat_variables if self.by_template else frozenset()
        _check_variables(self.variables, read, options_key, options)
        if self.by_template and "strftime_now" in self.tokenizer.chat_template and "date_string" not in self.variables:
            log.warning(
                "the chat template may write today's date (strftime_now), which changes the prompts from day to day; "
                "%s.date_string fixes it in Llama's templates",
                options_key,
            )

    def ask(self, problem: Problem) -> tuple[str, list[int]]:
        """(the text as asked, its tokens)."""
        messages = conversation(problem, system=self.system)
        said = messages[-1]
        messages[-1] = {**said, "content": self.template.replace("{prompt}", said["content"])}
        if self.by_template:
            text = self.tokenizer.render_chat(messages, **self.variables)
            return text, self.tokenizer.encode_rendered(text)
        text = plain_text(messages)
        return text, self.tokenizer.encode(text)


class Problems:
    """The problems of a data set by uid = epoch * len + position.

    `layout` names the layout of its rows (`rollout.layouts`; "" finds it by the columns), `prompt` and `answer` the
    columns where that is not enough. `template` is what the user says, with "{prompt}" where the problem goes, `system`
    the system message. `chat` is "auto" (through the model's chat template, if it has one), "template" (an error, if it
    has none) or "plain". `order` is "shuffled" (a new seeded order each epoch, the default to train) or "file" (the
    default to evaluate, so that the first n are the same problems whatever the seed). All other options are variables
    of the chat template, like Qwen3's `enable_thinking`.
    """

    def __init__(
        self,
        spec: str,
        *,
        split: str,
        seed: int,
        tokenizer: Tokenizer,
        layout: str = "",
        prompt: str = "",
        answer: str = "",
        template: str = "{prompt}",
        system: str = "",
        chat: str = "auto",
        order: str = "",
        **variables: Any,
    ) -> None:
        key, options_key = SETTINGS[split]
        self._order = _choice(f"{options_key}.order", order or ORDERS[split], ("shuffled", "file"))
        self._seed = seed
        self._asking = Asking(tokenizer, template, system, chat, variables)
        self._asking.check(options_key, ("layout", "prompt", "answer", *ASKING, "order"))
        self._problems = _read_problems(spec, split=split, key=key, layout=layout, prompt=prompt, answer=answer)
        self._check_first(f"{key}={spec!r}", options_key)

    def __len__(self) -> int:
        """Problems of the data set, the prompts of one epoch."""
        return len(self._problems)

    def __getitem__(self, uid: int) -> Prompt:
        epoch, position = divmod(uid, len(self))
        if self._order == "shuffled":
            position = _permutation(len(self), self._seed, epoch)[position]
        problem, answer = self._problems[position]
        text, tokens = self._asking.ask(problem)
        return Prompt(uid=uid, tokens=np.array(tokens, np.int32), text=text, answer=answer)

    def _check_first(self, setting: str, options_key: str) -> None:
        """What cannot be asked in the way that the options say is better said before anything starts."""
        try:
            self._asking.ask(self._problems[0][0])
        except ValueError as error:
            raise ValueError(
                f"{setting}: the first problem cannot be asked as {options_key} say (chat={self._asking.chat}): {error}"
            ) from error


def _choice(setting: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{setting}={value!r} must be one of {', '.join(choices)}")
    return value


def _check_variables(
    variables: Mapping[str, Any], read: frozenset[str], options_key: str, options: Sequence[str]
) -> None:
    """Raises ValueError for an option that nobody reads."""
    for name in variables:
        if name not in read:
            near = difflib.get_close_matches(name, [*options, *sorted(read)], n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{options_key}.{name} is no option of a data set ({', '.join(options)}) and no variable that the "
                f"model's chat template reads ({', '.join(sorted(read)) or 'none is used'}); the nearest is "
                f"{options_key}.{near}"
            )


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: a function of its arguments only, kept because neighbours ask for the same one."""
    return np.random.default_rng((seed, epoch)).permutation(size)


def _read_problems(spec: str, *, split: str, key: str, **named: str) -> list[tuple[Problem, str]]:
    """(problem, answer) of each row; the first one decides on the layout, with what the user has `named`."""
    problems: list[tuple[Problem, str]] = []
    for place, row in read_rows(spec, split=split, key=key):
        try:
            if not problems:
                name, layout = find_layout(row, **named)
            problems.append(read_problem(row, layout))
        except ValueError as error:
            raise ValueError(f"{key}={spec!r}, {place}: {error}") from error
    if not problems:
        raise ValueError(f"{key}={spec!r}: the file is empty; it needs one object with named columns per problem")
    log.info("%s=%r: %d problems in the layout %s", key, spec, len(problems), name)
    return problems
