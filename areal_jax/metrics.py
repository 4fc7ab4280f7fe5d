"""What is measured: the name and meaning of every metric, small accumulators, and the writers.

In: plain numbers (numpy scalars too) that the parts hand over. Out: files in the run's directory, which the display and
the summary read (JSONL always, TensorBoard and Weights & Biases by config). Called by: every process of a run, each
with files of its own. Waits for: the disk, for one line at a time.

`METRICS` is the reference: the README's table is printed from it by `python -m areal_jax.metrics`.
"""

import collections
import contextlib
import importlib.util
import json
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

log = logging.getLogger(__name__)

# One line of metrics.jsonl is one training step. Name -> (meaning, AReaL's name for the same thing or "").
# AReaL's names are those of its `StatsLogger` (areal/engine/ppo/actor.py), behind its prefix "ppo_actor/".
METRICS: dict[str, tuple[str, str]] = {
    "version": ("training steps completed, this one included", "global_step + 1"),
    "time": ("end of the step, seconds since 1970", ""),
    "step_s": ("seconds from the end of the step before to the end of this one", ""),
    "idle_s": ("of these, waiting for a batch: the trainer stood still", "timeperf/rollout"),
    "pack_s": ("of these, advantages and packing on the host, and handing rows to the trainer's other processes", ""),
    "prox_s": ("of these, log-probabilities under the step's first weights", "timeperf/recompute_logp"),
    "update_s": ("of these, forward, backward and optimizer", "timeperf/train_step"),
    "publish_wait_s": ("of these, waiting for the publication of the version before", "timeperf/update_weights"),
    "checkpoint_s": ("of these, handing a checkpoint to its writer", "timeperf/save"),
    "prompts": ("ids of the batch's prompts, rising; an id is in one line of a whole run, whatever was killed", ""),
    "reward/mean": (
        "mean reward of the batch that trains; with rollout.drop_zero_variance that is after the filter",
        "task_reward/avg",
    ),
    "reward/accuracy": (
        "share of that batch that the verifier called right; of all that finished: `right` in rollout.jsonl",
        "",
    ),
    "response/length_mean": ("tokens of a completion, mean over the batch", "seq_len/avg - prompt_len/avg"),
    "response/length_p50": ("the same, median", ""),
    "response/length_p99": ("the same, 99th percentile; p99/p50 is the tail that asynchrony hides", ""),
    "response/length_max": ("the same, longest", ""),
    "response/truncated": ("share of completions cut off at max_new_tokens", "no_eos_ratios/avg"),
    "staleness/mean": (
        "consuming version minus a token's version, mean over completion tokens",
        "update/version_stats/sample_staleness_theta_avg",
    ),
    "staleness/min": ("the same, freshest token", "update/version_stats/sample_staleness_theta_min"),
    "staleness/max": ("the same, oldest token; at most eta when overdue=mask has masked none", "..._theta_max"),
    "staleness/histogram": ("completion tokens by staleness 0, 1, 2, ...", ""),
    "tokens/trained": ("completion tokens with loss mask 1", "n_valid_tokens"),
    "tokens/gradless": ("of these, not computed, as their advantage is 0; entropy to logp_gap leave them out", ""),
    "tokens/masked": ("completion tokens left out because they are staler than eta (overdue=mask)", ""),
    "tokens/prompt": ("prompt tokens in the batch; they never train", ""),
    "loss": (
        "the objective, negated; near 0 by construction, its size says little (supervised: cross-entropy, nats)",
        "update/actor_loss/avg",
    ),
    "entropy": ("of the next-token distribution, nats, mean over computed tokens", "update/entropy/avg"),
    "held_out/loss": (
        "supervised fine-tuning, where it was measured: cross-entropy of a held-out response token, nats",
        "",
    ),
    "grad_norm": ("global norm before clipping, mean over minibatches", "update/grad_norm"),
    "updates/skipped": (
        "optimizer updates left out because their gradient was not finite, since this start",
        "",
    ),
    "lr": ("learning rate of the step's last update", "update/lr"),
    "ratio/mean": ("pi_theta / pi_prox, mean over computed tokens", "update/importance_weight/avg"),
    "ratio/clipped": ("share of computed tokens at the clip, where no gradient flows", "update/clip_ratio/avg"),
    "behav_weight/mean": ("pi_prox / pi_behav, mean over computed tokens", "update/behave_imp_weight/avg"),
    "behav_weight/max": ("the same, largest: how far off-policy the worst token was", "update/behave_imp_weight/max"),
    "approx_kl": ("u - 1 - log u, u the ratio: how far the step moved from its first weights", "update/approx_kl/avg"),
    "logp_gap/p50": ("distance of log p between generator and trainer at equal version, median token", ""),
    "logp_gap/p99": ("the same, 99th percentile; rounding only, or the two models differ", ""),
    "logp_gap/max": ("the same, largest", ""),
    "logp_gap/tokens": ("tokens of the consuming version, over which the gap is taken; absent when 0", ""),
    "versions_per_trajectory/max": ("most versions inside one trajectory", ""),
    "trajectories/multi_version": ("trajectories that hold more than one version: interrupted in mid sequence", ""),
    "packing/padding": ("share of the packed rows that is padding", ""),
    "model_tflops/update": ("1e12 FLOPs of the updates, counted as areal_jax/models/flops.py says: no padding", ""),
    "model_tflops/prox": ("the same of the proximal pass, which is a forward pass: a third for each token", ""),
    "model_tflops_per_s": ("both over prox_s + update_s, all devices together", ""),
    "mfu": ("model FLOPs utilisation: the same over the devices' peak; absent where that is not known, as on CPUs", ""),
    "device_memory_gb/in_use": ("1e9 bytes on the fullest of this process' devices; absent where none tells (CPU)", ""),
    "device_memory_gb/peak": ("the same, the most so far", ""),
    "groups/zero_variance": ("groups whose rewards are all equal: with a group baseline they teach nothing", ""),
    "compilations": ("programs compiled by the trainer's process so far; constant after warm-up", ""),
    "queue/waiting": ("trajectories left waiting when the batch was taken", ""),
    "dropped": ("trajectories that never trained, by cause, so far", "rollout/rejected"),
}


