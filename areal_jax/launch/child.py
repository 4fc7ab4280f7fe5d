"""What a part of a run is as a process: its cores, its signals, the parent that it must not outlive, the run's token.

In: the config, the environment. Called by the parts of a run; waits for nobody.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence

PARENT = "AREAL_JAX_PARENT"  # in a child's environment: the process it must not outlive
TOKEN = "AREAL_JAX_TOKEN"  # shared by all processes of a run that goes beyond loopback


def pin(cores: Sequence[int], role: str, index: int) -> None:
    """Keeps trainer and generation servers on the cores of `run.cores`. Call it before jax counts its cores.

    Raises ValueError when there are fewer cores than parts, OSError for a core that this machine does not have.
    """
    if not cores or role == "rollout":
        return
    place = 0 if role == "trainer" else 1 + index
    if place >= len(cores):
        raise ValueError(
            f"config.run.cores={tuple(cores)} names no core for {role} {index}; it needs one for the trainer and one "
            "for each of generation.addresses, in this order"
        )
    os.sched_setaffinity(0, {cores[place]})


def end_in_order(stop: threading.Event) -> None:
    """From here on SIGTERM and SIGINT set `stop`; before, they end the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def end_with_parent() -> None:
    """A child of a run ends when the process that started it is gone; whoever is no child goes on."""
    if parent := os.environ.get(PARENT):
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20.0)
    os._exit(1)  # whatever still holds this process: nobody is left to wait for it


def token() -> str:
    return os.environ.get(TOKEN, "")
