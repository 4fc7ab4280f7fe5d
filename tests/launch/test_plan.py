import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax import config as config_lib
from areal_jax import weights
from areal_jax.algorithms.packing import make_layout
from areal_jax.config import build
from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.launch import plan
from areal_jax.launch.model_config import model_config
from areal_jax.models import sharding
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.trainer import lora, state, step

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "configs" / "arithmetic_model"
SHAPE = ROOT / "configs" / "shapes" / "qwen2.5-1.5b-instruct.json"
TINY = TransformerConfig(
    vocab_size=32, d_model=16, layers=2, heads=4, kv_heads=2, head_size=8, d_ff=32, qkv_bias=True, qk_norm=True
)

TABLES = {"d_model": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "d_ff": 256, "vocab_size": 8192}  # they weigh most
SHORT = {"d_model": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "d_ff": 256}


def a_config(**sections):
    """A config of short sequences; `trainer={...}` and so on differ from it."""
    base = {
        "model": {"path": str(MODEL)},
        "data": {"max_prompt_tokens": 24},
        "rollout": {"max_new_tokens": 40},
        "trainer": {"token_budget": 512, "vocab_block": 64},
        "generation": {"slots": 6},
    }
    return build({name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


def estimated_bytes(config, model):
    """What the plan estimates of the trainer's program."""
    planned = plan.trainer_bytes(config, model, plan.abstract_mesh(config, 0))
    return sum(size for name, size in planned.items() if name in plan.ESTIMATED)


def bytes_on(device, tree):
    """Bytes that the arrays of a tree hold on one device."""
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize(
    ("mesh", "moment_dtype"),
    [((1, 1, 1), "float32"), ((2, 2, 2), "float32"), ((1, 8, 1), "bfloat16")],
)
def test_weights_moments_and_gradients_are_those_of_a_real_train_state(mesh, moment_dtype):
    trainer = {"mesh": dict(zip(sharding.AXES, mesh, strict=True)), "optimizer": {"moment_dtype": moment_dtype}}
    config = a_config(trainer=trainer | {"token_budget": 512})
    devices = jax.devices()[: int(np.prod(mesh))]
    real_mesh = sharding.make_mesh(dataclasses.asdict(config.trainer.mesh), devices)
    optimizer = state.make_optimizer(config.trainer.optimizer, state.learning_rate(config.trainer.optimizer, 10))
    real = state.random_state(TINY, state.abstract_state(TINY, optimizer, real_mesh), optimizer, seed=0)
    planned = plan.trainer_bytes(config, TINY, plan.abstract_mesh(config, 0))
    assert planned["weights"] == planned["gradients"] == bytes_on(devices[0], real.params)
    assert planned["optimizer moments"] == bytes_on(devices[-1], real.opt_state)


def bytes_to_be(tree):
    """Bytes that the arrays of an abstract tree will hold on each device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize(
    "section", [{"lora": {"rank": 3}}, {"freeze": ("embedding", ".*bias")}], ids=["adapters", "frozen"]
)
def test_only_what_trains_has_moments_and_gradients_in_the_plan(section):
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    config = a_config(model={"path": str(MODEL), **section}, trainer={"mesh": mesh, "token_budget": 512})
    optimizer = state.make_optimizer(config.trainer.optimizer, state.learning_rate(config.trainer.optimizer, 10))
    trainable = lora.trainable(TINY, config.model)
    real = state.abstract_state(TINY, optimizer, sharding.make_mesh(mesh), trainable)
    planned = plan.trainer_bytes(config, TINY, plan.abstract_mesh(config, 0))
    assert planned["weights"] == bytes_to_be(real.params)
    assert planned["optimizer moments"] == bytes_to_be(real.opt_state)
    trained = bytes_to_be(trainable.trained(real.params))
    assert planned["gradients"] == planned["gradients of a microbatch"] == trained < planned["weights"]
    assert planned["copy to publish"] == bytes_to_be(trainable.of_model(real.params))
    adapted = bytes_to_be({name: real.params[name] for name in trainable.adapted})
    assert planned["weights as computed with"] == adapted


def test_the_plan_says_what_trains():
    # Two layers of 5 kernels between widths 16 and 32 and 2 between 16 and 16: 2 * 3 * (5 * 48 + 2 * 32)
    text = plan._trained_text(a_config(model={"path": str(MODEL), "lora": {"rank": 3}}), TINY)
    assert text.startswith("; 1,824 train (adapters of rank 3 on 14 kernels)")
    assert plan._trained_text(a_config(), TINY) == ""
    frozen = a_config(model={"path": str(MODEL), "freeze": ("layers.*", "norm.scale")})
    assert plan._trained_text(frozen, TINY).startswith("; 1,024 train (the rest)")  # embedding and head, 32 x 16 each


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_slots_and_weights_are_those_of_a_real_generation_engine(dtype):
    config = a_config(generation={"slots": 6, "dtype": dtype, "length_buckets": (32, 96)})
    settings = config.generation
    options = EngineOptions(
        slots=6, max_length=config.cache_length, length_buckets=settings.length_buckets, dtype=settings.dtype
    )
    engine = Engine(TINY, options)
    real = engine.init_decode_state()
    held = engine.load(init_params(TINY, jax.random.key(0)), 0)
    planned = plan.generator_bytes(config, TINY)
    on_a_cpu = 2 if dtype == "bfloat16" else 1  # where numbers of bfloat16 are kept in the bytes of float32
    cache = on_a_cpu * planned["key/value cache"]
    assert cache == bytes_on(jax.devices()[0], real.cache)
    assert planned["tokens and state of the slots"] + cache == bytes_on(jax.devices()[0], real)
    assert planned["weights"] == planned["weights of the next version"] == bytes_on(jax.devices()[0], held.params)
    host = {name: np.asarray(array) for name, array in held.params.items()}
    assert plan.host_bytes(config, TINY)["one version of the weights"] == sum(a.nbytes for a in host.values())


def test_a_server_on_several_devices_is_planned_by_the_device():
    config = a_config(generation={"slots": 6, "length_buckets": (32, 96), "tensor": 2})
    engine = Engine(TINY, EngineOptions(slots=6, max_length=config.cache_length, length_buckets=(32, 96), tensor=2))
    planned = plan.generator_bytes(config, TINY)
    for device in jax.devices()[:2]:
        assert planned["key/value cache"] == bytes_on(device, engine.init_decode_state().cache)
        assert planned["weights"] == bytes_on(device, engine.load(init_params(TINY, jax.random.key(0)), 0).params)
    with pytest.raises(ValueError, match="generation.tensor=4 must divide the model's 2 key/value heads"):
        plan.generator_bytes(a_config(generation={"tensor": 4}), TINY)


def test_the_file_of_a_version_is_as_large_as_planned_but_for_its_header(tmp_path):
    params = {name: np.asarray(array) for name, array in init_params(TINY, jax.random.key(0)).items()}
    written = weights.write_weights(params, 1, tmp_path)
    with open(written.path, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert plan.host_bytes(a_config(), TINY)["one version of the weights"] == written.size - header


def test_shared_memory_never_holds_more_versions_than_planned(tmp_path):
    held = []
    send = weights.shared_memory_sender(tmp_path, lambda file: held.append(len(list(tmp_path.glob("weights-*")))))
    for version in range(5):
        send({"a": np.zeros(3, np.float32)}, version)
    assert max(held) == plan.VERSIONS_ON_HOST


@pytest.mark.parametrize(
    ("shape", "max_length", "rows", "remat", "mesh"),
    [
        (SHORT, 64, 16, "none", (1, 1)),  # feed-forward dominates
        (SHORT, 512, 1, "none", (1, 1)),
        ({"d_model": 128, "heads": 2, "kv_heads": 2, "head_size": 32, "d_ff": 512}, 128, 4, "none", (1, 1)),
        (SHORT, 4096, 1, "none", (1, 1)),
        (SHORT, 512, 1, "layers", (1, 1)),
        (SHORT, 64, 16, "dots", (1, 1)),
        (TABLES, 256, 4, "none", (1, 4)),
        (TABLES | {"tied_embeddings": True}, 256, 4, "none", (1, 4)),
        (TABLES | {"tied_embeddings": True}, 64, 8, "none", (4, 1)),
        (TABLES, 256, 4, "layers", (1, 4)),
    ],
)
def test_the_estimate_of_a_microbatch_is_within_a_factor_of_what_the_compiler_takes(
    shape, max_length, rows, remat, mesh
):
    data, fsdp = mesh
    model = TransformerConfig(**{"vocab_size": 512, "layers": 6, **shape})
    trainer = {"token_budget": rows * max_length, "row_buckets": (max_length,), "vocab_block": 64, "remat": remat}
    config = a_config(
        data={"max_prompt_tokens": 16},
        rollout={"max_new_tokens": max_length - 16},
        trainer=trainer | {"mesh": {"data": data, "fsdp": fsdp}},
    )
    schedule = state.learning_rate(config.trainer.optimizer, 10)
    programs = step.Programs(
        model,
        sharding.make_mesh({"data": data, "fsdp": fsdp, "tensor": 1}, jax.devices()[: data * fsdp]),
        state.make_optimizer(config.trainer.optimizer, schedule),
        schedule,
        step.decoupled_objective,
        {"temperature": np.float32(1.0), "clip_eps": np.float32(0.2)},
        compute_dtype="float32",
        export_dtype="float32",
        vocab_block=64,
        remat=remat,
    )
    layout = make_layout((max_length,), max_length=max_length, token_budget=rows * max_length, shards=data * fsdp)
    arguments = programs.abstract.params, programs._abstract_rows(layout.shapes[0])
    lowered = programs.accumulate.lower(
        arguments[0], arguments[0], arguments[1], jax.ShapeDtypeStruct((), np.float32), programs.with_own_prox(False)
    )
    taken = lowered.compile().memory_analysis().temp_size_in_bytes
    estimate = estimated_bytes(config, model)
    assert taken / 1.5 < estimate < taken * 1.5
    if remat != "none":
        kept = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, remat="none"))
        assert taken < 0.6 * estimated_bytes(kept, model)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"prefill_rows": 4}, (4, 512)),  # what a prefill was before it had a budget
        ({"prefill_rows": 4, "prefill_tokens": 1024}, (2, 512)),
        ({"prefill_rows": 4, "prefill_tokens": 100}, (1, 512)),
        ({"prefill_rows": 4, "prefill_tokens": 1000, "length_buckets": (500, 512)}, (2, 500)),  # not the longest
    ],
)
def test_the_estimate_of_a_prefill_is_within_a_factor_of_what_the_compiler_takes(settings, shape):
    model = TransformerConfig(vocab_size=128, layers=2, d_model=64, heads=4, kv_heads=2, head_size=16, d_ff=128)
    config = a_config(data={"max_prompt_tokens": 16}, rollout={"max_new_tokens": 496}, generation=settings)
    engine = Engine(model, EngineOptions(slots=1, max_length=512, length_buckets=config.generation.length_buckets))
    tokens = jax.ShapeDtypeStruct(shape, np.int32)
    taken = engine._prefill.lower(engine.places, tokens).compile().memory_analysis()
    planned = plan.generator_bytes(config, model)["prefill"]
    assert (taken.temp_size_in_bytes + taken.output_size_in_bytes) / 1.5 < planned
    assert planned < (taken.temp_size_in_bytes + taken.output_size_in_bytes) * 1.5


def test_a_server_without_double_buffer_is_planned_with_one_set_of_weights():
    two, one = (plan.generator_bytes(a_config(generation={"double_buffer": b}), TINY) for b in (True, False))
    assert sum(two.values()) - sum(one.values()) == two["weights"]
    assert "place of the old" in plan.report(a_config(generation={"double_buffer": False}))


def test_a_real_model_has_its_published_number_of_parameters():
    shapes = {path.stem: plan.load_config(path) for path in SHAPE.parent.iterdir()}
    assert {name: plan.count(model) for name, model in shapes.items()} == {
        "qwen2.5-1.5b-instruct": (1_543_714_304, 151936 * 1536),
        "deepseek-r1-distill-qwen-1.5b": (1_777_088_000, 2 * 151936 * 1536),
    }


def test_a_mesh_takes_the_devices_that_it_is_given():
    config = a_config(trainer={"mesh": {"data": -1, "fsdp": 2}})
    assert dict(plan.abstract_mesh(config, 8).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert dict(plan.abstract_mesh(config, 0).shape) == {"data": 1, "fsdp": 2, "tensor": 1}
    with pytest.raises(ValueError, match=r"--devices=3 do not fill .*=\(-1, 2, 1\).*--devices=2"):
        plan.abstract_mesh(config, 3)


def test_a_plan_finds_a_mesh_that_does_not_divide_the_model_or_the_budget():
    with pytest.raises(ValueError, match="mesh axis tensor=3 must divide"):
        plan.report(a_config(trainer={"mesh": {"tensor": 3}}))
    with pytest.raises(ValueError, match="set it to at least 1024"):
        plan.report(a_config(trainer={"token_budget": 512}), devices=16)


def test_a_model_that_is_not_here_is_planned_by_its_shape_and_without_one_not_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(plan.hub, "find_model", lambda path: None)
    assert "1,543,714,304 parameters" in plan.report(a_config(model={"path": "org/name", "shape": str(SHAPE)}))
    missing = plan.report(a_config(model={"path": "org/name"}))
    assert "model org/name: not on this machine" in missing and "GiB" not in missing


def test_a_model_that_disagrees_with_its_shape_is_refused_by_the_plan_and_by_the_run(tmp_path):
    content = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "same.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text(json.dumps(content | {"rms_norm_eps": 0.5}))
    plan.report(a_config(model={"path": str(MODEL), "shape": str(tmp_path / "same.json")}))
    for use in (plan.report, model_config):
        with pytest.raises(ValueError, match=r"has norm_eps=1e-0\d, where .*other.json says 0.5 \(1 such fields"):
            use(a_config(model={"path": str(MODEL), "shape": str(tmp_path / "other.json")}))


def test_dry_run_prints_the_config_for_machines_and_the_plan_for_people(tmp_path):
    command = [sys.executable, "-m", "areal_jax.main", "--config=configs/math.py", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert config_lib.build(json.loads(done.stdout)).run.name == "math"
    assert "117,248 parameters" in done.stderr and "key/value cache" in done.stderr


def test_a_plan_touches_no_device():
    code = (
        "import sys\nfrom areal_jax.config import build\nfrom areal_jax.launch import plan\n"
        "from jax._src import xla_bridge\n"
        "lengths = {'data': {'max_prompt_tokens': 64}, 'rollout': {'max_new_tokens': 64}}\n"
        "print(plan.report(build({'model': {'path': sys.argv[1]}, **lengths})))\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(MODEL)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
