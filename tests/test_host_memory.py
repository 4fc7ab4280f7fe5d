"""Freed memory stays with the process: counted in page faults, in a process of its own, as it cannot be undone."""

import subprocess
import sys

import pytest

STEPS = """
import resource
import jax, jax.numpy as jnp
from areal_jax import host_memory

if {keep}:
    host_memory.keep_freed()
step = jax.jit(lambda x: jnp.sum(jnp.tanh(x @ x) @ x))
x = jnp.ones((2048, 2048))
for i in range(9):
    if i == 6:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keep: bool) -> int:
    code = STEPS.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are left as they are")
def test_a_step_takes_no_new_pages_for_what_the_one_before_freed():
    pages = 3 * 4 * 2048**2 // 4096  # of one matrix in each of three steps
    assert page_faults(keep=False) > pages
    assert page_faults(keep=True) < pages / 10
