"""Evaluation by itself: a generation engine and a reward pool in this process, no trainer.

In: a checked config and a directory. Out: the directory's files, and the exit status. Called by `areal_jax.evaluate`.
Waits for the engine and the reward pool, and says how far they are.

    config.json         what was asked
    completions.jsonl   one record per problem, written as they come, in the order of the source once all are there
    evaluation.json     the figures, written last: a directory that has it is finished, and is not written to again

An evaluation that was stopped goes on when the same command is given: as the sampling keys depend on seed, problem and
sample alone, the figures are those of an evaluation that was not stopped.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from areal_jax import compilation
from areal_jax import config as config_lib
from areal_jax.config import Config
from areal_jax.hub import model_directory
from areal_jax.launch import generation_server, processes, roles, run_files
from areal_jax.launch.evaluation_page import Progress, page
from areal_jax.launch.threads import LocalGenerate
from areal_jax.metrics import JsonlWriter
from areal_jax.rewards.final_answer import final_answer
from areal_jax.rollout.controller import IN_FLIGHT_PER_SLOT
from areal_jax.rollout.evaluation import Evaluation, Record, askable, evaluate, plan
from areal_jax.rollout.workflow import RolloutFailed
from areal_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def run(config: Config, out: pathlib.Path) -> int:
    """Evaluates into `out` and prints the figures. Returns 0, or 130 when it was stopped.

    Raises ValueError when `out` holds something else already, RolloutFailed when a problem has no score (what was
    judged before is then in failed.jsonl), and what the config's model, data and reward raise.
    """
    with processes.exclusive(out, setting="--out", remedy="--out"):
        known = open_directory(out, config)
        records = JsonlWriter(out / "completions.jsonl")
        try:
            with Progress(known, Console(stderr=True)) as progress, _answering_interrupts(progress):
                evaluation, unanswered = _measure(config, known, records, progress)
        except RolloutFailed:
            os.replace(records.path, out / "failed.jsonl")  # no later start takes verdicts of a reward that was mended
            raise
        except KeyboardInterrupt:
            print(f"\nstopped: {progress.told()}; the same command goes on from {records.path}", file=sys.stderr)
            return 130
        finally:
            records.close()
        summary = {**_origin(config), **progress.speed(), "unanswered": unanswered, **evaluation.figures()}
        close_directory(out, summary, evaluation)
        console = Console()
        console.print(page(summary, str(out)))
        for what, name in [("numbers", "evaluation.json"), ("problems with their answers", "completions.jsonl")]:
            console.print(f"[cyan]{what}[/]: {out / name}", soft_wrap=True, highlight=False)
        return 0


def open_directory(out: pathlib.Path, config: Config) -> list[Record]:
    """The records of an earlier, unfinished start of the same evaluation; `out` is this one's from here on.

    Raises ValueError when `out` holds a finished evaluation, an unfinished one with other settings, or a run.
    """
    if (out / "evaluation.json").exists():
        raise ValueError(f"--out={out} holds a finished evaluation; give another --out, or remove that directory")
    ours, saved = config_lib.to_json(config), out / "config.json"
    records = run_files.read_lines(out / "completions.jsonl")
    if (records or (out / "starts.jsonl").exists()) and not (saved.exists() and saved.read_text() == ours):
        raise ValueError(
            f"--out={out} holds a run, or an evaluation with other settings that was stopped (see {saved}); give "
            "another --out, or remove that directory"
        )
    saved.write_text(ours)
    return records


def close_directory(out: pathlib.Path, summary: dict[str, Any], evaluation: Evaluation) -> None:
    """Puts the records into the order of the source, then writes evaluation.json."""
    run_files.write_lines(out / "completions.jsonl", evaluation.records)
    temporary = out / "evaluation.json.tmp"
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, out / "evaluation.json")


def _measure(
    config: Config, known: list[Record], records: JsonlWriter, progress: Progress
) -> tuple[Evaluation, dict[str, int]]:
    """The evaluation, and by cause how many completions a verifier left unanswered that count as wrong."""
    compilation.enable_cache()
    tokenizer = Tokenizer.load(model_directory(config.model.path))
    source = roles.load_prompts(config, "held_out", tokenizer)
    slots = config.generation.slots
    in_flight = min(IN_FLIGHT_PER_SLOT * slots, config.generation.max_waiting)
    planned = plan(config, stop_tokens=tokenizer.eos_ids, in_flight=in_flight, per_request=slots)
    asked = askable(source, planned)  # before the engine compiles, in case that it is refused

    def keep(record: Record) -> None:
        records.write(record)
        progress.add(record)

    with roles.make_scorer(config) as scorer:
        scheduler = generation_server.make_scheduler(_alone(config))
        try:
            evaluation = asyncio.run(
                evaluate(
                    asked,
                    planned,
                    generate=LocalGenerate(scheduler),
                    scorer=scorer,
                    tokenizer=tokenizer,
                    final_answer=final_answer,
                    known=known,
                    on_start=progress.start,
                    on_record=keep,
                )
            )
            return evaluation, dict(scorer.unanswered)
        finally:
            scheduler.stop()


@contextlib.contextmanager
def _answering_interrupts(progress: Progress) -> Iterator[None]:
    """Within it Ctrl-C is answered at once; it still raises KeyboardInterrupt, or cancels what asyncio runs.

    That may take long: Python comes to it only when the main thread is back from compiling, and the engine ends its
    step first. The interpreter writes the number of a signal to the wake-up descriptor without waiting for a thread.
    A shell's background job starts with the signal ignored, which Python leaves so; here it is answered there, too.
    """
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)  # set_wakeup_fd wants that

    def answer() -> None:
        while number := ours.recv(1):
            if number[0] == signal.SIGINT:
                progress.stopping()
                return

    thread = threading.Thread(target=answer, daemon=True)
    previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        signal.signal(signal.SIGINT, ignored)
        theirs.close()  # the thread ends
        thread.join()
        ours.close()


def _alone(config: Config) -> Config:
    """With a cache for evaluation only: rollouts may be much longer."""
    rollout = dataclasses.replace(config.rollout, max_new_tokens=config.eval_max_new_tokens)
    return dataclasses.replace(config, rollout=rollout)


def _origin(config: Config) -> dict[str, Any]:
    return {
        "model": config.model.path,
        "data": config.eval.data,
        "options": config.eval.options,
        "reward": config.reward.function,
        "time": time.time(),
    }