def percentiles(values: Any, points: Sequence[float] = (50, 99)) -> dict[str, float]:
    """`{"p50": ..., "p99": ..., "max": ...}` of any number of values; empty when there are none.

    A percentile of nothing is not 0: the metric is then absent from its line.
    """
    flat = np.asarray(values, np.float64).ravel()
    if flat.size == 0:
        return {}
    found = {f"p{point:g}": float(value) for point, value in zip(points, np.percentile(flat, points), strict=True)}
    return {**found, "max": float(flat.max())}


def with_prefix(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`{"logp_gap/p50": ...}` from `("logp_gap", {"p50": ...})`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


class Seconds:
    """Seconds spent by name: `with seconds.measure("idle_s"): ...`, read and reset once per step by `take()`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._spent[name] += self._clock() - start

    def take(self) -> dict[str, float]:
        """What was measured since the last call, by name; the sums start again at 0."""
        spent = dict(self._spent)
        self._spent.clear()
        return spent


class Writer(Protocol):
    """Takes one record of metrics at a time."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object per line, appended and flushed at once, from any thread.

    A value that is not finite is written as `null`, named under "not_finite" in the same line, and logged: JSON has no
    NaN, and a NaN must not pass unseen. A last line that a killed process left unfinished is cut off on opening.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.path.touch()
        whole = _whole_lines(self.path.read_bytes())
        os.truncate(self.path, sum(map(len, whole)))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        plain, not_finite = to_json(record)
        if not_finite:
            plain["not_finite"] = not_finite
            log.warning("%s, version %s: not finite: %s", self.path.name, plain.get("version"), not_finite)
        line = json.dumps(plain, allow_nan=False) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def truncate_after(self, version: int) -> None:
        """Drops the lines of later versions; a run that goes on from a checkpoint writes those again."""
        with self._lock:
            self._file.close()
            kept = [
                line for line in _whole_lines(self.path.read_bytes()) if json.loads(line).get("version", 0) <= version
            ]
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_bytes(b"".join(kept))
            os.replace(temporary, self.path)
            self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        with self._lock:
            self._file.close()


class TensorBoardWriter:
    """Event files for TensorBoard: every number under its name, over versions.

    `first_version` hides what an earlier process wrote at this version or later (a resumed run). `prefix` keeps apart
    what two processes write into one directory.
    """

    def __init__(self, directory: str | os.PathLike[str], *, first_version: int = 0, prefix: str = "") -> None:
        from tensorboardX import SummaryWriter  # imported here: it takes 0.5 s, and only one process writes

        self._prefix = prefix
        # tensorboardX names files by the second, and would overwrite that of a process started in the same one.
        suffix = f".{prefix.strip('/')}.{time.time_ns()}"
        self._events = SummaryWriter(str(directory), purge_step=first_version, flush_secs=5, filename_suffix=suffix)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record):
            self._events.add_scalar(self._prefix + name, value, record["version"], walltime=record.get("time"))

    def close(self) -> None:
        self._events.close()


