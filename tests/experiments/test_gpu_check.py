"""The parts of gpu_check that need no GPU: they run, and an error is seen."""

import dataclasses
import pathlib
import subprocess

import jax.numpy as jnp

from areal_jax.models import attention
from experiments import gpu_check

SCRIPT = pathlib.Path(gpu_check.__file__).with_suffix(".sh")
TINY = dataclasses.replace(gpu_check.MODEL, vocab_size=64, d_model=32, layers=1, heads=4, head_size=16, d_ff=32)


def test_the_script_is_a_script():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


def test_attention_is_compared_in_every_form_and_named(monkeypatch):
    monkeypatch.setattr(gpu_check, "MODEL", TINY)
    lines = gpu_check.attention_lines(64)
    assert [line.found for line in lines[::3]] == ["plain (there is none for this backend)"] * 4
    assert all(line.passed for line in lines)


def test_a_kernel_that_is_wrong_fails(monkeypatch):
    monkeypatch.setattr(gpu_check, "MODEL", TINY)
    wrong = attention.Kernel("wrong", lambda query, key: "", lambda query, key, value: jnp.zeros_like(query))
    kernels = attention.Kernels(causal=wrong)
    program, arguments = gpu_check.attention_programs(64, kernels.cache)["causal"]
    name, error, _ = gpu_check._compared("causal", wrong, program, arguments, kernels)
    assert name.found == "wrong" and not error.passed
    assert "FAILED" in gpu_check.table([error])


def test_a_swap_gives_the_log_probabilities_of_the_new_weights():
    error, milliseconds = gpu_check.swap(TINY, 64, "float32")
    assert error < 1e-5 and milliseconds > 0


def test_the_table_has_the_ratios_of_the_benchmark():
    results = {"default": {"vs_static": 2.0, "swap": {}, "over_bound": {"8": 1.5}}, "smollm2": {"vs_static": 3.0}}
    assert [line[:2] for line in gpu_check.bench_lines(results)] == [
        ("benchmark, default: vs_static", "2.0"),
        ("benchmark, default: over_bound", '{"8": 1.5}'),
        ("benchmark, smollm2: vs_static", "3.0"),
    ]
