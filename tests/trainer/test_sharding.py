"""A trainer on eight devices is the trainer on one: the same losses, nothing held twice, nothing large sent around."""

import collections
import dataclasses
import math
import pathlib
import re

import jax
import numpy as np
import optax
import pytest

from areal_jax.config import OptimizerConfig
from areal_jax.models import sharding, transformer
from areal_jax.models.huggingface import load_config
from areal_jax.trainer import state, step

SHAPE = pathlib.Path(__file__).parents[2] / "configs" / "shapes" / "qwen2.5-1.5b-instruct.json"

# Sizes that tell one array from the other: only the vocabulary brings the factor 13, only the feed-forward the 3.
MODEL = transformer.TransformerConfig(vocab_size=104, d_model=16, layers=1, heads=8, kv_heads=4, head_size=4, d_ff=48)
WITH_MORE = dataclasses.replace(MODEL, qk_norm=True, qkv_bias=True)
MESHES = [(2, 2, 2), (1, 8, 1), (8, 1, 1), (1, 2, 4)]  # data, fsdp, tensor
ROWS, LENGTH = 8, 32
UPDATES = 10

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def model_params():
    return {name: np.asarray(value) for name, value in transformer.init_params(MODEL, jax.random.key(0)).items()}


@pytest.fixture(scope="module")
def minibatches(make_trajectories, make_minibatch):
    """Ten of one microbatch each; the behaviour policy is the proximal one, so that losses move with the weights."""
    made = [make_minibatch(make_trajectories(20, seed=i % 4), LENGTH, ROWS * LENGTH, shards=8) for i in range(UPDATES)]
    assert {len(minibatch.batches) for minibatch in made} == {1}
    return step.with_behav_as_prox(made)


@pytest.fixture(scope="module")
def programs_on(make_programs):
    return lambda mesh, model=MODEL: make_programs(mesh, model=model, lr=3e-3)


def trained(programs, params, minibatches):
    """Loss, entropy (both per token) and gradient norm of each update with Adam, and the state after the last."""
    places = state.copies(params, programs.abstract.params)
    current = state.initial_state(places, programs.abstract, programs.optimizer)
    made = []
    for minibatch in minibatches:
        current, outcome = step.update(programs, current, minibatch)
        (sums,) = outcome.sums
        numbers = sums["loss"] / sums["tokens"], sums["entropy"] / sums["tokens"], outcome.facts["grad_norm"]
        made.append(jax.device_get(numbers))  # one update in flight: eight devices share the threads of a few cores
    return np.array(made), current


@pytest.fixture(scope="module")
def on_one_device(programs_on, model_params, minibatches):
    made, _ = trained(programs_on((1, 1, 1)), model_params, minibatches)
    assert np.ptp(made[::4, 0]) > 1e-2  # the updates with the data of the first one
    return made


@pytest.mark.parametrize("mesh", MESHES)
def test_ten_updates_have_the_losses_of_one_device(mesh, programs_on, model_params, minibatches, on_one_device):
    programs = programs_on(mesh)
    got, after = trained(programs, model_params, minibatches)
    np.testing.assert_allclose(got[:, :2], on_one_device[:, :2], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[:, 2], on_one_device[:, 2], rtol=1e-4)
    for array, leaf in zip(jax.tree.leaves(after), jax.tree.leaves(programs.abstract), strict=True):
        assert array.sharding == leaf.sharding


KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast|ragged-all-to-all"


def collectives(compiled):
    """Kind -> how often each size (numbers that a device receives) is sent while the program runs once."""
    computations, name = collections.defaultdict(list), ""
    for line in compiled.as_text().splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = "ENTRY" if line.startswith("ENTRY") else match[1]
        computations[name].append(line)

    found = collections.defaultdict(collections.Counter)

    def walk(name, times):
        for line in computations[name]:
            if match := re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line):
                assert math.isfinite(times), f"in a loop whose length depends on the data: {line}"
                for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                    found[match[2]][math.prod(int(n) for n in shape.split(",") if n)] += times
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            often = math.inf if " while(" in line else 1  # attention's loop over keys has no length of its own
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.-]+)", line):
                walk(called, times * (int(trips[1]) if trips else often))

    walk("ENTRY", 1)
    return found