class WandbWriter:
    """Weights & Biases, only if the package is there (`require_wandb` says so before a device is touched)."""

    def __init__(self, directory: str | os.PathLike[str], *, name: str, config: Mapping[str, Any]) -> None:
        require_wandb()
        import wandb

        self._run = wandb.init(project="areal_jax", name=name, dir=str(directory), config=dict(config), resume="allow")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(record)), step=int(record["version"]))

    def close(self) -> None:
        self._run.finish()


class StepLog:
    """The trainer's log: metrics.jsonl, and what the config asks for beside it."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        version: int,
        tensorboard: bool,
        wandb: bool,
        name: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the files of a run that stands at `version`; later lines, of steps that were lost, are dropped."""
        directory = pathlib.Path(run_dir)
        lines = JsonlWriter(directory / "metrics.jsonl")
        lines.truncate_after(version)
        self._writers: list[Writer] = [lines]
        if tensorboard:
            self._writers.append(TensorBoardWriter(directory / "tensorboard", first_version=version + 1))
        if wandb:
            self._writers.append(WandbWriter(directory, name=name or directory.name, config=config or {}))

    def write(self, record: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def require_wandb() -> None:
    """Raises `ValueError` when metrics.wandb is asked for and cannot be had."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "metrics.wandb=True needs the package wandb, which is not installed here; "
            "run `pip install wandb`, or set --config.metrics.wandb=False (metrics.jsonl is always written)."
        )


def to_json(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The record in JSON's own types, and by name what was not finite (and is None now)."""
    not_finite: dict[str, str] = {}

    def plain(name: str, value: Any) -> Any:
        if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
            value = value.tolist()
        if isinstance(value, Mapping):
            return {str(key): plain(f"{name}/{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(f"{name}/{i}", item) for i, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            not_finite[name] = str(value)
            return None
        return value

    return {name: plain(name, value) for name, value in record.items()}, not_finite


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, nested ones joined by "/"; lists, texts, version and time are left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif np.ndim(value) == 0 and not isinstance(value, str | None) and name not in ("version", "time"):
            yield prefix + name, float(value)


def table() -> str:
    """`METRICS` as a table in Markdown."""
    rows = [f"| `{name}` | {meaning} | {f'`{areal}`' if areal else ''} |" for name, (meaning, areal) in METRICS.items()]
    return "\n".join(["| metric | meaning | AReaL |", "| --- | --- | --- |", *rows])


def _whole_lines(text: bytes) -> list[bytes]:
    return [line for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


if __name__ == "__main__":
    print(table())
