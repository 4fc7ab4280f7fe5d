"""Rows of files of every kind, of the real ones, and of data sets of the Hub that are on this disk."""

import gzip
import json
import pathlib
import sys

import pytest

from areal_jax.rollout.data_sets import read_rows
from areal_jax.rollout.prompts import load_source
from tests.rollout.fakes import Characters

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
ROWS = [{"prompt": f"problem {i}", "answer": i} for i in range(3)]


def read(spec, *, split="train"):
    return list(read_rows(str(spec), split=split, key="data.train"))


def lines(rows=ROWS):
    return "\n".join(json.dumps(row) for row in rows) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.jsonl", lines(), "line"),
        ("a.json", json.dumps(ROWS), "row"),
        ("a.json", json.dumps(ROWS, indent=2), "row"),
        ("a.json", json.dumps({"version": 1, "data": ROWS}), "row"),
        ("a.json", json.dumps({"data": ROWS}, indent=2), "row"),
        ("a.json", lines(), "line"),  # as many on the Hub
        ("a.jsonl", "\ufeff" + lines(), "line"),
    ],
)
def test_a_file_gives_its_rows_in_order_with_their_places(tmp_path, name, content, places):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read(tmp_path / name) == [(f"{places} {i + 1}", row) for i, row in enumerate(ROWS)]
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    assert read(tmp_path / f"{name}.gz") == read(tmp_path / name)


def test_blank_lines_and_separators_inside_of_a_text_do_not_count(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\n\n{"prompt": "d"}', encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == [("line 1", {"prompt": "a\u2028b\x85c"}), ("line 3", {"prompt": "d"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n{not json", r"data.train='.*a.jsonl', line 2: not JSON .*begins '\{not json'"),
        ("a.jsonl", "[1, 2]", r"line 1: a problem is an object with named columns"),
        ("a.json", "[1, 2]", r"row 1: a problem is an object with named columns"),
        ("a.json", "{", "not JSON"),
        ("a.json", "3", "the file holds a int"),
        ("a.json", '{"train": [], "test": []}', r"one object with 2 lists \(train, test\)"),
        ("a.json", '{"a": 1}', r"one object with 0 lists \(none\)"),
    ],
)
def test_a_bad_file_says_where(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "é"}'.encode("latin1"), "UTF-8 file (.*can't decode.*); .*iconv -f latin1 -t utf-8"),
        ("a.jsonl.gz", lines().encode(), "gzip file (Not a gzipped file.*); write it again, or take the .gz off"),
        ("a.json.gz", gzip.compress(lines().encode())[:-9], "gzip file (Compressed file ended.*); write it again"),
        ("a.json.gz", gzip.compress(b"")[:10] + b"\xff" * 20, "gzip file (.*invalid block type); write it again"),
        ("a.parquet", b"PAR", "Parquet file (Parquet file size is 3 bytes.*); write it again"),
        ("a.parquet", b"PAR1" * 9, "Parquet file (.*); write it again"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet files need the package pyarrow")
    (tmp_path / name).write_bytes(content)
    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"^data.train='{tmp_path / name}': not a readable {message}") as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_parquet_file_gives_its_rows_with_exact_numbers(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet files need the package pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "34"}, "n": 9007199254740993},
        {"prompt": [{"role": "user", "content": "!"}], "reward_model": {"ground_truth": "5"}, "n": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [("row 1", rows[0]), ("row 2", rows[1])]


@pytest.mark.parametrize(("package", "spec"), [("pyarrow", "a.parquet"), ("datasets", "hub:openai/gsm8k")])
def test_a_package_that_is_missing_is_named_with_the_command(tmp_path, monkeypatch, package, spec):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else sys.modules[name])
    with pytest.raises(ValueError, match=f"config.data.train: .*not installed: pip install {package}"):
        read(spec)


