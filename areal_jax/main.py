"""The command line: `python -m areal_jax.main --config=configs/math.py [--config.section.key=value ...]`.

In: a config file and overrides. Out: a run in its own directory, of reinforcement learning or, with `sft.data`, of
supervised fine-tuning; with `--role`, one of its processes; with `--dry_run` the resolved config and a plan of its
memory. A config that contradicts itself ends here, before any process or device is touched.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from areal_jax import config as config_lib
from areal_jax import config_rules, host_memory, metrics
from areal_jax.config import Config
from areal_jax.hub import find_model, model_directory
from areal_jax.launch import command_line

_CONFIG = command_line.define_config()
_ROLE = flags.DEFINE_enum("role", None, ["trainer", "generator", "rollout"], "Start this one part and nothing else.")
_INDEX = flags.DEFINE_integer("index", 0, "With --role=generator: which of generation.addresses this server is.")
_PROCESS = flags.DEFINE_integer(
    "process",
    None,
    "With --role=trainer: which of trainer.distributed.processes this one is; 0 hosts the queue. Left out, it is what "
    "the cluster says (coordinator=auto), or 0.",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Check the config, print it (stdout) and the memory that it will need (stderr), and stop."
)
_DEVICES = flags.DEFINE_integer(
    "devices", 0, "With --dry_run: devices of the trainer; 0 is as many as trainer.mesh names, with -1 as 1."
)


def main(argv: Sequence[str]) -> int:
    """Runs what the flags say and returns the exit status: 0 done, 1 failed, 2 a mistake in the config."""
    command_line.log_plainly()
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options look like --config.trainer.steps=10")
    with command_line.plain_errors():
        config = config_lib.build(_CONFIG.value)
        _check_flags()
        if _ROLE.value == "generator":  # also by itself, for a model without data or training
            config_rules.check_serving(config)
            servers = len(config.generation.addresses)
            if not 0 <= _INDEX.value < servers:
                raise ValueError(
                    f"--index={_INDEX.value} must be 0 to {servers - 1}: generation.addresses names {servers}"
                )
        else:
            config_rules.check(config)
            if config.sft.data and not _DRY_RUN.value:
                check_supervised_role(config, _ROLE.value)
            if not _DRY_RUN.value:
                config_rules.check_packages(config)
                if _ROLE.value and not config.sft.data:
                    config_rules.check_parts(config)
        if config.metrics.wandb:
            metrics.require_wandb()
    if _DRY_RUN.value and _ROLE.value == "generator":
        return dry_serve(config)
    if _DRY_RUN.value and config.sft.data:
        return dry_fine_tune(config, devices=_DEVICES.value)
    if _DRY_RUN.value:
        return dry_run(config, devices=_DEVICES.value)
    _keep_memory(config)
    with command_line.plain_errors():
        if config.sft.data and _ROLE.value != "generator":
            return fine_tune(config, command=sys.argv)
        if _ROLE.value:
            from areal_jax.launch import roles

            return roles.run(config, _ROLE.value, index=_INDEX.value, process=_PROCESS.value)
        return run(config, command=sys.argv)


def _keep_memory(config: Config) -> None:
    """What this process frees stays with it; one that trains starts itself once more for that, and comes here again."""
    alone = config.trainer.distributed.processes == 1 if config.sft.data else config.run.launch == "threads"
    if _ROLE.value == "trainer" or (not _ROLE.value and alone):
        host_memory.start_training(in_turn=bool(_ROLE.value or config.sft.data))
    else:
        host_memory.keep_freed()


def _check_flags() -> None:
    """Raises ValueError for a flag that says nothing without another one."""
    for flag, said, role in [("index", _INDEX.value, "generator"), ("process", _PROCESS.value, "trainer")]:
        if said and _ROLE.value != role:
            raise ValueError(f"--{flag}={said} is said of --role={role}; give this role, or leave --{flag} out")
    if _DEVICES.value < 0 or (_DEVICES.value and not _DRY_RUN.value):
        raise ValueError(f"--devices={_DEVICES.value} must be at least 0, and is for a plan: give --dry_run with it")


def check_supervised_role(config: Config, role: str | None) -> None:
    """Raises ValueError for a role that supervised fine-tuning does not have: there are trainers alone."""
    if role and (role != "trainer" or config.trainer.distributed.processes == 1):
        raise ValueError(
            f"--role={role} is a part of reinforcement learning, and supervised fine-tuning "
            f"(config.sft.data={config.sft.data}) is one process; leave --role out. --role=trainer is one of several "
            "processes, where trainer.distributed says so"
        )


def dry_run(config: Config, *, devices: int) -> int:
    """Prints the config, and on stderr what the run will need of each device and the first problems it will ask.

    Nothing is downloaded: problems are shown when the model and both data sets are files here, or Python.
    """
    from areal_jax.launch import plan, preview

    with command_line.plain_errors():
        report = plan.report(config, devices=devices)
        if _is_here(config, config.data.train, config.eval.data):
            report += "\n" + preview.report(config)
    return _show_plan(config, report)


def dry_fine_tune(config: Config, *, devices: int) -> int:
    """The same for supervised fine-tuning."""
    from areal_jax.launch import plan, supervised

    with command_line.plain_errors():
        report = plan.supervised_report(config, devices=devices)
        if _is_here(config, config.sft.data, config.sft.eval_data):
            report += "\n" + supervised.preview(config)
    return _show_plan(config, report)


def dry_serve(config: Config) -> int:
    """The same for a generation server by itself."""
    from areal_jax.launch import plan

    with command_line.plain_errors():
        report = plan.serving_report(config)
    return _show_plan(config, report)


def _is_here(config: Config, *data: str) -> bool:
    """Whether the model and these data sets can be read without a download."""
    return not any(each.startswith(config_lib.HUB) for each in data) and find_model(config.model.path) is not None


def _show_plan(config: Config, report: str) -> int:
    print(config_lib.to_json(config), end="", flush=True)
    print(report, file=sys.stderr)
    return 0


def fine_tune(config: Config, *, command: Sequence[str]) -> int:
    """Supervised fine-tuning: in this process, or in several that are started here, or as one of several."""
    from areal_jax.launch import processes, supervised

    if _ROLE.value or config.trainer.distributed.processes == 1:
        return supervised.run(config, command=command, process=_PROCESS.value)
    try:
        return processes.run_trainers(config, command[1:])
    except processes.RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1


def run(config: Config, *, command: Sequence[str]) -> int:
    """A whole run with its summary; also of one that was interrupted or failed half way."""
    from rich.console import Console

    from areal_jax.launch import preview, processes, run_files, summary, threads

    finished = summary.finished(config.run_dir, config.trainer.steps)
    if finished:
        print(f"{config.run_dir} has its {config.trainer.steps} steps; --config.run.name=... begins another run")
        summary.show(config.run_dir, finished, Console())
        return 0
    model_directory(config.model.path)  # once: the parts, which start at the same time, then find it in the cache
    preview.check(config)
    steps = config.run_dir / "metrics.jsonl"
    before = _size(steps)
    launch = processes.run if config.run.launch == "processes" else threads.run
    try:
        status = launch(config, command=command)
    except processes.RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        status = 1
    if _size(steps) > before:  # what an earlier start did is not the outcome of this one
        summary.show(config.run_dir, summary.write(config.run_dir), Console())
    if status == 130:
        newest = run_files.newest_checkpoint(config.run_dir)
        there = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is of version {newest}"
        print(f"stopped: {there}; the same command goes on from version {newest or 0}")
    return status


def _size(file: pathlib.Path) -> int:
    return file.stat().st_size if file.exists() else 0


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=command_line.parse_flags)