def gradient_sizes(mesh, model=MODEL):
    """Numbers on a device of each parameter's gradient: before it is split over fsdp, and as it lies."""
    shapes = transformer.param_shapes(model)
    places = sharding.param_shardings(shapes, mesh)
    lying = {name: math.prod(place.shard_shape(shapes[name].shape)) for name, place in places.items()}
    split = {name: mesh.shape["fsdp"] if "fsdp" in place.spec else 1 for name, place in places.items()}
    return {name: lying[name] * split[name] for name in shapes}, lying


@pytest.mark.parametrize(("mesh", "model"), [*((mesh, MODEL) for mesh in MESHES), ((2, 2, 2), WITH_MORE)])
def test_weights_are_gathered_once_gradients_summed_once_and_tokens_stay_with_their_rows(mesh, model, programs_on):
    programs = programs_on(mesh, model)
    params, rows = programs.abstract.params, programs._abstract_rows((ROWS, LENGTH))
    number = jax.ShapeDtypeStruct((), np.float32)
    found = collectives(
        programs.accumulate.lower(params, params, rows, number, programs.with_own_prox(False)).compile()
    )

    whole, lying = gradient_sizes(programs.mesh, model)
    split = collections.Counter(whole[name] for name in whole if whole[name] != lying[name])
    assert found.pop("all-gather", collections.Counter()) == split
    # Summed over fsdp before they are split, and then over data.
    most = collections.Counter(whole.values()) + collections.Counter(lying.values())
    most[1] += 8  # the sums over tokens
    if mesh[2] > 1:
        tokens = ROWS // programs.shards * LENGTH
        # What embedding, attention and feed-forward give; the gradients at what they, q, k, v, gate, up, head read.
        most[tokens * MODEL.d_model] += 9
        most[tokens] += 4  # a maximum and sums over the vocabulary
    assert found.pop("all-reduce") <= most
    assert not found


def test_the_proximal_pass_gathers_weights_once_and_an_export_sends_nothing(programs_on):
    programs = programs_on((1, 4, 2))
    params, rows = programs.abstract.params, programs._abstract_rows((ROWS, LENGTH))
    context = {name: rows[name] for name in step.CONTEXT}
    number = jax.ShapeDtypeStruct((), np.float32)
    found = collectives(programs.logprobs.lower(params, context, number).compile())
    whole, lying = gradient_sizes(programs.mesh)
    assert found.pop("all-gather") == collections.Counter(whole[name] for name in whole if whole[name] != lying[name])
    tokens = ROWS // programs.shards * LENGTH
    # What embedding, attention and feed-forward give; a maximum and sums over the vocabulary.
    assert found.pop("all-reduce") <= collections.Counter({tokens * MODEL.d_model: 3, tokens: 4})
    assert not found
    assert not collectives(programs.export.lower(params).compile())


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_sends_single_numbers_only(mesh, programs_on):
    programs = programs_on(mesh)
    found = collectives(programs.apply.lower(programs.abstract, programs.abstract.params).compile())
    assert set(found) <= {"all-reduce"} and set(found["all-reduce"]) <= {1}


def test_fsdp_leaves_no_copy_of_weights_or_moments():
    """Qwen 2.5 of 1.5B parameters: only norms and biases are on every device."""
    mesh = sharding.make_mesh({"data": 1, "fsdp": 8, "tensor": 1})
    optimizer = state.make_optimizer(OptimizerConfig(), optax.constant_schedule(1e-5))
    leaves = jax.tree.leaves(state.abstract_state(load_config(SHAPE), optimizer, mesh))
    on_each = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) > 3 * 1.5e9
    assert 8 * on_each < 1.001 * sum(leaf.size for leaf in leaves)
