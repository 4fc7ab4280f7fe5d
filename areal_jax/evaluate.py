"""The command line: `python -m areal_jax.evaluate --config=configs/math.py [--config.eval.samples=32 ...] [--out=DIR]`.

In: a config file, any that trains too, and overrides; data.train may be missing. Out: DIR with evaluation.json (the
figures), completions.jsonl (a record for each problem, see `rollout.evaluation`) and config.json; the figures as a page
on stdout, progress on stderr. Nothing is trained; waits for nobody.
"""

import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from areal_jax import config as config_lib
from areal_jax import config_rules, host_memory
from areal_jax.launch import command_line

_CONFIG = command_line.define_config()
_OUT = flags.DEFINE_string("out", "", "Directory for the results; runs/NAME-evaluation when it is not given.")


def main(argv: Sequence[str]) -> int:
    """Evaluates what the flags say; the exit status is 0 done, 1 no score, 2 a mistake in the config, 130 stopped."""
    command_line.log_plainly()
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options look like --config.eval.samples=32")
    with command_line.plain_errors():
        config = config_lib.build(_CONFIG.value)
        config_rules.check_evaluation(config)

        from areal_jax.launch import evaluation  # with jax, which takes seconds: a mistake above is told before

        status = evaluation.run(config, pathlib.Path(_OUT.value or f"runs/{config.run.name}-evaluation"))
    if status == 130:  # jaxlib crashes in the interpreter's end when Ctrl-C came into a compilation: leave that out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    host_memory.keep_freed()
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=command_line.parse_flags)
