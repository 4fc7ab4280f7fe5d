"""Memory that a process frees and takes again, step after step.

XLA's CPU backend takes memory for what lies between the inputs and the results of a program, and for the operands of
every product as it packs them, and frees it at once. The C library gives it back to the kernel, which clears every page
before it hands it out again, which takes a good part of a training step.
"""

import ctypes
import sys

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_TOP_PAD_BYTES = 1 << 28


def keep_freed() -> None:
    """From here on what this process frees stays with it: all that it held at once, and more where that lies in pieces.

    To be called before a backend starts its threads, each of which would have memory of its own. Asked of glibc; on
    other systems nothing changes.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    libc.mallopt(_ARENA_MAX, 1)
    libc.mallopt(_MMAP_MAX, 0)  # nor does a large block get a map of its own
    libc.mallopt(_TRIM_THRESHOLD, -1)
    libc.mallopt(_TOP_PAD, _TOP_PAD_BYTES)
