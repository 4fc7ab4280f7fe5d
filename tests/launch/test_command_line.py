"""How errors that end a command are told."""

import jax
import pytest

from areal_jax.launch import command_line


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 74.5 GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nand how"),
    ],
)
def test_want_of_memory_is_told_with_the_remedy_beside_the_traceback(error, capsys):
    with pytest.raises(SystemExit) as ended, command_line.plain_errors():
        raise error
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and lines[0].startswith("Traceback")
    first = str(error).splitlines()[0].rstrip(".")
    assert lines[-1].startswith(f"error: out of memory: {first}. The same command with --dry_run shows what takes how")


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="ours"), command_line.plain_errors():
        raise RuntimeError("ours")
