"""The reward pool: verdicts from processes that may hang, crash or be killed, with a deadline each.

In: the completions of one prompt. Out: one verdict each, or a `RewardError`. Called by the rollout controller (asyncio)
and from threads. Waits for its workers, never longer than the deadline per verdict.

A worker is a process of its own with a socket (`worker.py`), started once and used for the whole run. The completions
of a group travel in one message, verdicts come back one by one, so that the deadline is each verdict's own. A reward
that raises, hangs or kills its process costs its group, never the pool: a hung worker is killed and a new one started.
"""

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

START_TIMEOUT_S = 120.0  # a worker's imports; sympy takes 2 s, a busy machine many times that


class RewardError(Exception):
    """A completion that could not be judged: the reward function raised, or its process ended."""

    cause = "reward_error"


class RewardTimeout(RewardError):
    """The reward function did not return within reward.timeout_s."""

    cause = "reward_timeout"


class RewardPool:
    """Calls `function` ("module:function", a `RewardFn`) in `workers` processes.

    Raises ValueError when the function cannot be imported. Close it, or use it as a context manager.
    """

    def __init__(self, function: str, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        self._workers = [_Worker(function, timeout_s) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        try:
            for worker in self._workers:  # all of them are starting already
                worker.wait_ready()
                self._idle.put(worker)
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
        worker = self._idle.get()
        try:
            return worker.score(completions, answer=answer, prompt=prompt)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kills the workers; what is being scored raises RewardError."""
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Worker:
    """One process at a time, replaced when it has to be killed."""

    def __init__(self, function: str, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of start against close
        self._closed = False
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), self._function, str(self._timeout_s)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "areal_jax.rewards.worker", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints is for the log
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._socket = ours
        self._replies = ours.makefile("rb")

    def wait_ready(self) -> None:
        """Waits until the process has imported the reward function. Raises ValueError when it cannot."""
        self._socket.settimeout(START_TIMEOUT_S)
        try:
            reply = json.loads(self._replies.readline() or '{"error": "its process ended while importing it"}')
        except TimeoutError:
            reply = {"error": f"importing it took more than {START_TIMEOUT_S:g} s"}
        if "error" in reply:
            raise ValueError(
                f"reward.function={self._function!r} cannot be used: {reply['error']}; give module:function of a "
                "function that takes completion, answer and prompt"
            )
        self._socket.settimeout(self._timeout_s)

    def score(self, completions: Sequence[str], *, answer: str, prompt: str) -> list[float]:
        request = json.dumps({"completions": list(completions), "answer": answer, "prompt": prompt})
        try:
            self._socket.sendall(request.encode() + b"\n")
            replies = [self._reply() for _ in completions]
        except TimeoutError as error:
            self._replace()
            raise RewardTimeout(
                f"reward.function={self._function!r} did not return within reward.timeout_s={self._timeout_s:g}; its "
                "process was killed"
            ) from error
        except OSError as error:
            self._replace()
            raise RewardError(f"the process of reward.function={self._function!r} ended: {error}") from error
        return replies

    def _reply(self) -> float:
        line = self._replies.readline()
        if not line:
            self._process.kill()  # it has ended already, or has closed a socket that is not its own
            raise ConnectionResetError(f"exit status {self._process.wait()}")
        reply: Any = json.loads(line)
        if isinstance(reply, dict):
            raise RewardError(f"reward.function={self._function!r} raised {reply['error']}")
        return float(reply)

    def _replace(self) -> None:
        with self._lock:
            self.end()
            if self._closed:
                return
            self._start()
        self.wait_ready()

    def kill(self) -> None:
        """For good: no new process is started."""
        with self._lock:
            self._closed = True
            self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._replies.close()
        self._socket.close()
