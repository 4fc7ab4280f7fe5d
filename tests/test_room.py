"""What never has room is refused by its exact size; sharded arrays count where they lie."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from areal_jax import room
from areal_jax.config import TrainerConfig
from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.models import sharding
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.trainer import step

MODEL = TransformerConfig(vocab_size=32, d_model=16, layers=2, heads=4, kv_heads=2, head_size=8, d_ff=32)


def refused(arrays):
    with pytest.raises(ValueError, match=r"^they take") as error:
        room.check(arrays, what="they", remedy="take less")
    return str(error.value)


def test_devices_of_a_cpu_share_the_memory_of_the_host(monkeypatch):
    mesh = sharding.make_mesh({"data": 1, "fsdp": 4, "tensor": 1}, jax.devices()[:4])
    split, whole = (jax.NamedSharding(mesh, jax.P(axis)) for axis in ("fsdp", None))
    arrays = [jax.ShapeDtypeStruct((1 << 20,), np.float32, sharding=place) for place in (split, whole)]
    monkeypatch.setattr(room, "host_bytes", lambda: 5 * (1 << 22))  # 4 MiB once and 4 MiB on each of four
    room.check(arrays, what="they", remedy="take less")
    monkeypatch.setattr(room, "host_bytes", lambda: 5 * (1 << 22) - 1)
    assert refused(arrays) == "they take 0.02 GiB, and this host has 0.02 GiB; take less"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    id: int
    limit: int | None
    platform: str = "gpu"

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit}


def numbers_on(count, *devices):
    """An abstract float32 array of which each of the devices has all."""
    place = types.SimpleNamespace(addressable_devices=devices, shard_shape=lambda shape: shape)
    return types.SimpleNamespace(shape=(count,), dtype=np.dtype(np.float32), sharding=place)


def test_the_fullest_accelerator_decides():
    first, second = (Accelerator(number, 3 << 30) for number in (0, 1))
    fits = [numbers_on(1 << 29, first, second), numbers_on(1 << 28, second)]  # 2 GiB on each, 1 GiB on the second
    room.check(fits, what="they", remedy="take less")
    assert "they take 3.50 GiB, and device 1 has 3.00 GiB" in refused([*fits, numbers_on(1 << 27, second)])
    room.check([numbers_on(1 << 50, Accelerator(0, None))], what="they", remedy="take less")  # nobody knows


def test_a_container_has_what_it_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr(room, "CONTROL_GROUP", tmp_path / "memory.max")
    whole = room.host_bytes()
    assert whole > 1 << 28
    for text, has in (("max\n", whole), ("123456789\n", 123456789), (f"{1 << 62}\n", whole)):
        (tmp_path / "memory.max").write_text(text)
        assert room.host_bytes() == has


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_says_what_it_will_hold(dtype):
    engine = Engine(MODEL, EngineOptions(slots=3, max_length=24, dtype=dtype, tensor=2))
    expected = engine.load(init_params(MODEL, jax.random.key(0)), 0).params, engine.init_decode_state()
    assert jax.tree.structure(engine.held) == jax.tree.structure(expected)
    for leaf, array in zip(jax.tree.leaves(engine.held), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
        assert leaf.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_a_trainer_without_room_is_refused_before_it_loads(monkeypatch):
    numbers = sum(leaf.size for leaf in jax.tree.leaves(step.transformer.param_shapes(MODEL)))
    build = lambda trainer: step.build_programs(  # noqa: E731
        MODEL, trainer, step.supervised_objective, updates=1, temperature=1.0, export_dtype="float32"
    )
    whole_on_each = TrainerConfig(mesh=dataclasses.replace(TrainerConfig().mesh, data=8))
    state = 16 * numbers  # weights, gradients, two moments; and counters
    monkeypatch.setattr(room, "host_bytes", lambda: 8 * (state + 64))
    build(whole_on_each)
    monkeypatch.setattr(room, "host_bytes", lambda: 8 * state)
    with pytest.raises(ValueError, match="the trainer's weights, gradients and optimizer state take .*mesh.fsdp"):
        build(whole_on_each)
