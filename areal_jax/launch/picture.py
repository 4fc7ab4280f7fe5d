"""summary.png: a run on one page.

In: the files of a run, finished or not. Out: a PNG. Called by: `summary`. Waits for nobody; draws with matplotlib's Agg
canvas and no global state, so that it needs no display and may run in any thread.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from areal_jax.launch import run_files, timeline
from areal_jax.launch.run_files import Run, column, setting

INK, FAINT, GRID, STILL = "#22304a", "#7b8794", "#e4e8ee", "#dfe3e8"
REWARD, HELD_OUT, LATE = "#e08a3c", "#1f4e8c", "#d1495b"
COLOURS = {
    timeline.UPDATE: "#2f6fb3",
    timeline.PROX: "#8fb4de",
    timeline.REST: "#c3d6ec",
    timeline.CHECKPOINT: "#8d6e63",
    timeline.PUBLISH: "#b784c9",
    timeline.DECODE: "#2a9d7f",
    timeline.SWAP: LATE,
    timeline.IDLE: STILL,
    timeline.OPEN: "#f3d9a4",
    timeline.CLOSED: "#c98b2b",
}
BINS = 160


def draw(run: Run, path: pathlib.Path, *, title: str, headline: str) -> None:
    """Draws the whole page; a panel whose data is not there yet says so."""
    lanes = 3 + len(run.generators)
    figure = Figure(figsize=(15, 8.2 + 0.6 * lanes), dpi=110, facecolor="white")
    grid = figure.add_gridspec(
        3, 6, height_ratios=[1.25, 1, 0.26 * lanes], hspace=0.4, wspace=0.9,
        left=0.095, right=0.965, top=0.875, bottom=0.095,
    )  # fmt: skip
    figure.text(0.095, 0.955, title, fontsize=19, fontweight="bold", color=INK, va="center")
    figure.text(0.095, 0.923, headline, fontsize=11.5, color=FAINT, va="center")
    panels: list[tuple[Axes, Callable[[Axes, Run], None], str]] = [
        (figure.add_subplot(grid[0, :4]), _learning, "Reward and held-out score"),
        (figure.add_subplot(grid[0, 4:]), _staleness, "Staleness when consumed"),
        (figure.add_subplot(grid[1, :2]), _lengths, "Response length"),
        (figure.add_subplot(grid[1, 2:4]), _speed, "Tokens per second"),
        (figure.add_subplot(grid[1, 4:]), _gap, "Generator against trainer, same weights"),
        (figure.add_subplot(grid[2, :]), _timeline, "Who was busy when"),
    ]
    for axes, panel, name in panels:
        _style(axes, name)
        panel(axes, run)
    handles, labels = axes.get_legend_handles_labels()  # of the timeline, the last
    style = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 1.4, "columnspacing": 1.3}
    figure.legend(handles, labels, loc="lower center", ncols=max(len(labels), 1), **style)
    figure.savefig(path)


def draw_supervised(run: Run, path: pathlib.Path, *, title: str, headline: str) -> None:
    """The page of a run of supervised fine-tuning."""
    figure = Figure(figsize=(13, 5.2), dpi=110, facecolor="white")
    grid = figure.add_gridspec(1, 3, wspace=0.45, left=0.07, right=0.97, top=0.78, bottom=0.12)
    figure.text(0.07, 0.94, title, fontsize=19, fontweight="bold", color=INK, va="center")
    figure.text(0.07, 0.88, headline, fontsize=11.5, color=FAINT, va="center")
    for place, panel, name in [
        (grid[0, :2], _losses, "Loss, nats per response token"),
        (grid[0, 2], _trained_speed, "Response tokens per second"),
    ]:
        axes = figure.add_subplot(place)
        _style(axes, name)
        panel(axes, run)
    figure.savefig(path)


def _losses(axes: Axes, run: Run) -> None:
    if not run.steps:
        return _nothing(axes, "no update yet")
    version, loss = column(run.steps, "version"), column(run.steps, "loss")
    axes.plot(version, loss, color=REWARD, alpha=0.35, linewidth=1)
    axes.plot(version, smooth(loss, max(3, len(loss) // 20)), color=REWARD, linewidth=2.2, label="of the batches")
    at, held_out = column(run.evaluations, "version"), column(run.evaluations, "loss")
    axes.plot(at, held_out, color=HELD_OUT, linewidth=1.6, marker="o", markersize=6, label="held out", zorder=5)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axes, "update")
    _legend(axes, loc="upper right")


def _trained_speed(axes: Axes, run: Run) -> None:
    if not run.steps:
        return _nothing(axes, "no update yet")
    speed = smooth(column(run.steps, "tokens/trained") / column(run.steps, "step_s"), 5)
    axes.plot(column(run.steps, "version"), speed, color=COLOURS[timeline.UPDATE], linewidth=1.8)
    axes.set_ylim(0, 1.25 * np.nanmax(speed, initial=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _label(axes, "update")


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=9)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def _label(axes: Axes, x: str, y: str = "") -> None:
    axes.set_xlabel(x, color=FAINT, fontsize=9.5)
    axes.set_ylabel(y, color=FAINT, fontsize=9.5)


def _legend(axes: Axes, **options: Any) -> None:
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, handlelength=1.4, **options)


def _wall_time(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: run_files.clock(seconds)))
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 3, 6, 10]))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over what is there of `window` values, NaN ignored; same length."""
    if not len(values):
        return values
    known = ~np.isnan(values)
    kernel = np.ones(max(1, min(window, len(values))))
    sums = np.convolve(np.where(known, values, 0.0), kernel, "same")
    weights = np.convolve(known.astype(float), kernel, "same")
    return np.where(weights > 0, sums / np.maximum(weights, 1), np.nan)


