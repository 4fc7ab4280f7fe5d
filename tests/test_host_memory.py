"""What processes hold: pages counted in processes of their own, as what these ask for cannot be undone."""

import os
import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource
from areal_jax import host_memory

if {keep}:
    host_memory.keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for i in range(6):
    if i == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(1 << 26))  # more than the C library ever keeps by itself
    ctypes.memset(block, i, 1 << 26)
    libc.free(ctypes.c_void_p(block))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

CALLS = """
import contextlib, threading
import jax, jax.numpy as jnp
from areal_jax.config import Config
from areal_jax.launch import roles
from experiments import runs

def program(total, ones):
    products = jnp.tanh((total + ones) @ ones.T)  # as large as all else is small
    return total + 1e-9 * products @ ones

with roles.joined(Config(), None, threading.Event()) if {trainer} else contextlib.nullcontext():
    ones = jnp.ones((6000, 8))
    compiled = jax.jit(program).lower(ones, ones).compile()
    total, before = ones, runs.memory("VmSize")  # so large a block is a map of its own, and counts as it is taken
    for _ in range(10):
        total = compiled(total, ones)
    total.block_until_ready()
print((runs.memory("VmPeak") - before) / compiled.memory_analysis().temp_size_in_bytes)
"""


def page_faults(keep: bool) -> int:
    code = STEPS.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are left as they are")
def test_a_step_takes_no_new_pages_for_what_the_one_before_freed():
    pages = 3 * (1 << 26) // 4096  # of 64 MiB in each of three steps
    assert page_faults(keep=False) > pages / 2
    assert page_faults(keep=True) < pages / 10


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the most memory")
def test_a_trainer_holds_the_temporaries_of_one_program_at_a_time():
    assert 0.9 < temporaries(trainer=True) < 1.5
    assert temporaries(trainer=False) > 1.5  # dispatched ahead, which shows that the figure sees it


def temporaries(trainer: bool) -> float:
    """How many times those of a program are held at most, of ten that are dispatched without a wait."""
    code, environment = CALLS.format(trainer=trainer), os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)