# The Hub: the real package, on a data set that lies on this disk.


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The package, without network, with a cache of its own."""
    datasets = pytest.importorskip("datasets", reason="data sets of the Hub need the package datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def local_data_set(directory, **splits):
    """A data set as a repository of the Hub holds it: a Parquet file per split, two configs named in its README."""
    import pyarrow as pa
    from pyarrow import parquet

    files = []
    for config in ("main", "hard"):
        for split, rows in splits.items():
            file = directory / config / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = [{**row, "prompt": f"{config} {row['prompt']}"} for row in rows]
            parquet.write_table(pa.Table.from_pylist(rows), file)
        files.append(
            f"- config_name: {config}\n  default: {str(config == 'main').lower()}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
        )
    (directory / "README.md").write_text(f"---\nconfigs:\n{''.join(files)}---\n")
    return f"hub:{directory}"


@pytest.mark.parametrize(
    ("parts", "split", "expected"),
    [
        ("", "train", "main problem 0"),
        ("", "held_out", "main problem 2"),
        (":hard", "train", "hard problem 0"),
        (":test", "train", "main problem 2"),
        (":hard:test", "train", "hard problem 2"),
        ("::test", "train", "main problem 2"),
        (":main:train", "held_out", "main problem 0"),
    ],
)
def test_a_hub_name_takes_config_and_split(tmp_path, offline, parts, split, expected):
    spec = local_data_set(tmp_path / "sums", train=ROWS[:2], test=ROWS[2:])
    found = read(spec + parts, split=split)
    assert found[0][0] == "row 1" and found[0][1]["prompt"] == expected
    assert len(found) == (1 if expected.endswith("2") else 2)


def test_the_only_split_serves_for_both(tmp_path, offline):
    spec = local_data_set(tmp_path / "aime", test=ROWS)
    assert len(read(spec)) == len(read(spec, split="held_out")) == 3


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path, offline):
    spec = local_data_set(tmp_path / "sums", easy=ROWS, hard=ROWS)
    with pytest.raises(ValueError, match="no split 'train'; there are easy, hard: name one"):
        read(spec)
    with pytest.raises(ValueError, match="no split 'tset'; there are easy, hard"):
        read(f"{spec}:main:tset")


def test_a_data_set_of_the_hub_is_a_prompt_source(tmp_path, offline):
    spec = local_data_set(tmp_path / "sums", train=ROWS)
    source = load_source(spec, split="train", seed=1, tokenizer=Characters(), options={"order": "file"})
    assert [(source[uid].text, source[uid].answer) for uid in range(3)] == [
        (f"main problem {i}", f"{i}") for i in range(3)
    ]


def test_without_network_the_error_says_what_where_and_what_to_do(tmp_path, offline):
    with pytest.raises(
        ValueError,
        match=r"data.train='hub:nobody/nothing': the data set 'nobody/nothing' could not be loaded: .*"
        rf"Looked for on https://.*, in the cache {tmp_path}/cache, .*give the path of a .jsonl",
    ):
        read("hub:nobody/nothing")


def test_a_hub_name_with_too_many_parts_is_refused(offline):
    with pytest.raises(ValueError, match=r"the form is hub:NAME\[:CONFIG\]\[:SPLIT\]"):
        read("hub:a/b:c:d:e")


# The real files.

REAL = {"gsm8k_train.jsonl": 7473, "gsm8k_test.jsonl": 1319, "math500.json": 500, "aime24.jsonl": 30, "amc23.jsonl": 40}
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data here")


@needs_data
@pytest.mark.parametrize(("name", "count"), REAL.items())
def test_real_files_load(name, count):
    source = load_source(str(DATA / name), split="held_out", seed=1, tokenizer=Characters(), options={})
    prompts = [source[uid] for uid in range(len(source))]
    assert len(source) == count
    assert all(prompt.text and prompt.answer and len(prompt.answer) < 60 for prompt in prompts)
    if name != "math500.json":
        assert all(prompt.answer.replace(",", "").removeprefix("-").isdigit() for prompt in prompts)


@needs_data
def test_known_problems_of_the_real_files():
    def first(name, uid=0, **options):
        return load_source(str(DATA / name), split="held_out", seed=1, tokenizer=Characters(), options=options)[uid]

    assert first("gsm8k_test.jsonl").answer == "18" and first("gsm8k_test.jsonl").text.startswith("Janet")
    assert first("math500.json").answer == r"\left( 3, \frac{\pi}{2} \right)"
    assert first("math500.json", answer="solution").answer == r"\left( 3, \frac{\pi}{2} \right)"
    assert (first("aime24.jsonl").answer, first("aime24.jsonl", 7).answer) == ("204", "25")
    assert first("amc23.jsonl").answer == "27"


@needs_data
def test_the_boxes_of_math500_hold_its_answers():
    rows = [row for _, row in read(DATA / "math500.json")]
    source = load_source(
        str(DATA / "math500.json"), split="held_out", seed=1, tokenizer=Characters(), options={"answer": "solution"}
    )
    same = sum(source[uid].answer == row["answer"] for uid, row in enumerate(rows))
    assert same >= 490


@needs_data
def test_programming_problems_are_refused():
    with pytest.raises(ValueError, match=r"line 1: no column with a reference answer, .*programming problems: columns"):
        load_source(str(DATA / "HumanEval.jsonl.gz"), split="train", seed=1, tokenizer=Characters(), options={})
