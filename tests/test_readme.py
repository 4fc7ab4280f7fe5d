"""What the README says is so: its commands, its table, its links, its example."""

import pathlib
import re

import numpy as np

from areal_jax import config, metrics

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_table_of_metrics_is_the_one_that_the_code_prints():
    assert metrics.table() in README, "run python -m areal_jax.metrics and put its output into README.md"


def test_every_link_leads_to_a_file():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert ".assets/architecture.svg" in links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_place_named_in_the_tree_exists():
    section = README.split("## Where things are")[1].split("##")[0]
    first = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    places = [place for cell in first for place in re.findall(r"`([^`]+)`", cell)]
    assert len(places) > 15
    assert not [place for place in places if not (ROOT / place).exists() and not (ROOT / "areal_jax" / place).exists()]


def test_every_setting_named_in_it_exists():
    known = config.default_config()
    named = set(re.findall(r"--config\.([a-z_]+\.[a-z_.]+)", README))
    named |= set(re.findall(r"^\| `((?:rollout|generation|trainer)\.[a-z_.]+)`", README, re.MULTILINE))
    assert len(named) > 15
    for name in named:
        value = known
        for part in name.split("."):
            value = value[part]  # raises for a name that is none


def test_continuous_integration_runs_the_readmes_test_command():
    commands = [block.strip() for block in blocks("bash")]
    assert "pip install -r requirements.txt && python -m areal_jax.main --config=configs/math.py" in commands
    assert "pip install -r requirements.txt && python -m pytest" in commands
    assert (ROOT / ".ci" / "run").read_text().endswith("\npython -m pytest\n")


def test_the_example_of_an_own_task_runs():
    class Tokenizer:
        def encode(self, text):
            return [ord(letter) for letter in text]

    (example,) = [block for block in blocks("python") if block.startswith("# my_task.py")]
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    source = names["Squares"](split="train", seed=1, tokenizer=Tokenizer(), largest=9)
    prompt, again = source[3], source[3]
    assert prompt.uid == 3 and prompt.text.endswith(" squared is") and prompt.tokens.dtype == np.int32
    assert prompt.text == again.text and {source[uid].text for uid in range(50)} != {prompt.text}
    assert names["reward"](completion=f" {prompt.answer} .", answer=prompt.answer, prompt=prompt.text) == 1.0
    assert names["reward"](completion="no", answer=prompt.answer, prompt=prompt.text) == 0.0
