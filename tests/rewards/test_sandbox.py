"""What a reward can do to the machine from inside of bubblewrap: nothing. Escapes are tried only in there."""

import os
import pathlib
import shutil
import socket
import time

import pytest

from areal_jax.rewards import sandbox
from areal_jax.rewards.pool import RewardError, RewardPool, RewardTimeout

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="no bubblewrap here (apt-get install bubblewrap)"
)

ESCAPES = """
import ctypes, os, pathlib, socket, subprocess, time

def attempt(*, completion, answer, prompt):
    '''1.0 when the attempt succeeds; the error is told by raising.'''
    if completion == "write":
        pathlib.Path(answer).write_text("escaped")
    elif completion == "read":
        return "secret" in pathlib.Path(answer).read_text()
    elif completion == "connect":
        socket.create_connection(("127.0.0.1", int(answer)), timeout=2).close()
    elif completion == "kill":
        os.kill(int(answer), 9)
    elif completion == "environment":
        return any(b"secret-value" in p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/environ"))
    elif completion == "processes":
        return len(list(pathlib.Path("/proc").glob("[0-9]*"))) > 5
    elif completion == "mount":
        if ctypes.CDLL(None, use_errno=True).mount(b"none", b"/mnt", b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), "mount")
    elif completion == "root":
        return os.geteuid() == 0
    elif completion == "child":
        subprocess.Popen(["sleep", answer], start_new_session=True)
        time.sleep(60)
    elif completion == "hang":
        time.sleep(60)
    return 1
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "escapes.py").write_text(ESCAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("AREAL_JAX_TOKEN", "secret-value")
        with RewardPool("escapes:attempt", timeout_s=3.0, sandbox="bubblewrap") as pool:
            yield pool


def attempt(pool, what, about=""):
    return pool.score_now([what], answer=str(about), prompt="") == [1.0]


@needs_bwrap
@pytest.mark.parametrize("place", ["package", "home", "root", "module", "shared memory"])
def test_no_file_is_written(pool, place):
    module = pathlib.Path(sandbox.environment(os.environ)["PYTHONPATH"].split(os.pathsep)[0])
    directory = {
        "package": pathlib.Path(sandbox.__file__).parent,
        "home": pathlib.Path.home(),
        "root": pathlib.Path("/"),
        "module": module,
        "shared memory": pathlib.Path("/dev/shm"),
    }[place]
    file = directory / "escaped"
    if place in ("home", "shared memory"):
        assert attempt(pool, "write", file)  # into a tmpfs that only it sees
    else:
        with pytest.raises(RewardError, match="Read-only file system|Permission denied"):
            attempt(pool, "write", file)
    assert not file.exists()


@needs_bwrap
def test_no_file_in_tmp_is_read(pool, tmp_path):
    (tmp_path / "file").write_text("secret")
    with pytest.raises(RewardError, match="No such file"):
        attempt(pool, "read", tmp_path / "file")


@needs_bwrap
def test_no_connection_is_made(pool):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(RewardError, match="ConnectionRefusedError"):
        attempt(pool, "connect", server.getsockname()[1])


@needs_bwrap
def test_no_process_outside_is_seen_or_killed(pool):
    with pytest.raises(RewardError, match="ProcessLookupError|PermissionError"):
        attempt(pool, "kill", os.getpid())
    assert not attempt(pool, "processes")


@needs_bwrap
def test_no_secret_is_found_in_any_environment(pool):
    assert not attempt(pool, "environment")


@needs_bwrap
def test_there_are_no_privileges(pool):
    assert not attempt(pool, "root")
    with pytest.raises(RewardError, match="mount"):
        attempt(pool, "mount")


@needs_bwrap
def test_what_a_killed_reward_leaves_behind_ends_with_it(pool):
    began = f"{time.time():.6f}"
    with pytest.raises(RewardTimeout):
        attempt(pool, "child", f"99{began}")
    deadline = time.monotonic() + 5
    while running(f"99{began}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(f"99{began}")
    assert attempt(pool, "")


def running(argument: str) -> bool:
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in file.read_bytes():
                return True
        except OSError:  # it has ended meanwhile
            continue
    return False


@needs_bwrap
def test_the_math_verifier_works_inside():
    with RewardPool("areal_jax.rewards.math_verdict:answers_match", timeout_s=10.0, sandbox="bubblewrap") as pool:
        assert pool.score_now([r"\boxed{x+x}", r"\boxed{x}"], answer="2x", prompt="") == [1.0, 0.0]


def test_without_bubblewrap_the_pool_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="needs the program bwrap.*apt-get install bubblewrap"):
        RewardPool("areal_jax.rewards.math_answer:last_number_matches", sandbox="bubblewrap")


def test_without_user_namespaces_the_pool_is_refused_with_the_remedy(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox._as_nobody.cache_clear()
    with pytest.raises(ValueError, match="cannot start a sandbox here .*No permissions.*allow user namespaces"):
        RewardPool("areal_jax.rewards.math_answer:last_number_matches", sandbox="bubblewrap")
    sandbox._as_nobody.cache_clear()
