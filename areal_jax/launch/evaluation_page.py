"""What is seen of an evaluation: progress while it goes on, and a page of its figures.

In: records as they are judged; the content of evaluation.json. Out: text on a console: on a terminal one line that
renews itself, elsewhere a plain line every few seconds. Called by `launch.evaluation`. Waits for nobody.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_jax.launch.run_files import clock as in_minutes
from areal_jax.rollout.evaluation import Record

EVERY_S = 5.0  # between two plain lines
FEWEST_FOR_ERROR = 10  # problems; a standard error of fewer says nothing


class Progress:
    """Counts judged problems, and shows them from `start` on until it is left.

    `known` are records of an earlier start: they count as done, but not for speed and time left.
    """

    def __init__(
        self, known: Sequence[Record], console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._before = self._done = len(known)
        self._right = sum(record["right"] for record in known)
        self._samples = sum(record["n"] for record in known)
        self._tokens = 0  # of this start
        self._total = 0
        self._began = self._last = clock()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, total: int) -> None:
        """The first of `total` problems is asked now."""
        self._total = total
        self._began = self._last = self._clock()
        if self._before:
            self._print(f"{self._before} of {total} problems were judged by an earlier start")
        if self._live is not None:
            self._live.start()

    def add(self, record: Record) -> None:
        """One more problem has been judged."""
        self._done += 1
        self._right += record["right"]
        self._samples += record["n"]
        self._tokens += sum(sample["tokens"] for sample in record["samples"])
        now = self._clock()
        if self._live is not None:
            self._live.update(self._bar(), refresh=True)
        elif now - self._last >= EVERY_S or self._done == self._total:
            self._last = now
            self._print(self.line())

    def told(self) -> str:
        return f"{self._done} of {_counted(self._total, 'problem') if self._total else 'all problems'} judged"

    def stopping(self) -> None:
        """Ctrl-C was pressed; may be called from another thread."""
        self._print("stopping ...")

    def line(self) -> str:
        """`12 of 64 problems, 38.2 % right, 3,412 tokens/s, 0:10 elapsed, 0:43 left`."""
        elapsed = self._clock() - self._began
        fresh = self._done - self._before
        left = in_minutes(elapsed / fresh * (self._total - self._done)) if fresh else "–"
        share = _percent(self._right / max(self._samples, 1))
        return (
            f"{self._done} of {_counted(self._total, 'problem')}, {share} right, "
            f"{self._tokens / max(elapsed, 1e-9):,.0f} tokens/s, {in_minutes(elapsed)} elapsed, {left} left"
        )

    def speed(self) -> dict[str, float]:
        """Of this start, without loading and compiling: what evaluation.json says of it."""
        seconds = self._clock() - self._began
        return {
            "seconds": round(seconds, 3),
            "tokens": self._tokens,
            "tokens_per_second": round(self._tokens / max(seconds, 1e-9), 1),
            "judged_by_earlier_starts": self._before,
        }

    def _bar(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_row(ProgressBar(total=max(self._total, 1), completed=self._done, width=24), Text(self.line()))
        return table

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def page(summary: Mapping[str, Any], title: str) -> RenderableType:
    """The content of evaluation.json for a person."""
    return Panel(
        Group(_rows(summary), Text(), _curves(summary)), title=Text(title), title_align="left", border_style="cyan"
    )


def _sampled(summary: Mapping[str, Any]) -> str:
    top_p = f", top-p {summary['top_p']:g}" if summary["top_p"] < 1 else ""
    top_k = f", top-k {summary['top_k']}" if summary["top_k"] else ""
    return f"temperature {summary['temperature']:g}{top_p}{top_k}, at most {summary['max_new_tokens']} tokens"


def _rows(summary: Mapping[str, Any]) -> Table:
    n = summary["samples"]
    rows = {
        "model": summary["model"],
        "data": f"{summary['data']}, {_counted(summary['prompts'], 'problem')}, {_counted(n, 'sample')} each",
        "sampled": _sampled(summary),
        f"avg@{n}": f"{_percent(summary['accuracy'])}{_error(summary)}",
        "tokens": _lengths(summary),
        "of right": f"{_counted(summary['right']['count'], 'sample')}: {_lengths(summary['right'])}",
        "of wrong": f"{_counted(summary['wrong']['count'], 'sample')}: {_lengths(summary['wrong'])}",
        "cut off": f"{_percent(summary['truncated'])}; without a final answer {_percent(summary['without_answer'])}",
        "unanswered": f"{_causes(summary['unanswered'])}, by verifiers that declare this to be wrong",
        "too long": f"{_counted(summary['too_long'], 'problem')} left out {_some(summary['too_long_uids'])}",
        "took": f"{in_minutes(summary['seconds'])}, {summary['tokens_per_second']:,.0f} tokens/s",
    }
    if not summary["unanswered"]:
        del rows["unanswered"]
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, style="cyan"), Text(text))
    return table


def _error(summary: Mapping[str, Any]) -> str:
    if summary["prompts"] < FEWEST_FOR_ERROR:
        return ""
    return f" ± {_percent(summary['standard_error'])} (standard error)"


def _counted(count: int, noun: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _curves(summary: Mapping[str, Any]) -> Table:
    """pass@k and maj@k over k."""
    ks = [int(name.removeprefix("pass@")) for name in summary if name.startswith("pass@")]
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("k", style="cyan"), *(Text(str(k), justify="right") for k in ks))
    for name in ("pass@k", "maj@k"):
        values = [_percent(summary[name.replace("k", str(k))]) for k in ks]
        table.add_row(Text(name, style="cyan"), *(Text(value, justify="right") for value in values))
    return table


def _lengths(figures: Mapping[str, Any]) -> str:
    if "length_mean" not in figures:
        return "–"
    return "mean {length_mean:.1f}, p50 {length_p50:.0f}, p99 {length_p99:.0f}, longest {length_max:.0f}".format(
        **figures
    )


def _some(uids: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, uids[:most])) + (", …" if len(uids) > most else "")
    return f"(uid {shown})" if uids else ""


def _causes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