def _learning(axes: Axes, run: Run) -> None:
    if not run.steps and not run.evaluations:
        return _nothing(axes, "no step yet")
    low, high = (setting(run.config, f"reward.{name}", default) for name, default in [("incorrect", 0), ("correct", 1)])
    reward_axes = axes.twinx()
    time, reward = column(run.steps, "time") - run.begin, column(run.steps, "reward/mean")
    reward_axes.plot(time, reward, color=REWARD, alpha=0.35, linewidth=1)
    window = max(3, len(reward) // 20)
    reward_axes.plot(time, smooth(reward, window), color=REWARD, linewidth=2.2)
    axes.plot([], [], color=REWARD, linewidth=2.2, label="reward of the training batch (right)")
    held_out, at = column(run.evaluations, "accuracy"), column(run.evaluations, "time") - run.begin
    axes.plot(at, held_out, color=HELD_OUT, linewidth=1.6, marker="o", markersize=7, label="held-out score", zorder=5)
    for index in {0, len(held_out) - 1} if len(held_out) else ():
        axes.annotate(
            f"{held_out[index]:.0%}", (at[index], held_out[index]), xytext=(0, 11), textcoords="offset points",
            ha="center", color=HELD_OUT, fontweight="bold", fontsize=11,
        )  # fmt: skip
    axes.set_ylim(0, 1.06)
    reward_axes.set_ylim(low, high + 0.06 * (high - low))  # so that both scales read as "share right"
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _style(reward_axes, "")
    reward_axes.grid(False)
    reward_axes.set_ylabel("reward", color=FAINT, fontsize=9.5)
    axes.set_zorder(reward_axes.get_zorder() + 1)
    axes.patch.set_visible(False)
    _restarts(axes, run)
    _wall_time(axes)
    _label(axes, "wall time", "held-out score")
    _legend(axes, loc="lower right")


def _restarts(axes: Axes, run: Run) -> None:
    for start in run.starts[1:]:
        axes.axvline(start["time"] - run.begin, color=FAINT, linewidth=1, linestyle=(0, (3, 3)))


def _staleness(axes: Axes, run: Run) -> None:
    histogram = run_files.staleness_histogram(run.steps)
    if not histogram.sum():
        return _nothing(axes, "no token trained yet")
    share, ages = histogram / histogram.sum(), np.arange(len(histogram))
    bound = setting(run.config, "rollout.max_staleness", None)
    late = np.zeros(len(ages), bool) if bound is None else ages > bound
    axes.bar(ages, share, width=0.78, color=np.where(late, LATE, "#3f88c5").tolist())
    for age, value in enumerate(share.tolist()):
        if value and len(ages) <= 12:
            text = f"{value:.0%}" if value >= 0.01 else "<1%"
            axes.text(age, value + 0.012 * share.max(), text, ha="center", va="bottom", fontsize=9, color=INK)
    mean = float(share @ ages)
    if bound is not None:
        axes.axvline(bound + 0.5, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        overdue = {"mask": "masked", "drop": "dropped", "train": "trained"}[
            setting(run.config, "rollout.overdue", "mask")
        ]
        axes.text(bound + 0.58, 1.1 * share.max(), f"η = {bound}\nolder: {overdue}", fontsize=9, color=INK, va="top")
    axes.set_xlim(-0.6, max(len(ages) - 1, bound or 0) + 1.6)
    axes.set_ylim(0, share.max() * 1.14)
    axes.grid(False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _label(axes, f"versions behind (mean {mean:.2f})", "share of tokens")


def _lengths(axes: Axes, run: Run) -> None:
    if not run.steps:
        return _nothing(axes, "no step yet")
    version, window = column(run.steps, "version"), max(1, len(run.steps) // 40)
    p50, p99, mean = (smooth(column(run.steps, f"response/length_{name}"), window) for name in ("p50", "p99", "mean"))
    axes.fill_between(version, p50, p99, color="#d9cdea", label="median to 99th percentile")
    axes.plot(version, p99, color="#9479bd", linewidth=1)
    axes.plot(version, mean, color="#5b3d8f", linewidth=2, label="mean")
    axes.set_ylim(0, 1.25 * np.nanmax(p99, initial=1.0))
    axes.set_xlim(version[0] - 0.5, version[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axes, "step", "tokens")
    _legend(axes, loc="upper left", ncols=2, borderaxespad=0.1)


def _speed(axes: Axes, run: Run) -> None:
    if not run.steps and not run.generators:
        return _nothing(axes, "no token yet")
    edges = np.linspace(run.begin, max(run.end, run.begin + 1.0), 61)
    rate = sum((timeline.generated_rate(lines, edges) for lines in run.generators.values()), np.zeros(60))
    rate[rate == 0] = np.nan  # not up yet, or between two starts
    middle = (edges[1:] + edges[:-1]) / 2 - run.begin
    axes.plot(middle, rate, color=COLOURS[timeline.DECODE], linewidth=1.8, label="generated")
    trained = column(run.steps, "tokens/trained") / column(run.steps, "step_s")
    time = column(run.steps, "time") - run.begin
    axes.plot(time, smooth(trained, 5), color=COLOURS[timeline.UPDATE], linewidth=1.8, label="trained")
    axes.set_ylim(0, 1.25 * max(np.nanmax(rate, initial=1.0), np.nanmax(trained, initial=1.0)))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    )
    _wall_time(axes)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 3, 6, 10]))
    _label(axes, "wall time")
    _legend(axes, loc="upper left", ncols=2, borderaxespad=0.1)


def _gap(axes: Axes, run: Run) -> None:
    gaps = {name: column(run.steps, f"logp_gap/{name}") for name in ("max", "p99", "p50")}
    if all(np.isnan(values).all() for values in gaps.values()):
        return _nothing(axes, "no token of the consuming version yet")
    if not any((values > 0).any() for values in gaps.values()):
        return _nothing(axes, "0 in every step: equal in every bit")
    version = column(run.steps, "version")
    for (name, values), colour in zip(gaps.items(), ["#c9c9c9", "#e0a458", "#8c5a1f"], strict=True):
        axes.plot(version, values, ".", markersize=4, color=colour, label={"max": "largest"}.get(name, name))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 6)
    axes.set_xlim(version[0] - 0.5, version[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axes, "step", "|difference of log p|")
    _legend(axes, loc="upper left", ncols=3, borderaxespad=0.1, markerscale=2.5, columnspacing=1.0)


def _timeline(axes: Axes, run: Run) -> None:
    """One lane per process: the share of each moment that went into each thing it does."""
    if not run.steps and not run.generators:
        return _nothing(axes, "nothing has happened yet")
    edges = np.linspace(run.begin, max(run.end, run.begin + 1.0), BINS + 1)
    idle = run_files.trainer_idle(run_files.steady(run, run.steps))
    lanes = [(_named("trainer", idle), timeline.trainer_shares(run.steps, edges))]
    for name, lines in run.generators.items():
        idle = run_files.generator_idle(run_files.steady(run, lines))
        lanes.append((_named(name.replace("generation-", "generator "), idle), timeline.generator_shares(lines, edges)))
    lanes.append(("rollout", timeline.rollout_shares(run.rollout, edges)))
    seen: set[str] = set()
    for row, (_, kinds) in enumerate(lanes):
        _lane(axes, -row, edges - run.begin, kinds, seen)
    for line in run.evaluations:
        axes.barh(-len(lanes) + 0.6, line["seconds"], 0.4, line["time"] - line["seconds"] - run.begin, color=HELD_OUT)
    _restarts(axes, run)
    ticks = [0.4 - row for row in range(len(lanes))] + [0.6 - len(lanes)]
    axes.set_yticks(ticks, [label for label, _ in lanes] + ["evaluation"])
    axes.tick_params(axis="y", labelsize=10, labelcolor=INK)
    axes.set_ylim(0.3 - len(lanes), 0.9)
    axes.set_xlim(0, edges[-1] - run.begin)
    axes.grid(False)
    _wall_time(axes)
    _label(axes, "wall time")


def _lane(axes: Axes, row: int, edges: np.ndarray, kinds: Mapping[str, np.ndarray], seen: set[str]) -> None:
    """Stacks the shares of one process between `row` and `row` + 0.8; labels what the legend does not have yet."""
    base = np.full(len(edges) - 1, float(row))
    for kind, share in kinds.items():
        top = base + 0.8 * share
        if share.any():
            label = None if kind in seen else kind
            axes.stairs(top, edges, baseline=base, fill=True, color=COLOURS[kind], linewidth=0, label=label)
            seen.add(kind)
        base = top


def _named(name: str, idle: float | None) -> str:
    return name if idle is None else f"{name}\nidle {idle:.0%}"
