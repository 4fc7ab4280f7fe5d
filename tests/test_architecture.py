"""Imports go strictly down the floors, siblings never import one another, and some packages stay behind fences."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "areal_jax"
FLOORS = {
    "addresses": 1, "config": 1, "host_memory": 1, "types": 1, "metrics": 1, "telemetry": 1,
    "config_rules": 2, "tokenizer": 2, "gym_tasks": 2, "hub": 2, "compilation": 2, "profiling": 2, "distributed": 2,
    "room": 2,
    "algorithms": 2, "models": 2,
    "trainer": 3, "generation": 3, "rollout": 3, "rewards": 3, "transport": 3, "trajectory_queue": 3, "weights": 3,
    "launch": 4,
    "main": 5, "evaluate": 5, "export": 5,
}  # fmt: skip
SKINS = {"transport": {"trajectory_queue", "weights"}}  # gRPC as a skin over these two; no other sibling is imported
FENCES = {  # package: the only places that import it
    "grpc": ("transport/",),
    "jetstream": ("generation/", "transport/"),
    "aiohttp": ("transport/",),
    "prometheus_client": ("transport/",),
    "third_party": ("generation/",),
    "optax": ("trainer/",),
    "orbax": ("trainer/checkpoint.py", "weights.py"),
    "jax": (
        "algorithms/",
        "models/",
        "trainer/",
        "generation/",
        "launch/",
        "compilation.py",
        "profiling.py",
        "distributed.py",
        "room.py",
    ),
    "flax": ("models/", "trainer/", "generation/"),
    "sympy": ("rewards/symbolic.py",),
    "math_verify": ("rewards/symbolic.py",),
    "latex2sympy2_extended": ("rewards/symbolic.py",),
}
WITHOUT_JAX = (
    "main", "evaluate", "launch.roles", "rollout.controller", "rewards.pool", "transport.clients", "transport.servers",
    "transport.http_server",
)  # fmt: skip


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def unit(name: str) -> str:
    """The part of the package that a file or a dotted name belongs to: `rollout/gate.py` -> `rollout`."""
    return name.replace("/", ".").removeprefix("areal_jax.").removesuffix(".py").split(".")[0]


@pytest.mark.parametrize("file", [file for file in files() if file != "__init__.py"])
def test_imports_go_strictly_down(file):
    own = unit(file)
    others = {unit(name) for name in imports(PACKAGE / file) if name.startswith("areal_jax.")}
    wrong = {name for name in others - {own} - SKINS.get(own, set()) if FLOORS[name] >= FLOORS[own]}
    assert not wrong, f"{own}, on floor {FLOORS[own]}, imports {wrong}"


@pytest.mark.parametrize("package", FENCES)
def test_a_fenced_package_is_imported_only_where_it_belongs(package):
    users = {file for file in files() if any(name.split(".")[0] == package for name in imports(PACKAGE / file))}
    assert users and not {file for file in users if not file.startswith(FENCES[package])}


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_a_process_without_an_accelerator_never_imports_jax(module):
    code = f"import sys, areal_jax.{module}; print(sorted({{'jax', 'flax', 'tensorflow'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stderr
