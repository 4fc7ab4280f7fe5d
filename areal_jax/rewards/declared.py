"""What a reward function declares about itself to the pool that runs it.

In: a decorator on the function. Out: `declaration(function)`, read by the worker process. Called by reward modules and
`worker.py`. Waits for nobody.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _nothing() -> None:
    """A function without a declaration needs no preparation."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """`unanswered`: what a call is worth that ran out of its deadline or memory or ended its process.

    "fail" (a function that declares nothing): the group fails and is counted by cause, as for a reward that raises,
    since a hang may be the reward's own fault. "wrong": that completion is wrong (0.0), logged and counted; for
    verifiers of which it is known that only the completion's text can make them hang, so that a model cannot lose
    whole groups by writing such texts. A call that raises always fails its group.

    `prepare` is called once, in the worker, before its first verdict: slow imports.
    """

    unanswered: Literal["fail", "wrong"] = "fail"
    prepare: Callable[[], None] = _nothing


def declare(
    *, unanswered: Literal["fail", "wrong"] = "fail", prepare: Callable[[], None] = _nothing
) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        setattr(function, "declared", Declaration(unanswered, prepare))  # noqa: B010 (mypy knows no such attribute)
        return function

    return mark


def declaration(function: Callable[..., Any]) -> Declaration:
    return getattr(function, "declared", Declaration())
