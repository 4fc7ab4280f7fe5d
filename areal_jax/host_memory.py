"""Memory that a process frees and takes again, step after step.

XLA's CPU backend takes memory for what lies between the inputs and the results of a program, and for the operands of
every product as it packs them, and frees it at once. The C library gives it back to the kernel, which clears every page
before it hands it out again, which takes a good part of a training step. And what is kept must fit in again: a heap in
which a block of gigabytes finds no place for want of bytes grows by gigabytes, at worst in every step.

All of it is asked of glibc; on other systems nothing changes.
"""

import ctypes
import os
import sys
import threading

# Of glibc's malloc.h.
_MAX_FAST, _TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = 1, -1, -2, -4, -8
_TOP_PAD_BYTES = 1 << 28
_SMALLEST = 16  # bytes of a block
_TUNABLES, _SMALL_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count"


def start_training(*, in_turn: bool) -> None:
    """For a process that will train: starts its program once more where its environment lacks a setting.

    Then `keep_freed`, and more: it leaves out the C library's caches of small blocks, of which one can be left out only
    as a process starts. An aligned block is cut out of a slightly larger one; a cache would hold the rest, until it
    becomes part of something small that stays, so that the place that the block leaves is too small for the next one of
    its size. The process and its arguments stay the same. In a process that has threads, as a notebook has, the program
    is not all, and goes on. `in_turn` says that programs run in the thread that calls them (`step.run_in_turn`).
    """
    if _glibc() and _SMALL_CACHE not in os.environ.get(_TUNABLES, "") and threading.active_count() == 1:
        tunables = ":".join(filter(None, [os.environ.get(_TUNABLES), f"{_SMALL_CACHE}=0"]))
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _TUNABLES: tunables})
    keep_freed(in_turn=in_turn)
    if libc := _glibc():
        libc.mallopt(_MAX_FAST, 0)  # what is free joins what is free beside it at once


def keep_freed(*, in_turn: bool = False) -> None:
    """From here on what this process frees stays with it, for what it takes next.

    To be called before a backend starts its threads, each of which would have memory of its own, and what is large in
    it goes back to the kernel. Where programs run `in_turn` in the main thread, which has the heap, they may have it:
    what they take is small, and a compilation in several threads need not wait for one lock.
    """
    if libc := _glibc():
        if not in_turn:
            libc.mallopt(_ARENA_MAX, 1)
        libc.mallopt(_MMAP_MAX, 0)  # nor does a large block get a map of its own
        libc.mallopt(_TRIM_THRESHOLD, -1)
        libc.mallopt(_TOP_PAD, _TOP_PAD_BYTES)


def reserve(size: int) -> None:
    """Leaves a free block of `size` bytes, none of them used yet, below all that will be new at the heap's end.

    It is for all but the largest blocks of a process, as glibc takes the smallest free block that is large enough. The
    largest are then alone at the end, and find their place again. Without it one of them is freed, a far smaller one is
    taken out of its place, and stays, and there is no room for the next.
    """
    if libc := _glibc():
        libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
        block, above = libc.malloc(ctypes.c_size_t(size)), libc.malloc(ctypes.c_size_t(size))
        if above:
            libc.realloc(ctypes.c_void_p(above), ctypes.c_size_t(_SMALLEST))  # stays, so that the free block ends here
        libc.free(ctypes.c_void_p(block))


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None
