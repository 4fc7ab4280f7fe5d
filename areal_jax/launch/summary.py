"""What came out of a run: summary.json, summary.png, timeline.json, and a page for the terminal.

In: the files of a run, finished, going on or killed. Out: the three files, beside the others. Called by: `main` when a
run ends, and by hand, `python -m areal_jax.launch.summary DIR`. Waits for nobody.
"""

import collections
import itertools
import json
import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_jax.launch import perfetto, run_files
from areal_jax.launch.run_files import Line, Run, column, setting, total

Summary = dict[str, Any]
MARK = re.compile(r"<\|[^|]+\|>|<(?:start|end)_of_turn>")  # of chat templates
LAST_TURN = re.compile(r"^user\n(?!.*^user\n)(.*?)(?=^(?:assistant|model)$|\Z)", re.MULTILINE | re.DOTALL)


def write(directory: pathlib.Path | str) -> Summary:
    """Writes summary.json, summary.png and timeline.json into a run's directory and returns the first."""
    from areal_jax.launch import picture  # matplotlib takes a second to import

    run = Run(directory).update()
    summary = summarize(run)
    temporary = run.directory / "summary.json.tmp"
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, run.directory / "summary.json")
    title = str(setting(run.config, "run.name", run.directory.name))
    picture.draw(run, run.directory / "summary.png", title=title, headline=headline(summary))
    perfetto.write(run, run.directory / "timeline.json")
    return summary


def finished(directory: pathlib.Path | str, steps: int) -> Summary | None:
    """The summary of a run that has made that many steps and was evaluated after them; None for any other."""
    path = pathlib.Path(directory) / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    return summary if summary.get("finished") and summary["version"] >= steps else None


def summarize(run: Run) -> Summary:
    """The run in numbers. What is not known yet is None; README.md explains the fields."""
    steps = run.steps
    return {
        "version": steps[-1]["version"] if steps else 0,
        "planned_steps": run.planned_steps,
        "finished": any(line["phase"] == "after" for line in run.evaluations),
        "wall_s": round(wall_seconds(run), 3),
        "starts": max(len(run.starts), 1),
        "trained_tokens": int(total(steps, "tokens/trained")),
        "masked_tokens": int(total(steps, "tokens/masked")),
        "generated_tokens": int(sum(total(lines, "tokens") for lines in run.generators.values())),
        "held_out": held_out(run.evaluations),
        "reward": {
            "first": _mean(column(steps[:10], "reward/mean")),
            "last": _mean(column(steps[-10:], "reward/mean")),
        },
        "response_length": _last(steps, "response/length_", ("mean", "p50", "p99", "max")),
        "staleness": staleness(run),
        "swaps_mid_sequence": int(total(steps, "trajectories/multi_version")),
        "versions_per_trajectory_max": _most(column(steps, "versions_per_trajectory/max")),
        "swaps": {
            "count": [int(total(lines, "swaps")) for lines in run.generators.values()],
            "stall_s": [round(total(lines, "swap_stall_s"), 6) for lines in run.generators.values()],
            "recomputed_tokens": [int(total(lines, "recomputed_tokens")) for lines in run.generators.values()],
        },
        "logp_gap": logp_gap(steps),
        "idle": idle(run),
        "tokens_per_second": speed(run),
        "recompilations_after_warmup": recompilations(run),
        "dropped": steps[-1].get("dropped", {}) if steps else {},
        "rollouts": rollouts(run.rollout),
    }


def wall_seconds(run: Run) -> float:
    """From each start of the run to the last line written before the next start; time between starts does not count."""
    times = sorted(
        line["time"] for lines in (run.steps, run.evaluations, run.rollout, *run.generators.values()) for line in lines
    )
    starts = [line["time"] for line in run.starts] or [run.begin]
    spans = [[t for t in times if a <= t < b] for a, b in itertools.pairwise([*starts, np.inf])]
    return sum(span[-1] - start for start, span in zip(starts, spans, strict=True) if span)


def held_out(evaluations: list[Line]) -> Summary:
    """The first score "before", the last "after", and every (version, score) in between."""
    before = [line["accuracy"] for line in evaluations if line["phase"] == "before"]
    after = [line["accuracy"] for line in evaluations if line["phase"] == "after"]
    return {
        "before": before[0] if before else None,
        "after": after[-1] if after else None,
        "curve": [[line["version"], line["accuracy"]] for line in evaluations],
    }


