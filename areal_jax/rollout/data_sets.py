"""The rows of a data set, from a file or from the Hugging Face Hub.

In: what the config names, a `.jsonl`, `.json` or `.parquet` file (the first two also with `.gz`) or "hub:NAME". Out:
one dict per problem, with the place that an error about it names. Called by `rollout.prompts`. Waits for the disk, and
for the network with a hub name that is not in the cache.

Parquet needs the package pyarrow and the Hub the package datasets; a run on JSON files needs neither.
"""

import gzip
import importlib
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

from areal_jax.config import DATA_FILES, HUB, require

Row = dict[str, Any]
Placed = tuple[str, Row]  # where it stands ("line 3"), and what it says


def read_rows(spec: str, *, split: str, key: str) -> Iterator[Placed]:
    """The rows of a data set in their order; `key` is the config key that errors name, `split` whose data it is.

    Raises FileNotFoundError or ValueError that say what was looked for and where.
    """
    if spec.startswith(HUB):
        return _hub_rows(spec, split, key)
    file, setting = pathlib.Path(spec), f"{key}={spec!r}"
    if not file.is_file():
        raise FileNotFoundError(
            f"{setting}: there is no such file (looked for {file.absolute()}); give the path of a "
            f"{', '.join(DATA_FILES)} file"
        )
    if spec.endswith(".parquet"):
        require("pyarrow", "a .parquet file", key)
        return _parquet_rows(file, setting)
    text = _read_text(file, setting)
    if spec.removesuffix(".gz").endswith(".jsonl") or _is_lines(text):
        return _line_rows(text, setting)
    return _json_rows(text, setting)


def _read_text(file: pathlib.Path, setting: str) -> str:
    content = file.read_bytes()
    try:
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "write it again in UTF-8, for instance by iconv -f latin1 -t utf-8"
        raise ValueError(f"{setting}: not a readable UTF-8 file ({error}); {remedy}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:  # no gzip at all, cut off, damaged
        raise ValueError(
            f"{setting}: not a readable gzip file ({error}); write it again, or take the .gz off its name if it is not "
            "compressed"
        ) from error


def _is_lines(text: str) -> bool:
    """Whether a `.json` file holds one object per line, as data sets on the Hub often do."""
    first, _, rest = text.lstrip().partition("\n")
    return first.startswith("{") and first.rstrip().endswith("}") and bool(rest.strip())


def _line_rows(text: str, setting: str) -> Iterator[Placed]:
    lines = text.split("\n")  # splitlines would also cut at characters that JSON allows inside of a text
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"line {number}", _object(_parse(line, f"{setting}, line {number}"), f"{setting}, line {number}")


def _json_rows(text: str, setting: str) -> Iterator[Placed]:
    """Of a list of objects, or of an object one of whose values is a list of objects."""
    content = _parse(text, setting)
    if isinstance(content, dict):
        lists = {name: value for name, value in content.items() if isinstance(value, list)}
        if len(lists) != 1:
            raise ValueError(
                f"{setting}: the file holds one object with {len(lists)} lists ({', '.join(lists) or 'none'}); a .json "
                "file is a list of problems, or an object with one list in it"
            )
        content = next(iter(lists.values()))
    if not isinstance(content, list):
        raise ValueError(f"{setting}: the file holds a {type(content).__name__}; it must be a list of problems")
    for number, row in enumerate(content, start=1):
        yield f"row {number}", _object(row, f"{setting}, row {number}")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); it begins {text[:80]!r}") from error


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a problem is an object with named columns, and this is {str(row)[:80]!r}")
    return row


def _parquet_rows(file: pathlib.Path, setting: str) -> Iterator[Placed]:
    for number, row in enumerate(_read_parquet(file, setting), start=1):
        yield f"row {number}", row


def _read_parquet(file: pathlib.Path, setting: str) -> Iterator[Row]:
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    try:
        for rows in parquet.ParquetFile(file).iter_batches():
            yield from rows.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{setting}: not a readable Parquet file ({error}); write it again") from error


def _hub_rows(spec: str, split: str, key: str) -> Iterator[Placed]:
    require("datasets", "a data set of the Hugging Face Hub", key)
    datasets = importlib.import_module("datasets")
    setting = f"{key}={spec!r}"
    name, *rest = spec.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise ValueError(f"{setting}: the form is {HUB}NAME[:CONFIG][:SPLIT], like {HUB}openai/gsm8k:main:train")
    try:
        config, wanted = _parts(datasets, name, rest)
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises dozens of types, from no network to a config that is not there
        raise ValueError(
            f"{setting}: the data set {name!r} could not be loaded: {type(error).__name__}: {error}. Looked for on "
            f"{datasets.config.HF_ENDPOINT}, in the cache {datasets.config.HF_DATASETS_CACHE}, and for a folder of "
            "that name here. Without network, give the path of a .jsonl, .json or .parquet file, or fill the cache "
            "where there is one"
        ) from error
    for number, row in enumerate(found[_choose_split(found, wanted, split, setting)], start=1):
        yield f"row {number}", row


def _parts(datasets: Any, name: str, rest: list[str]) -> tuple[str, str]:
    """(config, split) of what follows the name; a single part is a config if the data set has one of that name."""
    if len(rest) == 1:
        return (rest[0], "") if rest[0] in datasets.get_dataset_config_names(name) else ("", rest[0])
    return (rest[0], rest[1]) if rest else ("", "")


def _choose_split(found: Any, wanted: str, split: str, setting: str) -> str:
    """The split that was asked for; else "train" to train, "test" or "validation" to evaluate; else the only one."""
    usual = ("train",) if split == "train" else ("test", "validation")
    choices = (wanted,) if wanted else (*usual, *(found if len(found) == 1 else ()))
    for name in choices:
        if name in found:
            return name
    raise ValueError(
        f"{setting}: no split {' or '.join(map(repr, choices))}; there are {', '.join(found)}: name one of them, as "
        f"{HUB}NAME:CONFIG:SPLIT (CONFIG may be empty)"
    )
