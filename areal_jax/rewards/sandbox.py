"""How a worker process is started so that it can do little harm: its environment, and bubblewrap around it.

In: a command. Out: the command to start in its place, and the environment for it. Called by `pool.py`. Waits for one
short probe when a pool begins, nothing else.

Without bubblewrap ("limits") a worker has limits on memory, time, and files, and no secrets in its environment, but it
may read and write what its user may: enough for verifiers that only compute. With it ("bubblewrap") it sees a read-only
root without home directory, /run, and others' /tmp, has no network, sees no other process, and has no capabilities;
what it may write is a tmpfs of its own that dies with it.
"""

import functools
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

PASSED_ON = frozenset(
    ["PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED"]
)
SCRATCH_BYTES = 2**24  # of /tmp inside
NOBODY = "65534"
PROCESSES = 128  # threads included, for numpy starts one per core; holds only for a user who is not root, see below


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """What a worker gets of the environment: by name, since any other variable may hold a token or a key."""
    passed = {
        name: value
        for name, value in outer.items()
        if name in PASSED_ON or name.startswith("LC_") or name.endswith("_NUM_THREADS")
    }
    return {**passed, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def bubblewrap() -> list[str]:
    """The words before a command that put it into a sandbox. Raises ValueError where there can be none."""
    if shutil.which("bwrap") is None:
        raise ValueError(
            "reward.sandbox='bubblewrap' needs the program bwrap, which is not on the PATH; install it (apt-get "
            "install bubblewrap), or set reward.sandbox=limits for a reward that only computes"
        )
    return [*_as_nobody(), *_view()]


@functools.cache
def _as_nobody() -> tuple[str, ...]:
    """The words that leave root first, where that works; empty otherwise.

    The kernel does not count processes of real root, whatever its namespace says, so RLIMIT_NPROC would do nothing.
    Another user needs an interpreter and modules that it may read, which those under /root are not.
    """
    words = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")
    if os.geteuid() == 0 and shutil.which("setpriv") and not _probe(words):
        return words
    error = _probe(())
    if error:
        raise ValueError(
            f"reward.sandbox='bubblewrap': bwrap cannot start a sandbox here ({error}); allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0), or set "
            "reward.sandbox=limits for a reward that only computes"
        )
    return ()


def _probe(words: Sequence[str]) -> str:
    """What goes wrong when a worker's module is imported in the sandbox; empty for nothing."""
    command = [*words, *_view(), sys.executable, "-c", "import areal_jax.rewards.worker"]
    result = subprocess.run(command, env=environment(os.environ), capture_output=True, text=True)
    return (result.stderr.strip() or f"exit status {result.returncode}") if result.returncode else ""


def _view() -> list[str]:
    """bwrap and its options: all namespaces, no capabilities, and what is seen of the files."""
    words = ["bwrap", "--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL"]
    words += ["--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for hidden in ("/tmp", "/var/tmp", "/run", *_home()):
        if pathlib.Path(hidden).is_dir() and not pathlib.Path(hidden).is_symlink():
            words += ["--size", str(SCRATCH_BYTES), "--tmpfs", hidden]
    code = [sys.base_prefix, sys.prefix, *(path or os.getcwd() for path in sys.path)]
    for path in dict.fromkeys(str(pathlib.Path(path).absolute()) for path in code):
        words += ["--ro-bind-try", path, path]
    words += ["--chdir", "/tmp"]
    # Within the new user namespace, so that other sandboxes of the same user do not count.
    return [*words, "prlimit", f"--nproc={PROCESSES}"] if shutil.which("prlimit") else words


def _home() -> list[str]:
    """The home directory: tokens lie there (~/.netrc, ~/.ssh, ~/.cache/huggingface/token)."""
    home = str(pathlib.Path.home())
    return [] if home == "/" else [home]