def staleness(run: Run) -> Summary:
    """Of the completion tokens that trained: mean, max, tokens by staleness; `arrived` counts the masked ones too."""
    arrived = run_files.staleness_histogram(run.steps)
    masks = setting(run.config, "rollout.overdue", "") == "mask"
    trained = arrived[: setting(run.config, "rollout.max_staleness", 0) + 1] if masks else arrived
    ages = np.nonzero(trained)[0]
    return {
        "mean": float(trained @ np.arange(len(trained)) / trained.sum()) if len(ages) else None,
        "max": int(ages[-1]) if len(ages) else None,
        "histogram": trained.tolist(),
        "arrived": arrived.tolist(),
    }


def logp_gap(steps: list[Line]) -> Summary:
    """p50 and p99 are means of the steps' percentiles, weighted by their tokens; max is the largest of all."""
    weight = column(steps, "logp_gap/tokens")
    known = weight > 0
    if not known.any():
        return {"p50": None, "p99": None, "max": None, "tokens": 0}
    middle = {
        name: float(np.average(column(steps, f"logp_gap/{name}")[known], weights=weight[known]))
        for name in ("p50", "p99")
    }
    return {**middle, "max": float(np.nanmax(column(steps, "logp_gap/max"))), "tokens": int(weight[known].sum())}


def idle(run: Run) -> Summary:
    """Shares of time without work, from the end of the first step to the end of the last."""
    each = [run_files.generator_idle(run_files.steady(run, lines)) for lines in run.generators.values()]
    known = [share for share in each if share is not None]
    return {
        "trainer": run_files.trainer_idle(run_files.steady(run, run.steps)),
        "generator": sum(known) / len(known) if known else None,
        "generators": each,
    }


def speed(run: Run) -> Summary:
    """Tokens per second over the same time as `idle`; the generators' together."""
    steps = run_files.steady(run, run.steps)
    spent = total(steps, "step_s")
    servers = [run_files.steady(run, lines) for lines in run.generators.values() if lines]
    made = [total(lines, "tokens") / total(lines, "interval_s") for lines in servers]
    return {
        "trained": total(steps, "tokens/trained") / spent if spent else None,
        "generated": sum(made) if made else None,
    }


def recompilations(run: Run) -> int:
    """Programs that the trainer and the servers compiled after the first step of a start, which is its warm-up."""
    found = 0.0
    for lines in (run.steps, *run.trainers.values(), *run.generators.values()):
        for first, last in run_files.spans(run):
            counts = column([line for line in lines if first <= line["time"] <= last], "compilations")
            found += np.nansum(np.clip(np.diff(counts), 0, None))  # a server that was restarted counts from 0 again
    return int(found)


def rollouts(lines: list[Line]) -> Summary:
    """Trajectories started, finished, failed, right, over all starts of the controller; its lines are totals so far.

    `right_of_settled` counts what failed as not right, `right_of_finished` leaves it out.
    """
    ends = [a for a, b in itertools.pairwise(lines) if b["started"] < a["started"]] + lines[-1:]
    sums: Summary = {name: int(total(ends, name)) for name in ("started", "finished", "right")}
    failed: collections.Counter[str] = collections.Counter()
    for line in ends:
        failed.update(line["failed"])
    settled = sums["finished"] + failed.total()
    return {
        **sums,
        "failed": dict(failed),
        "right_of_finished": sums["right"] / sums["finished"] if sums["finished"] else None,
        "right_of_settled": sums["right"] / settled if settled else None,
    }


def headline(summary: Summary) -> str:
    """The run in one line."""
    score, age = summary["held_out"], summary["staleness"]
    parts = [f"{summary['version']} of {summary['planned_steps']} steps in {run_files.clock(summary['wall_s'])}"]
    if score["curve"]:
        parts.insert(0, f"held-out score {_scores(score)}")
    parts.append(f"{_short(summary['trained_tokens'])} tokens trained")
    if age["mean"] is not None:
        parts.append(f"mean staleness {age['mean']:.1f}, at most {age['max']}")
        parts.append(f"{_short(summary['swaps_mid_sequence'])} answers hold more than one version")
    return "  ·  ".join(parts)


