"""A run of supervised fine-tuning, in this process: examples in, a trained checkpoint out. Nothing is generated.

In: a checked config with `sft.data`. Out: the run's directory, and the exit status. Called by `main`. Waits for the
devices; Ctrl-C and SIGTERM end it after the update under way, with a checkpoint from which the same command goes on.
Of several processes each calls it; process 0 reads the examples, and has the directory and the terminal.
"""

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from areal_jax import compilation
from areal_jax import config as config_lib
from areal_jax.config import Config
from areal_jax.distributed import Processes
from areal_jax.hub import model_directory
from areal_jax.launch import child, processes, roles, run_files, summary, supervised_page, threads
from areal_jax.launch.model_config import supervised_model_config
from areal_jax.metrics import JsonlWriter, Writer
from areal_jax.models.safetensors_files import read_params
from areal_jax.models.transformer import TransformerConfig
from areal_jax.rollout.examples import Loaded, load_examples
from areal_jax.tokenizer import Tokenizer
from areal_jax.trainer import sft
from areal_jax.trainer.shared import OwnTimes

SHOWN_CHARACTERS = 600  # of each turn of the first example, by --dry_run

README = """This is the directory of one run of supervised fine-tuning of areal_jax. Everything here can be read while
it goes on.

summary.png         the run as a picture: loss of the batches, held-out loss, tokens per second
summary.json        the run in numbers; written again by `python -m areal_jax.launch.summary DIR`
config.json         the whole configuration, defaults and overrides resolved
examples.json       how many examples there are, how many were too long, how many updates are planned
skipped.jsonl       the examples that were left out because they are too long, with their place in the data
metrics.jsonl       one line per update; the README of the repository explains each name
trainer-N.jsonl     process N, where there are several: its own times of each update
evaluations.jsonl   the held-out loss (nats per response token): phase before | during | after, and the version
skipped/            VERSION.npz: a minibatch whose gradient was not finite, so that no update was made of it
starts.jsonl        one line per start of this run: a run that was stopped goes on with the same command
checkpoints/        the newest states of the trainer; `python -m areal_jax.export` makes a model directory of one
tensorboard/        the numbers of metrics.jsonl for TensorBoard: tensorboard --logdir DIR/tensorboard

Times are seconds since 1970; a version is the number of updates behind a set of weights.
"""


def run(config: Config, *, command: Sequence[str], process: int | None = None) -> int:
    """Trains to the end of the course, with its summary: 0 when it got there, 130 when it was interrupted.

    `process` is which of trainer.distributed.processes this one is (see `roles.joined`).
    """
    child.pin(config.run.cores, "trainer", 0)
    child.end_with_parent()
    compilation.enable_cache()
    stop = threading.Event()
    with roles.joined(config, process, stop) as trainers:
        return _follow(config, trainers, stop) if trainers.index else _lead(config, command, trainers, stop)


def _follow(config: Config, trainers: Processes, stop: threading.Event) -> int:
    """A process that is not the first: the same loop, on the rows that process 0 gives it."""
    if not trainers.of_first(""):
        return 0

    def open_log(version: int) -> Writer:
        trainers.barrier("every program is compiled")
        return OwnTimes(config.run_dir, trainers.index, version=version)

    with threads.stop_on_signals(stop):
        _fit(config, supervised_model_config(config), {}, open_log, lambda line: None, stop, trainers)
    return 0


def _lead(config: Config, command: Sequence[str], trainers: Processes, stop: threading.Event) -> int:
    directory = config.run_dir
    shape, data = supervised_model_config(config), load(config)
    course = sft.make_course(config, len(data["train"].examples))
    finished = summary.finished(directory, course.updates)
    trainers.of_first("" if finished else "the others train, too")
    if finished:
        print(f"{directory} has its {course.updates} updates; --config.run.name=... begins another run")
        supervised_page.show(directory, finished, Console())
        return 0
    with processes.exclusive(directory), threads.stop_on_signals(stop):
        run_files.open_run(directory, command, readme=README)
        version = _train(config, shape, data, course, stop, trainers)
    supervised_page.show(directory, supervised_page.write(directory), Console())
    if version < course.updates:
        print(f"stopped: the newest checkpoint is of version {version}; the same command goes on from there")
        return 130
    return 0


def load(config: Config) -> dict[str, Loaded]:
    """The examples by split, "held_out" only where there are any."""
    tokenizer = Tokenizer.load(model_directory(config.model.path))
    splits = ["train", *(["held_out"] if config.sft.eval_data else [])]
    return {
        split: load_examples(config.sft, split=split, seed=config.run.seed, tokenizer=tokenizer) for split in splits
    }


