"""A tiny model, random trajectories and the programs of a trainer, for every test of this folder."""

import jax
import numpy as np
import pytest

from areal_jax import host_memory
from areal_jax.algorithms import packing
from areal_jax.config import OptimizerConfig
from areal_jax.models import sharding, transformer
from areal_jax.trainer import state, step
from areal_jax.types import Trajectory

MODEL = transformer.TransformerConfig(
    vocab_size=32, d_model=16, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True
)


@pytest.fixture(scope="session")
def model_config():
    return MODEL


@pytest.fixture(scope="session")
def params():
    return {name: np.asarray(value) for name, value in transformer.init_params(MODEL, jax.random.key(0)).items()}


@pytest.fixture
def reserved(monkeypatch):
    """The sizes that `host_memory.reserve` is asked for, which are not set apart here."""
    sizes: list[int] = []
    monkeypatch.setattr(host_memory, "reserve", sizes.append)
    return sizes


@pytest.fixture(scope="session")
def state_bytes(params):
    """Of params, two moments, and the counters of the optimizer and its schedule, whole on every device."""
    return jax.device_count() * (3 * sum(value.nbytes for value in params.values()) + 2 * 4)


def trajectory(rng, uid, sample, *, longest=12, versions=(0, 1), truncated=False):
    length = int(rng.integers(3, longest))
    return Trajectory(
        uid=uid,
        sample=sample,
        prompt_tokens=rng.integers(1, 32, int(rng.integers(2, 5))).astype(np.int32),
        tokens=rng.integers(1, 32, length).astype(np.int32),
        behav_logprobs=rng.normal(-3.5, 0.1, length).astype(np.float32),
        versions=np.sort(rng.integers(*versions, length)).astype(np.int32),
        reward=float(rng.choice([-5.0, 5.0])),
        truncated=truncated,
    )


@pytest.fixture(scope="session")
def make_trajectories():
    def make(count, *, seed=0, group_size=1, **options):
        rng = np.random.default_rng(seed)
        return [trajectory(rng, i // group_size, i % group_size, **options) for i in range(count)]

    return make


@pytest.fixture(scope="session")
def make_minibatch():
    """Packs with random advantages; `layout` is one row length, rows per microbatch follow from the budget."""

    def make(trajectories, length, token_budget, *, shards=1):
        advantages = np.array([np.sin(3 * t.uid + 1) for t in trajectories], np.float32)
        layout = packing.Layout((length,), token_budget, shards)
        return step.Minibatch.of(packing.pack(trajectories, advantages, layout, version=1, max_staleness=9))

    return make


@pytest.fixture(scope="session")
def make_programs():
    """Programs on the first devices of a mesh (data, fsdp, tensor); one set per distinct call."""
    made = {}

    def make(
        mesh=(1, 1, 1),
        *,
        objective=step.decoupled_objective,
        dtype="float32",
        export="float32",
        model=MODEL,
        remat="none",
        **optimizer,
    ):
        key = (mesh, objective, dtype, export, model, remat, tuple(optimizer.items()))
        if key not in made:
            config = OptimizerConfig(**{"lr": 1e-2, "warmup_fraction": 0.0, **optimizer})
            devices = jax.devices()[: int(np.prod(mesh))]
            schedule = state.learning_rate(config, 100)
            made[key] = step.Programs(
                model,
                sharding.make_mesh(dict(zip(sharding.AXES, mesh, strict=True)), devices),
                state.make_optimizer(config, schedule),
                schedule,
                objective,
                {"temperature": np.float32(1.0), "clip_eps": np.float32(0.2)},
                compute_dtype=dtype,
                export_dtype=export,
                vocab_block=32,
                remat=remat,
            )
        return made[key]

    return make


@pytest.fixture
def fresh_state(params):
    """A new train state of the same params for some programs."""

    def make(programs):
        mine = state.copies(params, programs.abstract.params)
        return state.initial_state(mine, programs.abstract, programs.optimizer)

    return make