def show(directory: pathlib.Path | str, summary: Summary, console: Console) -> None:
    """Prints the page: the numbers that matter, a few completions before and after, where the rest is."""
    directory = pathlib.Path(directory)
    console.print(Panel(_numbers(summary), title=f"[bold]{directory}[/]", title_align="left", border_style="cyan"))
    pairs = completion_pairs(run_files.read_lines(directory / "completions.jsonl"))
    for before, after in pairs[:3]:
        console.print(_pair(before, after))
    files = {
        "picture": "summary.png",
        "numbers": "summary.json",
        "timeline, for https://ui.perfetto.dev": "timeline.json",
        "what every file is": "README.txt",
    }
    for what, name in files.items():
        console.print(f"[cyan]{what}[/]: {directory / name}", soft_wrap=True, highlight=False)


def completion_pairs(lines: list[Line]) -> list[tuple[Line, Line]]:
    """Completions of the same held-out prompt, first (before) and last (after)."""
    before = {line["uid"]: line for line in reversed(lines) if line["phase"] == "before"}
    after = {line["uid"]: line for line in lines if line["phase"] == "after"}
    return [(before[uid], after[uid]) for uid in sorted(before.keys() & after.keys())]


def _numbers(summary: Summary) -> Table:
    score, age, gap, idle_shares = (summary[name] for name in ("held_out", "staleness", "logp_gap", "idle"))
    rows = {
        "held-out score": f"[bold]{_scores(score)}[/]",
        "steps": f"{summary['version']} of {summary['planned_steps']} in {run_files.clock(summary['wall_s'])}, "
        f"{summary['trained_tokens']:,} tokens trained",
        "staleness": f"mean {_number(age['mean'], '.2f')}, at most {_number(age['max'], 'd')}; "
        f"{summary['masked_tokens']:,} tokens masked as too old",
        "interrupted": f"{summary['swaps_mid_sequence']:,} answers hold more than one version, "
        f"up to {_number(summary['versions_per_trajectory_max'], 'd')}",
        "idle": f"trainer {_percent(idle_shares['trainer'])}, generator {_percent(idle_shares['generator'])}",
        "log p gap": ", ".join(f"{name} {_number(gap[name], '.1e')}" for name in ("p50", "p99", "max"))
        + " between generator and trainer on the same weights",
        "recompiled": f"{summary['recompilations_after_warmup']} programs after the first step",
        "dropped": ", ".join(f"{n} {cause}" for cause, n in summary["dropped"].items() if n) or "nothing",
    }
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(f"[cyan]{name}[/]", text)
    return table


def _scores(held_out: Summary) -> str:
    """`37% → 99%`, or how it was before when it has not been measured since."""
    if len(held_out["curve"]) < 2:
        return f"{_percent(held_out['before'])}; not measured since"
    return f"{_percent(held_out['before'])} → {_percent(held_out['curve'][-1][1])}"


def _pair(before: Line, after: Line) -> Panel:
    table = Table.grid(padding=(0, 2))
    for name, line in [("before", before), ("after", after)]:
        mark = "[green]right[/]" if line["right"] else "[red]wrong[/]"
        table.add_row(f"[cyan]{name}[/]", mark, Text(_shorten(line["completion"])))
    title = Text(_shorten(_question(before["prompt"]), 120) + f"   (answer {before['answer']})", style="bold")
    return Panel(table, title=title, title_align="left", border_style="dim")


def _question(prompt: str) -> str:
    """What the user says last in a prompt with the marks of a chat template; any other prompt as it is."""
    marked = MARK.search(prompt) and LAST_TURN.search(MARK.sub("\n", prompt))
    return " ".join((marked[1] if marked else prompt).split())


def _shorten(text: str, most: int = 400) -> str:
    text = text.strip()
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _short(count: int) -> str:
    """`950`, `12.3k`, `4.5M`."""
    return next(
        (f"{count / size:.1f}{unit}" for size, unit in [(10**6, "M"), (10**3, "k")] if count >= size), str(count)
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _mean(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _most(counts: np.ndarray) -> int | None:
    return None if np.isnan(counts).all() else int(np.nanmax(counts))


def _last(steps: list[Line], prefix: str, names: tuple[str, ...]) -> Summary:
    return {name: steps[-1].get(prefix + name) if steps else None for name in names}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        raise SystemExit("usage: python -m areal_jax.launch.summary DIR, where DIR is the directory of a run")
    if setting(Run(sys.argv[1]).config, "sft.data", ""):
        from areal_jax.launch import supervised_page as page

        page.show(pathlib.Path(sys.argv[1]), page.write(pathlib.Path(sys.argv[1])), Console())
    else:
        show(sys.argv[1], write(sys.argv[1]), Console())
