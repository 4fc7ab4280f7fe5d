"""gpu_check as a whole on a tiny model, without a GPU; bench_trainer with the flags that the script gives it."""

import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys

import jax.numpy as jnp
import pytest
from absl.testing import flagsaver

from areal_jax.models import attention
from experiments import gpu_check

SCRIPT = pathlib.Path(gpu_check.__file__).with_suffix(".sh")
TINY = dataclasses.replace(gpu_check.MODEL, vocab_size=64, d_model=32, layers=1, heads=4, head_size=16, d_ff=32)
SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 32,
}


pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def trainer_results(tmp_path_factory):
    """results.json of the script's own call of bench_trainer, with a smaller model, row and list of parts."""
    out = tmp_path_factory.mktemp("bench_trainer")
    shape = out / "tiny.json"
    shape.write_text(json.dumps(SHAPE))
    lines = SCRIPT.read_text().replace("\\\n", "").splitlines()
    (call,) = (shlex.split(line)[1:] for line in lines if line.startswith("logged bench_trainer"))
    smaller = [f"--model={shape}", "--rows=64", "--parts=lengths,prox", "--seconds=0"]
    command = [sys.executable, "-m", f"experiments.{call[0]}", f"--out={out}", *call[1:], *smaller]
    quickly = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    subprocess.run(command, check=True, cwd=SCRIPT.parents[1], env=quickly)
    return out / "results.json"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(gpu_check, "MODEL", TINY)


def run(out, bench="", trainer=""):
    """The exit status and the lines of DIR/results.json by what they say, of `main` by its flags."""
    given = {"out": str(out), "length": "64", "bench": str(bench), "trainer": str(trainer)}
    with flagsaver.as_parsed(**given), pytest.raises(SystemExit) as end:
        gpu_check.main([])
    lines = [gpu_check.Line(**line) for line in json.loads((out / "results.json").read_text())]
    return int(end.value.code), {line.check: line for line in lines}


def test_the_script_is_a_script():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


def test_one_table_has_all_that_was_checked_and_measured(tiny, trainer_results, tmp_path, capsys):
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"machine": {}, "default": {"vs_static": 2.004, "swap": {}, "over_bound": {"8": 1.5}}}))
    status, lines = run(tmp_path, bench, trainer_results)
    printed = capsys.readouterr().out.splitlines()
    assert status == 0 and len(printed) == 1 + len(lines)
    for form in ("causal", "packed", "packed gradient", "decode"):
        assert lines[f"attention, {form}"].found == "plain (there is none for this backend)"
    assert lines["swap, float32: error of log-probabilities"].allowed == "1e-05"
    assert float(lines["swap, float32: error of log-probabilities"].found) < 1e-5
    assert lines["generation, default: vs_static"].found == "2.0"
    assert lines["generation, default: over_bound"].found == '{"8": 1.5}'
    rows = "trainer, tiny, bfloat16, rows of 64"
    assert lines[f"{rows}: tokens/s"].found.endswith(", remat=none")
    assert lines[f"{rows}: utilisation"].found.startswith("peak not known, ")
    assert "GB at most, planned 0.00 GB" in lines[f"{rows}: memory"].found
    calls = [lines[f"trainer, tiny, {n} minibatch(es): proximal pass"] for n in (1, 2, 4)]
    assert [line.found.split(",")[0] for line in calls] == ["0 calls", "2 calls", "3 calls"]


def test_a_check_that_fails_is_the_exit_status(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "attention_lines", lambda length: [])
    monkeypatch.setattr(gpu_check, "swap", lambda model, length, dtype: (1.1e-5, 1.0))
    status, lines = run(tmp_path)
    assert status == 1
    assert [line.check for line in lines.values() if not line.passed] == ["swap, float32: error of log-probabilities"]
    assert capsys.readouterr().out.count("FAILED") == 1


def test_a_kernel_that_is_wrong_fails(tiny):
    wrong = attention.Kernel("wrong", lambda query, key: "", lambda query, key, value: jnp.zeros_like(query))
    kernels = attention.Kernels(causal=wrong)
    program, arguments = gpu_check.attention_programs(64, kernels.cache)["causal"]
    name, error, _ = gpu_check._compared("causal", wrong, program, arguments, kernels)
    assert name.found == "wrong" and not error.passed
    assert "FAILED" in gpu_check.table([error])


def test_passes_that_are_too_many_fail():
    of = {"calls": 4, "calls_of_whole_pass": 4, "over_updates": 0.3, "own_difference": 0.0, "pass_difference": 0.0}
    (line,) = gpu_check.trainer_lines({"tiny": {"dtype": "float32", "prox": {"2": of}}})
    assert line.found == "4 calls, 0.300 of the updates' time, first bit-equal, others bit-equal"
    assert line.allowed == "2" and not line.passed
