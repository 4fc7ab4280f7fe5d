"""The reward pool: verdicts from processes that may hang, crash or be killed, with a deadline each.

In: the completions of one prompt. Out: one verdict each, or a `RewardError`. Called by the rollout controller (asyncio)
and from threads. Waits for its workers, never longer than the deadline per verdict and the start of a process.

A worker is a process of its own with a socket (`worker.py`), started once and used for the whole run. The completions
of a group travel in one message, verdicts come back one by one, so that the deadline is each verdict's own. A process
that hangs, crashes or uses up its memory is killed, and a spare one, whose imports are done, takes its place at once
while the next spare starts. A completion that was left unanswered so fails its group, as does one whose reward raises;
or it is wrong and the others are judged, when the reward function declares that (`declared.py`).

What a worker writes is not trusted, since whatever runs in it can write to its socket: a reply is one line of at most
`MOST_REPLY_BYTES`, complete by the deadline, and a verdict or an error of the known form; the replies to a request end
in its number, with nothing before or after them. Anything else fails the group, whatever the function declares, for the
verdicts before it are in doubt too, and the process is replaced. So no reply passes for the answer to another
completion; that a function which runs hostile code forges its own verdict cannot be seen from here.
"""

import asyncio
import collections
import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Literal

from areal_jax.rewards import sandbox as sandboxes

START_TIMEOUT_S = 120.0  # a worker's imports; sympy takes 2 s, a busy machine many times that
MOST_REPLY_BYTES = 2**16  # a verdict takes ten, an error at most `worker.MOST_ERROR_CHARACTERS`
MOST_PRINTED_BYTES = 2**16  # of what one process prints; the rest is left out of the log

log = logging.getLogger(__name__)


class RewardError(Exception):
    """A completion that could not be judged: the reward function raised."""

    cause = "reward_error"


class RewardUnanswered(RewardError):
    """The reward function did not return: its process ended."""

    cause = "reward_crash"


class RewardTimeout(RewardUnanswered):
    """The reward function did not return within reward.timeout_s."""

    cause = "reward_timeout"


class RewardMemory(RewardUnanswered):
    """The reward function wanted more memory than reward.memory_gb."""

    cause = "reward_memory"


class RewardUnsound(RewardUnanswered):
    """The process wrote what is no reply, or more replies than it was asked for."""