def write_facts(config: Config, data: Mapping[str, Loaded], course: sft.Course) -> None:
    """Writes what is known before the first update."""
    directory = config.run_dir
    (directory / "config.json").write_text(config_lib.to_json(config))
    facts = {
        "planned_updates": course.updates,
        "epochs": course.total / course.examples,
        "examples": {split: len(loaded.examples) for split, loaded in data.items()},
        "too_long": {split: len(loaded.too_long) for split, loaded in data.items()},
    }
    (directory / "examples.json").write_text(json.dumps(facts, indent=2) + "\n")
    limit = config.sft.max_length
    lines = [
        {"split": split, "place": place, "cause": "too_long", "tokens": tokens, "limit": limit}
        for split, loaded in data.items()
        for place, tokens in loaded.too_long
    ]
    run_files.write_lines(directory / "skipped.jsonl", lines)


def _train(
    config: Config,
    shape: TransformerConfig,
    data: Mapping[str, Loaded],
    course: sft.Course,
    stop: threading.Event,
    trainers: Processes,
) -> int:
    """The loop with its files, none of which is touched before a checkpoint that is there fits; returns the version."""
    evaluations = JsonlWriter(config.run_dir / "evaluations.jsonl")
    progress = supervised_page.Progress(config.run_dir, Console())

    def open_log(version: int) -> Writer:
        trainers.barrier("every program is compiled")
        write_facts(config, data, course)
        evaluations.truncate_after(version if version else -1)
        steps = roles.step_log(config, version)
        progress.begin()
        return _Told(steps, progress)

    def record(line: dict[str, Any]) -> None:
        evaluations.write(line)
        progress.update()

    try:
        return _fit(config, shape, data, open_log, record, stop, trainers)
    finally:
        evaluations.close()


def _fit(
    config: Config,
    shape: TransformerConfig,
    data: Mapping[str, Loaded],
    open_log: Callable[[int], Writer],
    record: Callable[[dict[str, Any]], None],
    stop: threading.Event,
    trainers: Processes,
) -> int:
    """The loop on the examples by split, as many splits as there are; returns the version."""
    examples = {split: data[split].examples if split in data else [] for split in ("train", "held_out")}
    return sft.train(
        config,
        model_config=shape,
        read_params=functools.partial(read_params, model_directory(config.model.path), shape),
        examples=examples["train"],
        held_out=examples["held_out"],
        open_log=open_log,
        record=record,
        stop=stop,
        processes=trainers,
    )


class _Told:
    """A step log of which the terminal hears, too."""

    def __init__(self, log: Writer, progress: supervised_page.Progress) -> None:
        self._log, self._progress = log, progress

    def write(self, record: Mapping[str, Any]) -> None:
        self._log.write(record)
        self._progress.update_now_and_then()

    def close(self) -> None:
        self._log.close()
        self._progress.update()


def preview(config: Config) -> str:
    """The data as the model will see it, for `--dry_run`."""
    tokenizer = Tokenizer.load(model_directory(config.model.path))
    keys = {"train": "sft.data", "held_out": "sft.eval_data"}
    data, lines = load(config), list[str]()
    course = sft.make_course(config, len(data["train"].examples))
    for split, loaded in data.items():
        lengths = [len(example) for example in loaded.examples]
        first = loaded.examples[0]
        lines += [
            f"{keys[split]}: {len(lengths):,} examples of {min(lengths)} to {max(lengths)} tokens; "
            f"{len(loaded.too_long):,} over sft.max_length={config.sft.max_length} are left out",
            f"  the first: {len(first.prompt_tokens)} tokens of the prompt, and {int(first.trains.sum())} that train",
            *_quoted(first, tokenizer),
        ]
    lines.append(
        f"{course.updates:,} updates of {course.batch_size} examples: {course.total / course.examples:.2f} epochs"
    )
    return "\n".join(lines)


def _quoted(example: sft.Example, tokenizer: Tokenizer) -> list[str]:
    """The text of an example, "|" before lines that are asked and ">" before those that train."""
    tokens = np.concatenate([example.prompt_tokens, example.tokens])
    trains = np.concatenate([np.zeros(len(example.prompt_tokens), np.bool_), example.trains])
    lines = list[str]()
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(trains)) + 1):
        mark = ">" if trains[part[0]] else "|"
        lines += [f"    {mark} {line}" for line in tokenizer.decode(tokens[part])[:SHOWN_CHARACTERS].splitlines()]
    return lines
