"""Prompt sources by position, and what is said about bad ones."""

import dataclasses
import json
import logging
import pathlib
import sys
import types

import numpy as np
import pytest

from areal_jax.rollout.prompts import PromptTooLong, _permutation, load_source, take
from areal_jax.tokenizer import Tokenizer
from tests.rollout.fakes import Characters, FakeTokenizer, Numbers

ROOT = pathlib.Path(__file__).parents[2]
ORDER_OF_SEED_1 = [8, 4, 7, 0, 1, 2, 5, 9, 6, 3]


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def load(spec, *, split="train", seed=1, tokenizer=None, **options):
    return load_source(spec, split=split, seed=seed, tokenizer=tokenizer or Characters(), options=options)


class Chatting(Characters):
    """A tokenizer with a chat template, which writes roles and contents, and a variable."""

    chat_template = "a template"
    chat_variables = frozenset({"mood", "date_string"})

    def render_chat(self, messages, *, mood="", **variables):
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + f"<assistant>{mood}"

    def encode_rendered(self, text):
        return [1, *self.encode(text)]


def numbered(tmp_path, count):
    return write(tmp_path, *({"prompt": f"problem {i}", "answer": i} for i in range(count)))


@pytest.mark.parametrize("field", ["prompt", "question", "problem"])
def test_the_problem_stands_under_any_of_three_names(tmp_path, field):
    prompt = load(write(tmp_path, {field: "What?", "answer": 27.0}))[0]
    assert (prompt.uid, prompt.text, prompt.answer, prompt.tokens.tolist()) == (
        0,
        "What?",
        "27",
        [87, 104, 97, 116, 63],
    )


def test_of_an_explained_answer_what_follows_the_marks_counts(tmp_path):
    assert load(write(tmp_path, {"question": "?", "answer": "48/2 = 24.\n#### 72"}))[0].answer == "72"


def test_the_template_surrounds_the_problem_and_keeps_other_braces(tmp_path):
    source = load(write(tmp_path, {"prompt": "1+1", "answer": "2"}), template="Q: {prompt}\nAnswer in \\boxed{}.")
    assert source[0].text == "Q: 1+1\nAnswer in \\boxed{}."
    with pytest.raises(ValueError, match="options.system=3 is of type int; it must be a text"):
        load(write(tmp_path, {"prompt": "1+1", "answer": "2"}), system=3)
    with pytest.raises(ValueError, match=r"template='Q:' must contain"):
        load(write(tmp_path, {"prompt": "1+1", "answer": "2"}), template="Q:")


