"""Files of a run that never ran, in the forms that the real processes write, for the tests of their readers."""

import json
import pathlib

import numpy as np

BEGIN = 1_700_000_000.0


def write_lines(path: pathlib.Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def config(steps: int, max_staleness: int = 4) -> dict:
    return {
        "run": {"name": "math"},
        "trainer": {"steps": steps, "prompts_per_step": 16},
        "rollout": {"max_staleness": max_staleness, "group_size": 8, "overdue": "mask"},
        "reward": {"correct": 5.0, "incorrect": -5.0},
        "eval": {"prompts": 256, "every": 20},
    }


def step(
    version: int, time: float, *, step_s: float = 1.0, idle_s: float = 0.25, accuracy: float = 0.5, **other
) -> dict:
    """One line of metrics.jsonl with round numbers."""
    busy = step_s - idle_s
    return {
        "version": version,
        "time": time,
        "step_s": step_s,
        "idle_s": idle_s,
        "prox_s": 0.2 * busy,
        "update_s": 0.7 * busy,
        "publish_wait_s": 0.05 * busy,
        "checkpoint_s": 0.0,
        "reward/mean": 10 * accuracy - 5,
        "reward/accuracy": accuracy,
        "response/length_mean": 20.0,
        "response/length_p50": 16.0,
        "response/length_p99": 80.0,
        "response/length_max": 96,
        "response/truncated": 0.01,
        "staleness/mean": 1.0,
        "staleness/max": 2,
        "staleness/histogram": [100, 200, 100],
        "tokens/trained": 390,
        "tokens/masked": 10,
        "tokens/prompt": 500,
        "logp_gap/p50": 1e-6,
        "logp_gap/p99": 5e-6,
        "logp_gap/max": 2e-5,
        "logp_gap/tokens": 100,
        "versions_per_trajectory/max": 3,
        "trajectories/multi_version": 5,
        "compilations": 12,
        "dropped": {"overdue": version},
        **other,
    }


def write_run(
    directory: pathlib.Path, *, steps: int = 120, planned: int = 0, generators: int = 1, seed: int = 0
) -> None:
    """A run of `steps` steps that learns, with start-up, evaluations, swaps and waits that look like the real thing."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(planned or steps)))
    write_lines(directory / "starts.jsonl", [{"time": BEGIN, "command": ["python", "-m", "areal_jax.main"]}])
    now, lines, evaluations = BEGIN + 22.0, [], []
    for version in range(1, steps + 1):
        share = 0.45 + 0.47 * (1 - np.exp(-version / 45))
        busy = rng.uniform(0.9, 1.2) + (6.0 if version == 1 else 0.0)
        idle = (9.0 if version == 1 else 0.0) + rng.gamma(1.2, 0.35) * (2.0 if version % 20 < 2 else 1.0)
        now += busy + idle
        accuracy = float(np.clip(share + rng.normal(0, 0.03), 0, 1))
        p50 = 15 + 5 * share + rng.normal(0, 0.5)
        old = np.array([0.05, 0.2, 0.4, 0.25, 0.08, 0.02]) if version > 5 else np.array([0.5, 0.4, 0.1, 0, 0, 0])
        histogram = rng.multinomial(2600, old).tolist()
        lines.append(
            step(
                version, now, step_s=busy + idle, idle_s=idle, accuracy=accuracy,
                **{
                    "response/length_mean": 1.35 * p50, "response/length_p50": p50,
                    "response/length_p99": 4.6 * p50 + rng.normal(0, 4), "response/length_max": 128,
                    "staleness/histogram": histogram, "staleness/max": int(np.nonzero(histogram)[0].max()),
                    "staleness/mean": float(np.dot(range(6), histogram) / 2600),
                    "tokens/trained": sum(histogram[:5]), "tokens/masked": sum(histogram[5:]),
                    "logp_gap/p50": 4e-7 * rng.lognormal(0, 0.2), "logp_gap/p99": 3e-6 * rng.lognormal(0, 0.3),
                    "logp_gap/max": 1.2e-5 * rng.lognormal(0, 0.5),
                    "trajectories/multi_version": int(rng.integers(8, 30)),
                    "checkpoint_s": 0.2 if version % 20 == 0 else 0.0,
                    "dropped": {"overdue": 0, "too_long": version // 50},
                },
            )
        )  # fmt: skip
        if version % 20 == 0 and version < steps:
            evaluations.append(evaluation("during", version, now + 3.0, share + rng.normal(0, 0.015)))
    before = evaluation("before", 0, BEGIN + 21.0, 0.44)
    finished = planned in (0, steps)
    after = [evaluation("after", steps, now + 4.5, 0.45 + 0.47 * (1 - np.exp(-steps / 45)))] if finished else []
    write_lines(directory / "metrics.jsonl", lines)
    write_lines(directory / "publishes.jsonl", [publish(line["version"], line["time"]) for line in lines])
    write_lines(directory / "evaluations.jsonl", [before, *evaluations, *after])
    end = now + (5.0 if finished else 0.0)
    for index in range(generators):
        write_lines(directory / f"generation-{index}.jsonl", generation(rng, BEGIN + 14.0, end, lines))
    write_lines(directory / "rollout.jsonl", rollout(rng, BEGIN + 21.0, end))
    write_lines(directory / "completions.jsonl", completions())
    for role, text in {"trainer": f"step {steps}", "generator-0": "serving", "rollout": "started"}.items():
        write_log(directory, role, "compiling", text)


def write_log(directory: pathlib.Path, role: str, *messages: str, level: str = "INFO") -> None:
    path = directory / "logs" / f"{role}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"2023-11-14 22:13:20,000 {level} areal_jax.launch.roles: {message}\n" for message in messages)


def evaluation(phase: str, version: int, time: float, accuracy: float) -> dict:
    return {
        "phase": phase, "version": version, "version_max": version + 1, "time": time, "accuracy": float(accuracy),
        "prompts": 256, "samples": 1, "length_mean": 21.0, "truncated": 0.0, "seconds": 4.0,
    }  # fmt: skip


def publish(version: int, begin: float) -> dict:
    times = {"total_s": 0.3, "copy_s": 0.05, "write_s": 0.1, "push_s": 0.14}
    return {"version": version, "time": begin + 0.3, **times}


def swap(version: int, time: float) -> dict:
    """A swap that ended at `time`."""
    return {"version": version, "time": time, "stall_s": 0.06, "recompute_s": 0.05, "recomputed_tokens": 900}


def generation(rng: np.random.Generator, begin: float, end: float, steps: list[dict]) -> list[dict]:
    """A line per second from `begin` to `end`; a swap after each step, and waits where there is none about."""
    times, lines = np.arange(begin + 1, end, 1.0), []
    done = np.array([line["time"] for line in steps])
    for time in times:
        version = int((done <= time).sum())
        swaps = version - int((done <= time - 1).sum())
        stall = 0.06 * swaps
        busy = 0.0 if time < BEGIN + 17 else float(np.clip(rng.normal(0.82, 0.12), 0, 1.0 - stall))
        swapped = [swap(v, done[v - 1] + 0.2) for v in range(version - swaps + 1, version + 1)]
        quiet = not ((time - 1.3 < done) & (done < time)).any()
        lines.append(
            {
                "time": float(time), "interval_s": 1.0, "busy_s": busy, "tokens": int(busy * 3900), "requests": 12,
                "active": 60, "waiting": 4, "version": version, "swaps": swaps, "swap_stall_s": stall,
                "recomputed_tokens": 900 * swaps, "compilations": 30,
                "swapped": swapped, "waits": [[float(time + busy - 1.0), float(time)]] if quiet else [],
            }
        )  # fmt: skip
    return lines


def rollout(rng: np.random.Generator, begin: float, end: float) -> list[dict]:
    lines, finished, gate = [], 0, 0.0
    for time in np.arange(begin, end, 1.0):
        finished += int(rng.integers(60, 110))
        closed = float(rng.uniform(0, 0.3))
        gate += closed
        lines.append(
            {
                "time": float(time), "started": finished + 128, "finished": finished, "failed": {"timeout": 1},
                "right": int(0.7 * finished), "in_flight": 128, "gate_closed_s": gate,
                "gate_closed": [[float(time) - closed, float(time)]],
                "judging": [[float(time) - 0.5, float(time) - 0.4], [float(time) - 0.2, float(time)]],
            }
        )  # fmt: skip
    return lines


def completions() -> list[dict]:
    same = {"uid": 3, "prompt": "17 - 5 + 30 - 12 =", "answer": "30"}
    return [
        {"phase": "before", "version": 0, **same, "completion": "12 42 31 ; 31", "right": False},
        {"phase": "after", "version": 120, **same, "completion": "12 42 30 ; 30", "right": True},
    ]
