"""The tokenizer of a model directory in the Hugging Face format, by the `tokenizers` library and its chat template.

In: a directory with `tokenizer.json`, the files that name its end-of-sequence tokens, and the model's chat template
where it has one. Out: token ids and text; conversations as the model was trained to read them.
Called by the prompt sources, the rollout controller and the generation server. Waits for nobody.
"""

import datetime as dt
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import numpy as np
import tokenizers

EOS_FILES = ("generation_config.json", "tokenizer_config.json", "config.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # variables of a template that are ours to set

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant", "content": text}


class Tokenizer:
    """Text to token ids and back. Make it with `Tokenizer.load`.

    `eos_ids` are all tokens that end a completion, `end_id` is the one of them that ends a text to learn from, `pad_id`
    is what padding holds (it is always masked, never read as an end), `vocab_size` is one more than the largest token
    id, `longest_token` the characters of the longest token as the vocabulary spells it. `template` is None for a model
    without one.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        pad_id: int,
        end_id: int,
        template: "ChatTemplate | None" = None,
    ) -> None:
        tokenizer.no_truncation()  # tokenizer.json may ask for both; a prompt is never cut silently
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.eos_ids = eos_ids
        self.end_id = end_id
        self.pad_id = pad_id
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(map(len, vocabulary))

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """The tokenizer of a directory. Raises FileNotFoundError or ValueError that say what was looked for and where.

        The ends of a completion are those that `generation_config.json` names (one id or a list) and the `eos_token` of
        `tokenizer_config.json`, or those of `config.json` where neither names one. A text to learn from ends with that
        `eos_token` (of a chat model it ends a turn), or with the first end token. Padding is the pad token of the same
        files, or the first end token. The chat template is read and compiled too.
        """
        directory = pathlib.Path(path)
        tokenizer = _read_tokenizer(directory)
        generation, special, model = (_read_json(directory / name) for name in EOS_FILES)
        end = _special(tokenizer, special, "eos_token")
        eos = [*_ids(generation.get("eos_token_id")), *end]
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
        template = ChatTemplate.load(directory)
        found = cls(tokenizer, eos_ids=tuple(eos), pad_id=(pad or eos)[0], end_id=(end or eos)[0], template=template)
        if not all(0 <= token < found.vocab_size for token in (*eos, found.pad_id)):
            raise ValueError(
                f"model.path={directory}: eos ids {eos} or pad id {found.pad_id} lie outside of the vocabulary of "
                f"{found.vocab_size} in tokenizer.json; the files there belong to different models"
            )
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens (BOS) that the tokenizer itself adds."""
        return self._encode(text, special=True)

    @property
    def chat_template(self) -> str:
        """The template's source; "" when the model directory has none."""
        return "" if self._template is None else self._template.source

    @property
    def chat_variables(self) -> frozenset[str]:
        """Names that the template reads and a caller may set, like `enable_thinking`."""
        return frozenset() if self._template is None else self._template.variables

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """The conversation as text, up to where the model's answer begins. ValueError without a template."""
        return self._the_template().render(messages, variables)

    def render_answered(self, messages: Sequence[Message], **variables: Any) -> str:
        """The conversation as text, the model's last answer and its end included. ValueError without a template."""
        return self._the_template().render_answered(messages, variables)

    def _the_template(self) -> "ChatTemplate":
        if self._template is None:
            raise ValueError(
                "this model directory has no chat template; looked for chat_template.jinja, chat_template.json and "
                "chat_template in tokenizer_config.json there. Ask in plain text (the option chat=plain), or add one"
            )
        return self._template

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of `render_chat`. The template writes its own BOS, and none is added to it."""
        return self.encode_rendered(self.render_chat(messages, **variables))

    def ask(self, problem: str | Sequence[Message], *, system: str = "", **variables: Any) -> tuple[str, list[int]]:
        """(text as asked, its tokens): through the chat template where the model has one, plain otherwise.

        `problem` is what the user says, or a whole conversation; `system` takes the place of its system message.
        """
        messages = conversation(problem, system=system)
        if self._template is None:
            text = plain_text(messages)
            return text, self.encode(text)
        text = self.render_chat(messages, **variables)
        return text, self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text that `render_chat` returned; special tokens in it become tokens, none are added."""
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        except Exception as error:  # the library raises no narrower type
            raise ValueError(
                f"the model's tokenizer cannot encode {text[:80]!r}: {error}; ask for what its vocabulary has, or take "
                "a model whose tokenizer knows every text"
            ) from error

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text without special tokens. Not the inverse of `encode`: completions stay token ids wherever they train."""
        return self._tokenizer.decode(np.asarray(ids, np.int64).tolist())


def conversation(problem: str | Sequence[Message], *, system: str = "") -> list[Message]:
    """The messages of a problem, beginning with `system` where one is given, instead of any that it has itself."""
    messages: list[Message] = [{"role": "user", "content": problem}] if isinstance(problem, str) else list(problem)
    if not system:
        return messages
    return [{"role": "system", "content": system}, *(each for each in messages if each["role"] != "system")]


def plain_text(messages: Sequence[Message]) -> str:
    """A conversation without a chat template: the system message, an empty line, what the user says."""
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"a conversation of {', '.join(roles)} needs a chat template to be asked, and here there is none "
            "(or chat=plain is set); plain text holds one user message and a system message before it"
        )
    return "\n\n".join(message["content"] for message in messages)


class ChatTemplate:
    """A Jinja template, rendered as `transformers.PreTrainedTokenizer.apply_chat_template` renders it.

    `source` is its text, `file` where it came from, `special_tokens` the texts of bos_token and the like, which
    templates write. Raises ValueError that names the file when it is no template, or when it refuses a conversation.
    """

    def __init__(self, source: str, *, file: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._file = file
        self._special_tokens = special_tokens
        environment = _template_environment()
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{file}: the chat template is not valid Jinja, line {error.lineno}: {error}") from error
        self.variables = frozenset(read - set(environment.globals) - set(GIVEN))

    @classmethod
    def load(cls, directory: pathlib.Path) -> "ChatTemplate | None":
        """The template of a model directory: chat_template.jinja, else chat_template.json, else tokenizer_config.json.

        None where there is none of them. Of several named ones, "default" is taken.
        """
        file, template = _find_template(directory)
        if isinstance(template, list):
            template = {each["name"]: each["template"] for each in template}
        if isinstance(template, dict):
            if "default" not in template:
                raise ValueError(
                    f'{file}: none of its chat templates ({", ".join(template)}) is named "default"; write the one to '
                    "use to chat_template.jinja beside it"
                )
            template = template["default"]
        if not template:
            return None
        return cls(template, file=str(file), special_tokens=_special_texts(directory))

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of the conversation with the beginning of an answer (`add_generation_prompt`)."""
        return self._render(messages, variables, add_generation_prompt=True)

    def render_answered(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a conversation whose last answer is given."""
        return self._render(messages, variables, add_generation_prompt=False)

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # the template is the model's code and may raise what it likes
            raise ValueError(
                f"{self._file}: the chat template does not render a conversation of "
                f"{', '.join(str(message.get('role')) for message in messages)}: {type(error).__name__}: {error}"
            ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks for transformers what the assistant said; the text inside is unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates on the Hub are written for; sandboxed, for a template is code that others wrote."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own escapes HTML, which a model has never seen in its templates.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return dt.datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _find_template(directory: pathlib.Path) -> tuple[pathlib.Path, Any]:
    """(file, what it holds): a text, a list of {name, template}, or nothing."""
    jinja = directory / "chat_template.jinja"
    if jinja.exists():
        return jinja, jinja.read_text(encoding="utf-8")
    for file in (directory / "chat_template.json", directory / "tokenizer_config.json"):
        template = _read_json(file).get("chat_template")
        if template:
            return file, template
    return jinja, ""


def _special_texts(directory: pathlib.Path) -> dict[str, str]:
    """The texts of the special tokens that the files name; special_tokens_map.json is how older models do it."""
    named = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    texts = {name: _content(named.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


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
    """The id of a special token."""
    text = _content(config.get(name))
    found = None if text is None else tokenizer.token_to_id(text)
    return [] if found is None else [found]


def _content(token: str | dict[str, Any] | None) -> str | None:
    """The text of a special token, which a config gives as a text or as an object with its `content`."""
    return token["content"] if isinstance(token, dict) else token