def test_each_epoch_holds_every_problem_once_in_an_order_of_its_own(tmp_path):
    source = load(numbered(tmp_path, 20))
    epochs = [[source[epoch * 20 + i].text for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert source[45].uid == 45 and len(source) == 20


def test_a_prompt_depends_on_seed_and_position_alone(tmp_path):
    path = numbered(tmp_path, 20)
    one, other = load(path), load(path)
    for uid in (45, 3, 1000, 3):  # in any order, from a fresh start
        assert other[uid].text == one[uid].text
    assert [load(path, seed=2)[i].text for i in range(20)] != [one[i].text for i in range(20)]


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_sees_what_it_would_have_seen(tmp_path):
    path = numbered(tmp_path, 50)
    whole = load(path)
    uninterrupted = [whole[uid].text for uid in range(120)]
    first, second = load(path), load(path)  # the second one in a new process, from uid 73 on
    assert [first[uid].text for uid in range(73)] + [second[uid].text for uid in range(73, 120)] == uninterrupted
    assert sorted(uninterrupted[50:100]) == sorted(uninterrupted[:50])


def test_the_order_of_an_epoch_stays_what_it_was():
    """A later release that shuffled differently would repeat and lose prompts of a run that goes on."""
    assert _permutation(10, 1, 0).tolist() == ORDER_OF_SEED_1


def test_held_out_problems_come_in_the_order_of_the_file_whatever_the_seed(tmp_path):
    path = numbered(tmp_path, 20)
    in_order = [f"problem {i}" for i in range(20)]
    for seed in (1, 2):
        source = load(path, split="held_out", seed=seed)
        assert [source[uid].text for uid in range(20)] == in_order
    assert [load(path, order="file")[uid].text for uid in range(20)] == in_order
    assert load(path, split="held_out", order="shuffled")[45].text == load(path)[45].text


def test_a_line_that_does_not_fit_is_named(tmp_path):
    path = write(tmp_path, {"prompt": "?", "answer": 1}, {"text": "?", "answer": 1})
    with pytest.raises(
        ValueError, match=r"data.train='.*data.jsonl', line 2: needs the problem .* columns text, answer"
    ):
        load(path)


def test_options_name_layout_and_columns(tmp_path):
    path = write(tmp_path, {"q": "1+1", "gold": {"value": 2}}, {"q": "2+2", "gold": {"value": 4.0}})
    source = load(path, prompt="q", answer="gold.value", order="file")
    assert [(source[uid].text, source[uid].answer) for uid in (0, 1)] == [("1+1", "2"), ("2+2", "4")]
    with pytest.raises(ValueError, match="line 1: layout='gsm' is not known; the nearest is 'gsm8k'"):
        load(path, layout="gsm")


ONE = {"prompt": "1+1", "answer": "2"}


def test_a_chat_template_is_used_where_there_is_one(tmp_path):
    prompt = load(write(tmp_path, ONE), tokenizer=Chatting(), template="{prompt} = ?", system="Short.", mood="gay")[0]
    assert prompt.text == "<system>Short.<user>1+1 = ?<assistant>gay"
    assert prompt.tokens.tolist() == Chatting().encode_rendered(prompt.text)
    assert load(write(tmp_path, ONE), template="{prompt} = ?", system="Short.")[0].text == "Short.\n\n1+1 = ?"


def test_chat_may_be_asked_for_or_forbidden(tmp_path):
    path = write(tmp_path, ONE)
    plain = load(path, tokenizer=Chatting(), chat="plain")[0]
    assert plain.text == "1+1" and plain.tokens.tolist() == Characters().encode("1+1")
    assert load(path, tokenizer=Chatting(), chat="template")[0].text == "<user>1+1<assistant>"
    with pytest.raises(ValueError, match=r"data.options.chat='templat' must be one of auto, plain, template"):
        load(path, chat="templat")


def test_a_chat_template_that_is_wanted_and_missing_is_an_error_at_once(tmp_path):
    tokenizer = Tokenizer.load(ROOT / "configs" / "arithmetic_model")
    with pytest.raises(
        ValueError, match=r"eval.data=.* as eval.options say \(chat=template\): this model directory has no chat"
    ):
        load(write(tmp_path, ONE), split="held_out", tokenizer=tokenizer, chat="template")


def test_a_conversation_is_asked_as_it_stands_with_the_template_around_its_end(tmp_path):
    talk = [{"role": "system", "content": "Hm."}, {"role": "user", "content": "1+1"}]
    path = write(tmp_path, {"messages": talk, "answer": 2})
    source = load(path, tokenizer=Chatting(), template="Q: {prompt}")
    assert source[0].text == source[1].text == "<system>Hm.<user>Q: 1+1<assistant>"
    assert load(path, tokenizer=Chatting(), system="New.")[0].text == "<system>New.<user>1+1<assistant>"
    assert load(path)[0].text == "Hm.\n\n1+1"


def test_a_conversation_that_plain_text_cannot_hold_is_refused_at_once(tmp_path):
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    with pytest.raises(ValueError, match="a conversation of user, assistant, user needs a chat template"):
        load(write(tmp_path, {"messages": talk, "answer": 2}))


@pytest.mark.parametrize("tokenizer", [Characters(), Chatting()])
def test_an_option_that_nobody_reads_is_refused(tmp_path, tokenizer):
    known = "none is used" if tokenizer.chat_template == "" else "date_string, mood"
    with pytest.raises(
        ValueError,
        match=rf"data.options.templte is no option of a data set \(layout, .*order\) and no variable .*\({known}\); "
        r"the nearest is data.options.template$",
    ):
        load(write(tmp_path, ONE), tokenizer=tokenizer, templte="{prompt}")


def test_a_template_that_writes_the_date_is_warned_about(tmp_path, caplog):
    class Dated(Chatting):
        chat_template = "{{ strftime_now('%d %b %Y') }}"

    load(write(tmp_path, ONE), tokenizer=Dated(), date_string="26 Jul 2024")
    assert not caplog.records
    load(write(tmp_path, ONE), tokenizer=Dated())
    assert "changes the prompts from day to day; data.options.date_string" in caplog.text


def test_number_of_problems_and_layout_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        load(write(tmp_path, {"question": "?", "answer": "#### 5"}))
    assert "1 problems in the layout gsm8k" in caplog.text


def test_a_missing_or_empty_file_is_named_with_its_setting(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"eval.data='gone.jsonl': there is no such file \(looked for /"):
        load("gone.jsonl", split="held_out")
    with pytest.raises(ValueError, match="the file is empty"):
        load(write(tmp_path))


def test_a_factory_gets_split_seed_tokenizer_and_options(monkeypatch):
    seen = {}

    def factory(*, split, seed, tokenizer, steps=3):
        seen.update(split=split, seed=seed, tokenizer=tokenizer, steps=steps)
        return Numbers()

    module = types.ModuleType("some_prompts")
    module.factory = factory
    monkeypatch.setitem(sys.modules, "some_prompts", module)
    module.__spec__ = types.SimpleNamespace(name="some_prompts")
    tokenizer = FakeTokenizer()
    source = load_source("some_prompts:factory", split="held_out", seed=7, tokenizer=tokenizer, options={"steps": 5})
    assert source[4].answer == "4"
    assert seen == {"split": "held_out", "seed": 7, "tokenizer": tokenizer, "steps": 5}
    with pytest.raises(
        ValueError, match=r"data.options=\{'stepz': 5\} do not fit data.train='some_prompts:factory'.*steps=3"
    ):
        load_source("some_prompts:factory", split="train", seed=7, tokenizer=tokenizer, options={"stepz": 5})
    with pytest.raises(ValueError, match="missing"):
        load_source("some_prompts:missing", split="train", seed=7, tokenizer=tokenizer, options={})


def test_a_prompt_of_just_the_limit_is_taken_and_a_longer_one_refused():
    source = Numbers(too_long=(3,))  # 9 tokens
    assert take(source, 3, max_prompt_tokens=9).uid == 3
    with pytest.raises(PromptTooLong, match="prompt 3 has 9 tokens and data.max_prompt_tokens=8") as error:
        take(source, 3, max_prompt_tokens=8)
    assert (error.value.cause, error.value.tokens, error.value.limit) == ("too_long", 9, 8)


def test_a_source_that_miscounts_or_gives_nothing_is_refused(tmp_path):
    class Constant:
        def __getitem__(self, uid):
            return Numbers()[0]

    with pytest.raises(ValueError, match="gave prompt 0 for uid=5"):
        take(Constant(), 5, max_prompt_tokens=8)
    nothing = dataclasses.replace(Numbers()[0], tokens=np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        take([nothing], 0, max_prompt_tokens=8)
    with pytest.raises(ValueError, match="the problem is empty"):
        load(write(tmp_path, {"prompt": " ", "answer": "1"}))
