"""Prompt sources by position, and what is said about bad ones."""

import json
import pathlib
import sys
import types

import pytest

from areal_jax.rollout.prompts import PromptTooLong, load_source, take
from tests.rollout.fakes import FakeTokenizer, Numbers

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"


class Characters(FakeTokenizer):
    def encode(self, text):
        return [ord(character) for character in text]


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def load(spec, *, split="train", seed=1, **options):
    return load_source(spec, split=split, seed=seed, tokenizer=Characters(), options=options)


def numbered(tmp_path, count):
    return write(tmp_path, *({"prompt": f"problem {i}", "answer": i} for i in range(count)))


@pytest.mark.parametrize("field", ["prompt", "question", "problem"])
def test_the_problem_stands_under_any_of_three_names(tmp_path, field):
    prompt = load(write(tmp_path, {field: "What?", "answer": 27.0}))[0]
    assert (prompt.uid, prompt.text, prompt.answer, prompt.tokens.tolist()) == (
        0,
        "What?",
        "27.0",
        [87, 104, 97, 116, 63],
    )


def test_of_an_explained_answer_what_follows_the_marks_counts(tmp_path):
    assert load(write(tmp_path, {"question": "?", "answer": "48/2 = 24.\n#### 72"}))[0].answer == "72"


def test_the_template_surrounds_the_problem_and_keeps_other_braces(tmp_path):
    source = load(write(tmp_path, {"prompt": "1+1", "answer": "2"}), template="Q: {prompt}\nAnswer in \\boxed{}.")
    assert source[0].text == "Q: 1+1\nAnswer in \\boxed{}."
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


def test_line_separators_inside_of_a_problem_do_not_cut_it(tmp_path):
    path = write(tmp_path, '{"prompt": "a\u2028b\x85c", "answer": "1"}', "", '{"prompt": "d", "answer": "2"}')
    source = load(path)
    assert {source[0].text, source[1].text} == {"a\u2028b\x85c", "d"} and len(source) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"line 2: not JSON"),
        ({"text": "?", "answer": 1}, r"line 2: needs one of prompt, question, problem, and \"answer\""),
        ({"prompt": "?"}, r"line 2: needs one of"),
        ("[1, 2]", r"line 2: needs one of"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, {"prompt": "?", "answer": 1}, line))


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
    assert error.value.cause == "too_long"


def test_a_source_that_miscounts_or_gives_nothing_is_refused(tmp_path):
    class Constant:
        def __getitem__(self, uid):
            return Numbers()[0]

    with pytest.raises(ValueError, match="gave prompt 0 for uid=5"):
        take(Constant(), 5, max_prompt_tokens=8)
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        take(load(write(tmp_path, {"prompt": "", "answer": "1"})), 0, max_prompt_tokens=8)


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data here")
@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k_train", 7473), ("gsm8k_test", 1319), ("aime24", 30), ("amc23", 40)]
)
def test_real_files_load(name, count):
    source = load(str(DATA / f"{name}.jsonl"))
    assert len(source) == count
    assert all(source[uid].text and len(source[uid].answer) < 20 for uid in range(count))
