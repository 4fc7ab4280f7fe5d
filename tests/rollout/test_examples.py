"""Examples for supervised fine-tuning: what trains of a row, what is left out, and what is said about bad ones."""

import json
import logging

import numpy as np
import pytest

from areal_jax.config import SftConfig
from areal_jax.rollout import arithmetic
from areal_jax.rollout.examples import load_examples
from tests.rollout.fakes import Characters

BOS, END = 1, 0


class Plain(Characters):
    """A token is a character; a text that is asked begins with BOS."""

    end_id, eos_ids, chat_variables = END, (END,), frozenset()

    def encode(self, text):
        return [BOS, *map(ord, text)]

    def encode_rendered(self, text):
        return [END if letter == "$" else ord(letter) for letter in text]


class Chatting(Plain):
    """`u:what the user says;a:` and the answer, which ends with `$` and a line."""

    chat_template, chat_variables = "a template", frozenset({"mood"})
    thoughts = False  # which the template takes out of what was answered

    def render_chat(self, messages, *, mood=""):
        return f"{mood}{self._turns(messages)}a:" + "<think>" * self.thoughts

    def render_answered(self, messages, *, mood=""):
        return mood + self._turns(messages)

    def _turns(self, messages):
        written = {"user": "u:{};", "system": "s:{};", "assistant": "a:{}$\n"}
        return "".join(written[turn["role"]].format(turn["content"]) for turn in messages)


def load(tmp_path, *rows, tokenizer=None, split="train", **settings):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SftConfig(data=str(path), eval_data=str(path), **settings)
    return load_examples(settings, split=split, seed=1, tokenizer=tokenizer or Plain())


def turns(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": said} for role, said in zip(roles, contents, strict=False)]}


def texts(example):
    """(what stands before, what follows, of that what trains) as text."""
    said = ["$" if token == END else chr(token) for token in example.tokens]
    trained = "".join(letter for letter, trains in zip(said, example.trains, strict=True) if trains)
    return "".join(map(chr, example.prompt_tokens)), "".join(said), trained


def test_the_response_trains_with_the_end_after_it_and_no_bos(tmp_path):
    (example,) = load(tmp_path, {"prompt": "ab", "response": "cd"}).examples
    assert example.prompt_tokens.tolist() == [BOS, 97, 98]
    assert example.tokens.tolist() == [99, 100, END] and example.trains.tolist() == [True] * 3
    assert example.prompt_tokens.dtype == example.tokens.dtype == np.int32 and len(example) == 6


def test_columns_and_the_way_to_ask_are_settings(tmp_path):
    row = {"task": {"q": "1+1"}, "gold": "2"}
    settings = {"prompt": "task.q", "response": "gold", "options": {"template": "Q {prompt}", "mood": "!"}}
    (example,) = load(tmp_path, row, tokenizer=Chatting(), **settings).examples
    assert texts(example) == ("!u:Q 1+1;a:", "2$", "2$")
    plain = settings | {"options": {"chat": "plain"}}
    assert texts(load(tmp_path, row, tokenizer=Chatting(), **plain).examples[0])[0] == "\x011+1"


def test_of_a_conversation_every_turn_of_the_assistant_trains_with_its_end(tmp_path):
    (example,) = load(tmp_path, turns("Hi", "Yo", "Go", "On", "lost"), tokenizer=Chatting()).examples
    assert texts(example) == ("u:Hi;a:", "Yo$\nu:Go;a:On$", "Yo$On$")
    system = load(tmp_path, turns("Hi", "Yo"), tokenizer=Chatting(), options={"system": "S"}).examples[0]
    assert texts(system) == ("s:S;u:Hi;a:", "Yo$", "Yo$")


def test_examples_over_the_limit_are_told_by_their_lines_and_never_cut(tmp_path, caplog):
    rows = [{"prompt": "a", "response": "b" * n} for n in (2, 9, 3, 4)]
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, *rows, max_length=6)
    assert [len(example.tokens) for example in loaded.examples] == [3, 4]
    assert loaded.too_long == [("line 2", 12), ("line 4", 7)]
    assert "2 examples have more tokens than sft.max_length=6 and are left out: line 2 (12), line 4 (7)" in caplog.text


def test_a_factory_gives_rows_with_options_of_its_own():
    settings = SftConfig(data="areal_jax.rollout.arithmetic:examples", options={"count": 3})
    loaded = load_examples(settings, split="train", seed=1, tokenizer=Plain())
    assert len(loaded.examples) == 3
    wrong = SftConfig(data="areal_jax.rollout.arithmetic:examples", options={"counts": 3})
    with pytest.raises(ValueError, match=r"sft.options={'counts': 3} do not fit sft.data=.*count"):
        load_examples(wrong, split="train", seed=1, tokenizer=Plain())


def test_arithmetic_examples_reason_to_the_answer_and_hold_out_theirs():
    def rows(split, seed):
        return list(arithmetic.examples(split=split, seed=seed, tokenizer=None, count=50))

    assert rows("train", 1) == rows("train", 1) != rows("train", 2)
    assert rows("held_out", 1) == rows("held_out", 2)
    assert not {row["prompt"] for row in rows("train", 1)} & {row["prompt"] for row in rows("held_out", 1)}
    assert arithmetic.written_out(arithmetic.Problem(9, ("+4", "-6", "double")).totals) == "a: 13 b: 7 c: 14 answer: 14"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r"sft.data='.*', line 2: needs a text in each .*it has the columns prompt$"),
        ({"prompt": "a", "response": " "}, "line 2: the response is ' '; it must be a text that says something"),
        ({"prompt": " ", "response": "b"}, "line 2: the problem is empty"),
        (turns("Hi", "Yo", "Go", " "), "line 2: turn 4 of the conversation, the assistant's, must be a text that says"),
        (turns("Hi"), r"line 2: a conversation \(user\) must have a turn of the assistant"),
        ({"messages": [{"role": "assistant"}]}, "line 2: a conversation is a list of {role, content}"),
    ],
)
def test_a_row_that_cannot_be_imitated_is_named_with_what_is_wrong(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {"prompt": "a", "response": "b"}, row, tokenizer=Chatting())


def test_a_template_that_cannot_be_learned_from_is_refused(tmp_path):
    thinking, endless = Chatting(), Chatting()
    thinking.thoughts, endless.eos_ids = True, (999,)
    with pytest.raises(ValueError, match="writes turn 2 of the conversation otherwise than it asks for it"):
        load(tmp_path, turns("Hi", "Yo"), tokenizer=thinking)
    with pytest.raises(ValueError, match=r"with none of the model's end tokens \(999,\), so generation would not stop"):
        load(tmp_path, turns("Hi", "Yo"), tokenizer=endless)


def test_nothing_to_use_and_a_wrong_option_are_errors(tmp_path):
    with pytest.raises(ValueError, match="there is no example to use; all 1 are longer than sft.max_length=2"):
        load(tmp_path, {"prompt": "a", "response": "b"}, max_length=2)
    with pytest.raises(ValueError, match="sft.eval_data='.*': there is no example to use$"):
        load(tmp_path, split="held_out")
    with pytest.raises(ValueError, match=r"sft.options.templat is no option of a data set \(template, system, chat\)"):
        load(tmp_path, {"prompt": "a", "response": "b"}, options={"templat": ""})
