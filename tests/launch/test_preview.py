"""What a run will ask, looked at before anything starts."""

import dataclasses
import json

import numpy as np
import pytest

from areal_jax import config as config_lib
from areal_jax.launch import preview, supervised
from areal_jax.tokenizer import Tokenizer
from areal_jax.trainer import sft
from configs import math


@pytest.fixture
def config(tmp_path):
    """Three training problems, of 4, 7 and 7 words; every word is one token of the default model."""
    short = {"question": "x: 3 +4 answer:", "answer": "7"}
    long = {"question": "x: 3 +4 -2 +1 double answer:", "answer": "12"}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, (short, long, long))))
    values = math.get_config()
    values.data.train = str(tmp_path / "train.jsonl")
    values.data.options = {"order": "file"}
    values.data.max_prompt_tokens = 6
    return config_lib.build(values)


def test_the_report_shows_the_first_problem_and_counts_those_over_the_limit(config):
    lines = preview.report(config).splitlines()
    assert lines[0] == "data.train: 3 problems"
    assert "2 over data.max_prompt_tokens=6" in lines[1]
    assert lines[3] == "    | x: 3 +4 answer:"
    assert lines[4] == "  its reference answer: '7'"
    assert "eval.data: problems without end" in lines


def test_a_wrong_option_is_told_before_anything_starts(config):
    preview.check(config)
    data = dataclasses.replace(config.data, options={"templat": "{prompt}"})
    wrong = dataclasses.replace(config, data=data)
    with pytest.raises(ValueError, match=r"data\.options\.templat is no option .* nearest is data\.options\.template"):
        preview.check(wrong)


def test_of_a_conversation_the_preview_marks_what_trains_and_what_is_only_read():
    tokenizer = Tokenizer.load(math.get_config().model.path)
    tokens = np.array(tokenizer.encode("start 5 a: 6 start 7 a: 8"))
    trains = np.array([False, False, False, True, False, False, False, True])
    example = sft.Example(tokens[:3], tokens[3:], trains[3:])
    assert supervised._quoted(example, tokenizer) == ["    | start 5 a:", "    > 6", "    | start 7 a:", "    > 8"]
