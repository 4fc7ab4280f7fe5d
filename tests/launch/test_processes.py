"""What a part of a run that ended badly is reported to have said."""

import subprocess
import sys

from areal_jax.launch.processes import Child


def test_the_error_of_an_earlier_start_is_not_told_again(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text("error: the first mistake, é\n")
    begin = log.stat().st_size
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    child = Child("trainer", process, log, begin)
    with log.open("a") as file:
        file.write("killed\n")
    assert child.complaint().startswith("the trainer process ended with status 3: killed\n")
    with log.open("a") as file:
        file.write("error: the second mistake\nbye\n")
    assert "status 3: the second mistake\n" in child.complaint()
