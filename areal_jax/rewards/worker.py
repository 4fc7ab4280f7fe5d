"""The process of the rewards: `python -m areal_jax.rewards.worker FD module:function TIMEOUT_S MEMORY_GB`.

In: one JSON object per line on a socket, {"number": ..., "completions": [...], "answer": ..., "prompt": ...}. Out: one
line of JSON per completion, as soon as it is judged: the verdict, or {"error": text, "cause": ...}, after which the
rest of that request is left out; then {"done": number}. The first line says {"ready": true, "unanswered": ...} (see
`declared.py`), or the error that keeps the function from being called. Started by `pool.py`, which it waits for; it
ends when its pool does, also in the middle of a reward that never returns.
"""

import importlib
import json
import math
import os
import pathlib
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from typing import IO, TYPE_CHECKING, Any

from areal_jax.rewards.declared import declaration

if TYPE_CHECKING:
    from areal_jax.types import RewardFn  # not at run time: numpy would take longer than all else here

MOST_FILE_BYTES = 2**20  # of a file that a reward writes
MOST_OPEN_FILES = 64
MOST_ERROR_CHARACTERS = 2000  # in JSON at most 12 bytes each, so that the line stays below the pool's limit


def main(fd: int, spec: str, timeout_s: float, memory_gb: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the pool ends its workers itself
    connection = socket.socket(fileno=fd)
    threading.Thread(target=_end_with_pool, args=(connection,), daemon=True).start()
    with connection.makefile("rb") as requests, connection.makefile("wb") as replies:
        module, _, name = spec.partition(":")
        remedy = "; give module:function of a function that takes completion, answer and prompt"
        try:
            function = getattr(importlib.import_module(module), name)
            declared = declaration(function)
            remedy = ""  # a function that was found says itself what it lacks
            declared.prepare()
        except Exception as error:  # whatever a user's module does while it is imported is told to the pool
            _send(replies, {"error": _describe(error) + remedy})
            return
        _limit(memory_gb)
        _send(replies, {"ready": True, "unanswered": declared.unanswered})
        for line in requests:
            request = json.loads(line)
            _serve(function, request, replies, timeout_s)
            _send(replies, {"done": request["number"]})


def _serve(function: "RewardFn", request: dict[str, Any], replies: IO[bytes], timeout_s: float) -> None:
    for completion in request["completions"]:
        _limit_cpu(timeout_s)
        try:
            verdict = float(function(completion=completion, answer=request["answer"], prompt=request["prompt"]))
            _check(verdict)
        except MemoryError:
            _send(replies, {"error": "MemoryError", "cause": "reward_memory"})
            return
        except (Exception, SystemExit) as error:  # the reward is others' code: its error goes to whoever asked
            _send(replies, {"error": _describe(error), "cause": "reward_error"})
            return
        _send(replies, verdict)


def _check(verdict: float) -> None:
    if not (math.isfinite(verdict) and 0.0 <= verdict <= 1.0):
        raise ValueError(f"the reward function returned {verdict}; a verdict lies between 0.0 (wrong) and 1.0 (right)")


def _limit(memory_gb: float) -> None:
    """Limits for good: memory beyond what the imports took, the size and number of files, no core dumps."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + int(memory_gb * 2**30)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _limit_cpu(timeout_s: float) -> None:
    """Has the kernel end a computation that outlives its deadline on all cores, even when no pool is left to do it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout_s * (os.cpu_count() or 1)) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _end_with_pool(connection: socket.socket) -> None:
    """Ends this process when the other end of the socket is gone: its pool was closed or killed."""
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is always reported
    poll.poll()
    os._exit(0)


def _describe(error: BaseException) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"[:MOST_ERROR_CHARACTERS]


def _send(stream: IO[bytes], reply: object) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
