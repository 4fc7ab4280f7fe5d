"""Freed memory stays with the process: counted in page faults, in a process of its own, as it cannot be undone."""

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


def page_faults(keep: bool) -> int:
    code = STEPS.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are left as they are")
def test_a_step_takes_no_new_pages_for_what_the_one_before_freed():
    pages = 3 * (1 << 26) // 4096  # of 64 MiB in each of three steps
    assert page_faults(keep=False) > pages / 2
    assert page_faults(keep=True) < pages / 10
