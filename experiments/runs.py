"""Whole runs as experiments use them: the real command in a process of its own, and what it left in its directory."""

import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from areal_jax import compilation

# Of every experiment. The tests import several commands into one process, each with its own --out.
OUT = flags.DEFINE_string("out", None, "Directory for the results.", required=True, allow_override=True)
CONFIG = str(pathlib.Path(__file__).parents[1] / "configs" / "math.py")

Line = dict[str, Any]


def run(
    directory: pathlib.Path, *settings: str, config: str = CONFIG, environment: dict[str, str] | None = None
) -> Line:
    """`python -m areal_jax.main --config=CONFIG --config.SETTING ...`; returns its summary.

    Raises CalledProcessError when the run fails; what it printed is in DIR.log beside the directory.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists; an experiment begins anew: give another --out")
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "areal_jax.main", f"--config={config}", f"--config.run.dir={directory}"]
    with directory.with_suffix(".log").open("w") as log:
        overrides = [f"--config.{setting}" for setting in settings]
        subprocess.run([*command, *overrides], check=True, stdout=log, stderr=log, env=environment)
    return json.loads((directory / "summary.json").read_text())


def lines(directory: pathlib.Path, name: str) -> list[Line]:
    """The lines of DIR/NAME.jsonl."""
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def machine() -> Line:
    """What a result was measured on."""
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def memory(field: str) -> int:
    """Bytes of this process: "VmRSS", now; "VmHWM", at most so far; "VmSize", "VmPeak": with pages never touched."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def define_parts(parts: Sequence[str], default: Sequence[str] = ()) -> flags.FlagHolder:
    """The flag --parts of an experiment that can run in pieces: `default` or, where that is empty, all of them."""
    allowed = ", ".join(parts)
    holder = flags.DEFINE_list("parts", list(default or parts), f"Which parts, of {allowed}.")
    flags.register_validator(holder, lambda given: set(given) <= set(parts), f"it may have {allowed}")
    return holder


def read(out: pathlib.Path) -> Line:
    """What an experiment wrote into this directory before, without the machine; nothing where there is none."""
    path = out / "results.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: value for name, value in found.items() if name != "machine"}


def begin(out: str) -> tuple[pathlib.Path, Line]:
    """The directory of an experiment that runs in pieces, and what was measured into it before."""
    compilation.enable_cache()
    path = pathlib.Path(out).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path, read(path)


def write(out: pathlib.Path, results: Line) -> None:
    """Writes results.json and shows it."""
    text = json.dumps({"machine": machine(), **results}, indent=2)
    (out / "results.json").write_text(text + "\n")
    print(text)
