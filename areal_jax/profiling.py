"""JAX profiler traces of chosen training steps, for XProf and for TensorBoard's profile plugin (`pip install xprof`).

In: the steps of `profile.steps`, and calls that say which one a process is at. Out: a trace under the run's `profile/`,
a directory per process, as each may be traced once at a time. Called by the training loop, and beside each generation
server. Waits for the profiler to write what it found.
"""

import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import jax

log = logging.getLogger(__name__)

POLL_S = 0.02  # between two looks at which step the trainer is at, for those who are not the trainer


class Profile:
    """Traces the process while it is at one of `steps` (counted from 1; an empty range: never)."""

    def __init__(self, directory: pathlib.Path, steps: range):
        self._directory, self.steps = directory, steps
        self._began: float | None = None  # while a trace runs
        self._step: int | None = None
        self._annotation = contextlib.ExitStack()

    def at(self, step: int) -> None:
        """The process goes on with this step, or is still at it."""
        if step == self._step:
            return
        self._annotation.close()
        self._step = step
        if step not in self.steps:
            self._stop()
            return
        if self._began is None:
            self._start()
        self._annotation.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step))

    def close(self) -> None:
        """Ends the trace under way, if any."""
        self._annotation.close()
        self._stop()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow every call of Python; the loop names its own parts
        jax.profiler.start_trace(self._directory, profiler_options=options)
        self._began = time.monotonic()

    def _stop(self) -> None:
        if self._began is None:
            return
        seconds, self._began = time.monotonic() - self._began, None
        jax.profiler.stop_trace()
        log.info("a profile of %.1f s is in %s", seconds, self._directory)


@contextlib.contextmanager
def following(profile: Profile, step_now: Callable[[], int]) -> Iterator[None]:
    """Within it this process is traced, beside what it does, while `step_now` says one of the profile's steps."""
    ended = threading.Event()

    def follow() -> None:
        with contextlib.closing(profile):
            while profile.steps and not ended.wait(POLL_S):
                profile.at(step_now())

    thread = threading.Thread(target=follow, name="profile")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
