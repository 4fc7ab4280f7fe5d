"""Every test sees eight fake CPU devices; compiled programs are kept in .cache/jax of the checkout between runs."""

import gc
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

import pytest

MOST_MAPS = 25_000  # after a module; one of them adds up to about 10,000
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "jax"

# Before the first import of jax, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
FLAGS = {
    "xla_force_host_platform_device_count": 8,
    # Eight devices on two cores wait for one another longer than the 40 s after which XLA would abort the process.
    "xla_cpu_collective_call_terminate_timeout_seconds": 300,
    "xla_cpu_collective_timeout_seconds": 300,
}
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}"


@pytest.fixture(scope="module", autouse=True)
def _forgotten_programs() -> Iterator[None]:
    """Frees compiled programs before they are too many for one process, and hides the others from the collector.

    Each takes maps of memory, of which Linux gives a process 65,530; then jaxlib ends in a segmentation fault. And of
    what JAX keeps of them there are millions of Python objects, which every full collection would look at again: after
    some hundred tests a picture took thirty times as long to draw.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and len(maps.read_text().splitlines()) > MOST_MAPS:
        sys.modules["jax"].clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """For programs that hardly run: half the time of compiling goes when LLVM optimises little. XLA's passes stay.

    Programs made under it are not bit for bit those of other tests.
    """
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def unused_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