class RewardPool:
    """Calls `function` ("module:function", a `RewardFn`) in `workers` processes.

    Raises ValueError when the function cannot be imported, or when there can be no sandbox. Close it, or use it as a
    context manager. `unanswered` counts by cause the completions that are wrong because they were left unanswered.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int = 1,
        timeout_s: float = 5.0,
        memory_gb: float = 2.0,
        sandbox: Literal["limits", "bubblewrap"] = "limits",
    ) -> None:
        self.unanswered: collections.Counter[str] = collections.Counter()
        self._processes = _Processes(
            function, timeout_s, memory_gb, sandboxes.bubblewrap() if sandbox == "bubblewrap" else []
        )
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        try:
            for process in [self._processes.start() for _ in range(workers)]:  # all of them are starting already
                process.wait_ready()
                self._idle.put(process)
            self._processes.start_spare()
        except BaseException:
            self.close()
            raise

    async def score(self, completions: Sequence[str], *, answer: str, prompt: str) -> list[float]:
        """One verdict per completion, each between 0 and 1. Raises RewardError when one of them cannot be judged."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: self.score_now(completions, answer=answer, prompt=prompt)
        )

    def score_now(self, completions: Sequence[str], *, answer: str, prompt: str) -> list[float]:
        """The same for a thread that may wait."""
        verdicts: list[float] = []
        process = self._idle.get()
        try:
            while len(verdicts) < len(completions):
                try:
                    process.score(completions[len(verdicts) :], answer=answer, prompt=prompt, verdicts=verdicts)
                except RewardUnanswered as error:
                    process = self._processes.replace(process)
                    verdicts.append(self._left_unanswered(error, process.unanswered))
        finally:
            self._idle.put(process)
        return verdicts

    def _left_unanswered(self, error: RewardUnanswered, worth: str) -> float:
        """The verdict of wrong where the reward function declares that; raises the error where it does not."""
        if worth != "wrong" or isinstance(error, RewardUnsound):
            raise error
        self.unanswered[error.cause] += 1
        log.warning("%s; the completion counts as wrong (so far: %s)", error, dict(self.unanswered))
        return 0.0

    def close(self) -> None:
        """Kills the workers; what is being scored raises RewardError."""
        self._processes.close()
        self._threads.shutdown(cancel_futures=True)
        self._processes.end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Processes:
    """Starts processes, keeps one spare, and knows all that run, to end them."""

    def __init__(self, function: str, timeout_s: float, memory_gb: float, prefix: Sequence[str]) -> None:
        self._arguments = (function, timeout_s, memory_gb, prefix)
        self._lock = threading.Lock()  # of start against close
        self._closed = False
        self._running: set[_Process] = set()
        self._spare: _Process | None = None

    def start(self) -> "_Process":
        with self._lock:
            return self._start()

    def start_spare(self) -> None:
        self._spare = self.start()

    def replace(self, old: "_Process") -> "_Process":
        """The spare in place of a process that is done for. Raises RewardError when the pool is closed."""
        old.end()
        with self._lock:
            if self._closed or self._spare is None:
                raise RewardError("the reward pool was closed before all completions were judged")
            self._running.discard(old)
            new, self._spare = self._spare, self._start()
        new.wait_ready()
        return new

    def _start(self) -> "_Process":
        process = _Process(*self._arguments)
        self._running.add(process)
        return process

    def close(self) -> None:
        """Kills all; no new process is started."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def end(self) -> None:
        for process in self._running:
            process.end()


class _Process:
    """One worker process."""

    def __init__(self, function: str, timeout_s: float, memory_gb: float, prefix: Sequence[str]) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self.unanswered = "fail"
        self._socket, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), function, str(timeout_s), str(memory_gb)]
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "areal_jax.rewards.worker", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=sandboxes.environment(os.environ),
            )
        self._requests = 0
        self._unread = b""  # of a reply whose end has not arrived
        assert self._process.stdout is not None
        self._printing = threading.Thread(target=_print, args=(self._process.stdout,), daemon=True)
        self._printing.start()

    def wait_ready(self) -> None:
        """Waits until the process has imported the reward function. Raises ValueError when it cannot."""
        try:
            reply = _parsed(self._line(START_TIMEOUT_S))
        except ConnectionResetError:
            reply = {"error": "its process ended while importing it"}
        except TimeoutError:
            reply = {"error": f"importing it took more than {START_TIMEOUT_S:g} s"}
        except RewardUnsound as error:
            reply = {"error": f"its process {error} while importing it"}
        if reply not in _READY:
            raise ValueError(f"reward.function={self._function!r} cannot be used: {_error(reply)}")
        self.unanswered = reply["unanswered"]

    def score(self, completions: Sequence[str], *, answer: str, prompt: str, verdicts: list[float]) -> None:
        """Appends to `verdicts` one by one. After RewardUnanswered the process has to be replaced."""
        self._requests += 1
        request = json.dumps(
            {"number": self._requests, "completions": list(completions), "answer": answer, "prompt": prompt}
        )
        name = f"reward.function={self._function!r}"
        try:
            self._require_nothing_unread()
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(request.encode() + b"\n")
            for _ in completions:
                verdicts.append(self._reply(name))
            self._require_done()
        except RewardUnsound as error:
            raise RewardUnsound(f"the process of {name} {error}; it was killed") from error
        except TimeoutError as error:
            raise RewardTimeout(
                f"{name} did not return within reward.timeout_s={self._timeout_s:g}; its process was killed"
            ) from error
        except OSError as error:
            raise RewardUnanswered(f"the process of {name} ended: {error}") from error

    def _reply(self, name: str) -> float:
        line = self._line(self._timeout_s)
        reply = _parsed(line)
        if isinstance(reply, float) and 0.0 <= reply <= 1.0:
            return reply
        if not isinstance(reply, dict) or reply.keys() != {"error", "cause"} or reply["cause"] not in _CAUSES:
            raise RewardUnsound(f"wrote {line[:80]!r}, which is no verdict")
        if reply["cause"] == RewardMemory.cause:
            raise RewardMemory(
                f"{name} wanted more memory than reward.memory_gb={self._memory_gb:g}; its process was killed"
            )
        self._require_done()
        raise RewardError(f"{name} raised {reply['error']}")

    def _require_done(self) -> None:
        """Raises RewardUnsound when the replies do not end here: one of them was not the worker's."""
        try:
            line = self._line(self._timeout_s)
        except OSError:  # not RewardUnanswered: that would be one completion more than there are
            line = b""
        if line != b'{"done": %d}' % self._requests:
            raise RewardUnsound(f"wrote {line[:80]!r} where the replies to its request should end")
        self._require_nothing_unread()

    def _line(self, seconds: float) -> bytes:
        """The next reply. Raises TimeoutError when it is not complete in time, ConnectionResetError when none comes."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if len(self._unread) >= MOST_REPLY_BYTES:
                raise RewardUnsound(f"wrote {MOST_REPLY_BYTES} bytes without the end of a line")
            left = deadline - time.monotonic()
            if left <= 0.0:
                raise TimeoutError
            self._socket.settimeout(left)
            chunk = self._socket.recv(MOST_REPLY_BYTES - len(self._unread))
            if not chunk:
                self._process.kill()  # it has ended already, or has closed a socket that is not its own
                raise ConnectionResetError(f"exit status {self._process.wait()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _require_nothing_unread(self) -> None:
        """Raises RewardUnsound when there is a reply that nobody asked for: it would be taken for the next one."""
        self._socket.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            if self._unread or self._socket.recv(1, socket.MSG_PEEK):
                raise RewardUnsound("wrote more than the verdicts that it was asked for")

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kills the process and lets go of all that belongs to it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._printing.join(1.0)  # a process that a reward left behind may keep the pipe open


_READY: list[Any] = [{"ready": True, "unanswered": worth} for worth in ("fail", "wrong")]
_CAUSES = (RewardError.cause, RewardMemory.cause)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RewardUnsound(f"wrote {line[:80]!r}, which is no JSON") from error


def _error(reply: Any) -> str:
    if isinstance(reply, dict) and reply.keys() == {"error"}:
        return str(reply["error"])
    return f"its process wrote {str(reply)[:80]!r} while importing it"


def _print(printed: IO[bytes]) -> None:
    """Copies what a process prints to our own standard error, up to a limit."""
    with printed:
        left = MOST_PRINTED_BYTES
        while chunk := printed.read1():  # type: ignore[attr-defined]
            os.write(2, chunk[:left])
            left = max(0, left - len(chunk))
