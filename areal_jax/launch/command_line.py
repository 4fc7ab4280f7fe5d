"""What the commands have in common: overrides of the config, plain logs, and mistakes told in a sentence.

In: the words of a command line. Out: parsed flags, or exit status 2 with the reason on stderr. Called by `main` and
`evaluate`. Waits for nobody.
"""

import contextlib
import logging
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from absl import flags
from ml_collections import ConfigDict, config_flags

from areal_jax import config as config_lib
from areal_jax.rollout.workflow import RolloutFailed

GIVE = {  # what a flag that must be set may be
    "config": "configs/math.py or another file under configs/",
    "checkpoint": "runs/NAME, the directory of a run",
    "out": "DIR, a directory that does not exist yet",
}
LESS_MEMORY = (
    "The same command with --dry_run shows what takes how much; less is taken with smaller generation.slots and "
    "max_length, or trainer.token_budget and trainer.remat"
)


def define_config() -> "flags.FlagHolder[ConfigDict]":
    """The flag --config, with --config.section.key=value for every key.

    It also takes keys that do not exist: data.options and eval.options are free, and other ones `config.build` refuses.
    """
    return config_flags.DEFINE_config_file(
        "config",
        None,
        "A file under configs/, or areal_jax/config.py:DIR/config.json for a saved one.",
        lock_config=False,
        accept_new_attributes=True,
    )


def log_plainly() -> None:
    """What the parts have to say on stderr, in one line each; libraries (Orbax, through absl) only when they warn."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stderr, force=True)  # instead of absl's handler
    for talkative in ("absl", "jax", "matplotlib", "httpx", "httpx2"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    for library in ("huggingface_hub", "datasets"):  # they print by themselves, and would be heard twice
        logging.getLogger(library).propagate = False


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can mend is told in a sentence; a traceback is for our own mistakes.

    The exit status is 2 for a mistake in the config or its files, 1 for an evaluation that has no score and where
    memory runs out (with the traceback, which says where), 130 for Ctrl-C before anything was begun.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        logging.debug("", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except RolloutFailed as failure:
        print(f"error: the evaluation has no score: {failure}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # the latter is XLA's
            raise
        traceback.print_exc()
        print(f"error: out of memory: {str(error).splitlines()[0].rstrip('.')}. {LESS_MEMORY}", file=sys.stderr)
        sys.exit(1)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's parser; what it refuses is told in a sentence, and ends the process with status 2."""
    file = _config_file(argv)
    if file and not pathlib.Path(file).is_file():
        _refuse(f"--config={file}: no such file")
    if file and not file.endswith(".py"):
        _refuse(
            f"--config={file} must be a Python file with a get_config(), like {GIVE['config']}; a saved one is "
            f"--config=areal_jax/config.py:{file}"
        )
    try:
        return flags.FLAGS(list(argv))
    except Exception as error:  # the config is a program
        _refuse(_within(file, error) or _mistake(argv, error))


def _refuse(told: str) -> NoReturn:
    print(f"error: {told}", file=sys.stderr)
    sys.exit(2)


def _within(file: str, error: BaseException) -> str:
    """What went wrong in a config file, and in which line; "" for an error that did not begin there."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner  # what absl and ml_collections say of it
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    if not lines and "get_config" not in str(error):
        return ""
    where = f", line {lines[-1]}" if lines else ""
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"--config={file}{where}: {kind}{error}"


def _mistake(argv: Sequence[str], error: Exception) -> str:
    """What is wrong with a command line of which absl or ml_collections has told something."""
    told = " ".join(str(error).split())
    unknown = [key for key in _overridden(argv) if not config_lib.is_key(key)]
    if unknown:
        return config_lib.unknown_key(unknown[0])
    unset = re.match(r"flag --(\w+)=None: ", told)
    if unset and unset[1] in GIVE:
        return f"--{unset[1]} is not set; give --{unset[1]}={GIVE[unset[1]]}"
    wrong = re.match(r"flag --config\.([\w.]+)=(.*?): ", told)
    return (wrong and config_lib.wrong_text(wrong[1], wrong[2])) or told


def _config_file(argv: Sequence[str]) -> str:
    """The file that --config names, without the argument behind a colon; "" when it is not given."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, joined, value = word.partition("=")
        if name in ("-config", "--config"):
            return (value if joined else following).partition(":")[0]
    return ""


def _overridden(argv: Sequence[str]) -> list[str]:
    """The keys that the command line names: trainer.steps of --config.trainer.steps=3."""
    return [
        word.lstrip("-").removeprefix("config.").partition("=")[0]
        for word in argv
        if word.lstrip("-").startswith("config.")
    ]
