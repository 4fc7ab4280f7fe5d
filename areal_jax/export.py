"""A checkpoint of a run as a model directory: `python -m areal_jax.export --checkpoint=runs/math --out=DIR`.

In: a run's directory, its `checkpoints/`, or one version there; and the model directory that the run began with, for
tokenizer and chat template. Out: config.json, weights, tokenizer and generation config, which `transformers` and
`model.path` load. Called by people. Waits for the disk: it takes no accelerator, and reads and writes one parameter at
a time, so that it may run beside the training whose checkpoint it takes.

A run with `model.lora` is written with its adapters merged into the model, or with `--adapter` as the adapter alone, in
the format of PEFT (adapter_config.json, adapter_model.safetensors), for the model directory that the run began with.

By default the weights are float32, the trainer's own to the last bit. `--dtype=bfloat16` halves the files and rounds;
`--dtype=source` takes the dtype that the model directory has.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from areal_jax.hub import model_directory
from areal_jax.launch import command_line
from areal_jax.tokenizer import Tokenizer

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run's directory, its checkpoints/, or one version in there.")
_OUT = flags.DEFINE_string("out", None, "The directory to write; it must not exist, or be empty.")
_MODEL = flags.DEFINE_string("model", "", "Where the tokenizer is taken from; empty: model.path of the run.")
_ADAPTER = flags.DEFINE_bool("adapter", False, "Of a run with model.lora: the adapter alone, in PEFT's format.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "source"], "Of the weights in the files.")

# Copied as they are, where the model directory has them. generation_config.json is completed: see `generation_config`.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of config.json that we do not read ourselves


def main(argv: Sequence[str]) -> int:
    """Writes what the flags say. Exit status 0: done, 2: a mistake, told in a sentence."""
    command_line.log_plainly()
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options look like --checkpoint=runs/math")
    os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be going on there
    with command_line.plain_errors():
        checkpoint, out = pathlib.Path(_CHECKPOINT.value or ""), pathlib.Path(_OUT.value or "")
        write = export_adapter if _ADAPTER.value else export
        print(write(checkpoint, out, model=_MODEL.value, dtype=_DTYPE.value))
    return 0


def export(checkpoint: pathlib.Path, out: pathlib.Path, *, model: str = "", dtype: str = "float32") -> str:
    """Writes `out`, whole or not at all; returns a line that says what it is.

    Raises FileNotFoundError where there is no checkpoint or no model directory, FileExistsError for an `out` in use.
    """
    from areal_jax.models import safetensors_files
    from areal_jax.models.transformer import param_count
    from areal_jax.trainer.checkpoint import SavedParams

    version = find_version(checkpoint)
    source = find_source(version, model)
    params = SavedParams(version)
    if dtype == "source":
        dtype = safetensors_files.stored_dtype(source)
    with safetensors_files.new_directory(out) as directory:
        files = safetensors_files.write_params(directory, params.model_config, params, dtype=dtype)
        copy_rest(source, directory)
    return (
        f"{out}: version {params.version} of {version.parent.parent}, {param_count(params.model_config):,} parameters "
        f"in {dtype}, {len(files)} file(s) of weights; tokenizer from {source}"
    )


def export_adapter(checkpoint: pathlib.Path, out: pathlib.Path, *, model: str = "", dtype: str = "float32") -> str:
    """The same for the adapter of a run with `model.lora`. Raises ValueError for a run without one."""
    from areal_jax.models import peft_files, safetensors_files
    from areal_jax.trainer import lora
    from areal_jax.trainer.checkpoint import SavedParams

    version = find_version(checkpoint)
    params, base = SavedParams(version), model or source_name(version)
    trainable = params.trainable
    if not trainable.adapted:
        raise ValueError(
            f"--adapter: {version} is of a run without model.lora, which trained the weights themselves; without "
            "--adapter the whole model is written"
        )
    if dtype == "source":
        dtype = safetensors_files.stored_dtype(find_source(version, model))
    factors = {name: params.read(name) for kernel in trainable.adapted for name in lora.factors(kernel)}
    with safetensors_files.new_directory(out) as directory:
        peft_files.write_adapter(
            directory,
            params.model_config,
            factors,
            trainable.adapted,
            alpha=trainable.scale * trainable.rank,
            base=base,
            dtype=dtype,
        )
    numbers = sum(factor.size for factor in factors.values())
    return (
        f"{out}: the adapter of version {params.version} of {version.parent.parent}, {numbers:,} parameters of rank "
        f"{trainable.rank} in {dtype}, for {base}"
    )


def find_version(path: pathlib.Path) -> pathlib.Path:
    """The directory of one version: the path itself, or the newest of a run or of its checkpoints."""
    if (path / "facts").is_dir() and (path / "state").is_dir():
        return path
    parent = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    versions = [each for each in parent.glob("*") if each.name.isdigit()]  # one that is half written has another name
    if versions:
        return max(versions, key=lambda each: int(each.name))
    if not path.is_dir():
        raise FileNotFoundError(f"--checkpoint={path}: no such directory; give that of a run, such as runs/math")
    there = ", ".join(sorted(each.name for each in parent.iterdir())[:10]) or "nothing"
    raise FileNotFoundError(
        f"--checkpoint={path}: no checkpoint there; looked for directories named by a version in {parent}, and found "
        f"{there}. A run writes one every trainer.checkpoint.every steps, and at its end"
    )


def find_source(version: pathlib.Path, model: str) -> pathlib.Path:
    """The model directory: the given one, or the one that the run's config.json names.

    A relative model.path is looked for from where this command runs, as the run did.
    """
    if model:
        return model_directory(model)
    path = source_name(version)
    try:
        return model_directory(path)
    except (FileNotFoundError, ValueError) as error:
        named = f"{_run_config(version)} names it; say where it is now with --model=DIR"
        raise FileNotFoundError(f"{error}. {named}") from error


def source_name(version: pathlib.Path) -> str:
    """The model.path of the run."""
    saved = _run_config(version)
    if not saved.exists():
        raise FileNotFoundError(
            f"{saved} is not there, and nothing else says which model directory has the tokenizer; give --model=DIR"
        )
    return str(json.loads(saved.read_text())["model"]["path"])


def _run_config(version: pathlib.Path) -> pathlib.Path:
    return version.absolute().parent.parent / "config.json"


def copy_rest(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Tokenizer, chat template and the tokens that begin and end a text."""
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)
    _write_json(directory / "generation_config.json", generation_config(source))
    config, theirs = _read_json(directory / "config.json"), _read_json(source / "config.json")
    _write_json(directory / "config.json", config | {name: theirs[name] for name in TOKEN_IDS if name in theirs})


def generation_config(source: pathlib.Path) -> dict[str, Any]:
    """That of the model directory; what it does not say of end and padding is what our own engine ends with."""
    tokenizer = Tokenizer.load(source)
    ours = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    file = source / "generation_config.json"
    theirs = _read_json(file) if file.exists() else {}
    return ours | {field: value for field, value in theirs.items() if value is not None}


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    flags.mark_flags_as_required(["checkpoint", "out"])
    app.run(main, flags_parser=command_line.parse_flags)
