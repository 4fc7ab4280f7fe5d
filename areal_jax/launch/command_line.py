"""What the commands have in common: overrides of the config, plain logs, and mistakes told in a sentence.

In: the words of a command line. Out: parsed flags, or exit status 2 with the reason on stderr. Called by `main` and
`evaluate`. Waits for nobody.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from areal_jax import config as config_lib
from areal_jax.rollout.workflow import RolloutFailed


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


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can mend is told in a sentence; a traceback is for our own mistakes.

    The exit status is 2 for a mistake in the config or its files, 1 for an evaluation that has no score.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        logging.debug("", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RolloutFailed as failure:
        print(f"error: the evaluation has no score: {failure}", file=sys.stderr)
        sys.exit(1)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's parser, with the nearest key named when an override names none that exists."""
    try:
        return flags.FLAGS(list(argv))
    except (AttributeError, KeyError, ValueError, TypeError, flags.Error, OSError) as error:
        unknown = [key for key in _overridden(argv) if not config_lib.is_key(key)]
        print(f"error: {config_lib.unknown_key(unknown[0]) if unknown else error}", file=sys.stderr)
        sys.exit(2)


def _overridden(argv: Sequence[str]) -> list[str]:
    """The keys that the command line names: trainer.steps of --config.trainer.steps=3."""
    return [
        word.lstrip("-").removeprefix("config.").partition("=")[0]
        for word in argv
        if word.lstrip("-").startswith("config.")
    ]
