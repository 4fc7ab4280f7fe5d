"""The command line: `python -m areal_jax.main --config=configs/math.py [--config.section.key=value ...]`.

In: a config file and overrides. Out: a run in its own directory, or, with `--role`, one of its processes; with
`--dry_run` the resolved config. A config that contradicts itself ends here, before any process or device is touched.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence

from absl import app, flags
from ml_collections import config_flags

from areal_jax import config as config_lib
from areal_jax import metrics
from areal_jax.config import Config

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file under configs/, or areal_jax/config.py:DIR/config.json for a saved one."
)
_ROLE = flags.DEFINE_enum("role", None, ["trainer", "generator", "rollout"], "Start this one part and nothing else.")
_INDEX = flags.DEFINE_integer("index", 0, "With --role=generator: which of generation.addresses this server is.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the resolved config, check it, and stop.")


def main(argv: Sequence[str]) -> int:
    """Runs what the flags say and returns the exit status: 0 done, 1 failed, 2 a mistake in the config."""
    _log_plainly()
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options look like --config.trainer.steps=10")
    with _plain_errors():
        config = config_lib.build(_CONFIG.value)
        config_lib.check(config)
        if config.metrics.wandb:
            metrics.require_wandb()
    if _DRY_RUN.value:
        print(config_lib.to_json(config), end="")
        return 0
    with _plain_errors():
        if _ROLE.value:
            from areal_jax.launch import roles

            return roles.run(config, _ROLE.value, index=_INDEX.value)
        return run(config, command=sys.argv)


def run(config: Config, *, command: Sequence[str]) -> int:
    """A whole run with its summary; also of one that was interrupted or failed half way."""
    from rich.console import Console

    from areal_jax.launch import processes, summary, threads

    finished = summary.finished(config.run_dir, config.trainer.steps)
    if finished:
        print(f"{config.run_dir} has its {config.trainer.steps} steps; --config.run.name=... begins another run")
        summary.show(config.run_dir, finished, Console())
        return 0
    launch = processes.run if config.run.launch == "processes" else threads.run
    try:
        status = launch(config, command=command)
    except processes.RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        status = 1
    if (config.run_dir / "metrics.jsonl").exists():
        summary.show(config.run_dir, summary.write(config.run_dir), Console())
    return status


def _log_plainly() -> None:
    """What the parts have to say on stderr, in one line each; libraries (Orbax, through absl) only when they warn."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stderr, force=True)  # instead of absl's handler
    for talkative in ("absl", "jax", "matplotlib"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What the user can mend is told in a sentence; a traceback is for our own mistakes."""
    try:
        yield
    except (ValueError, OSError) as error:
        logging.debug("", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


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


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=parse_flags)
