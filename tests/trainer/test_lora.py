"""Frozen params and low-rank adapters, on every projection of the tiny model: s = alpha / rank = 6 / 2 = 3."""

import collections
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.algorithms import packing
from areal_jax.config import LoraConfig, ModelConfig, OptimizerConfig
from areal_jax.models import sharding, transformer
from areal_jax.trainer import loop, lora, state, step
from areal_jax.trainer.checkpoint import Checkpoints, SavedParams
from tests.trainer import test_loop, test_state

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LORA = ModelConfig(lora=LoraConfig(rank=2, alpha=6.0))
FREEZE = ModelConfig(freeze=("embedding", r".*norm\.scale", r"layers\.0\.feed_forward\..*"))
LENGTH, BUDGET = 32, 128  # four rows: one for each part that a mesh of (2, 2, 2) splits them into
KERNELS = {  # A B as an einsum and the shapes of both, written out: nothing here follows the rules of the code
    "attention.query": ("dr,rnh->dnh", (16, 2), (2, 4, 8)),
    "attention.key": ("dr,rkh->dkh", (16, 2), (2, 2, 8)),
    "attention.value": ("dr,rkh->dkh", (16, 2), (2, 2, 8)),
    "attention.out": ("nhr,rd->nhd", (4, 8, 2), (2, 16)),
    "feed_forward.gate": ("dr,rf->df", (16, 2), (2, 32)),
    "feed_forward.up": ("dr,rf->df", (16, 2), (2, 32)),
    "feed_forward.down": ("fr,rd->fd", (32, 2), (2, 16)),
}
ADAPTERS = {f"layers.0.{word}.lora_{side}" for word in KERNELS for side in "ab"}


def merged_by_hand(params, einsum=np.einsum):
    """The model's params with W + 3 A B in the place of each kernel."""
    model = {name: value for name, value in params.items() if name not in ADAPTERS}
    for word, (product, _, _) in KERNELS.items():
        stem = f"layers.0.{word}."
        change = einsum(product, params[stem + "lora_a"], params[stem + "lora_b"])
        model[stem + "kernel"] = params[stem + "kernel"] + 3.0 * change
    return model


def programs_for(model_config, section, mesh=(1, 1, 1), *, dtype="float32", remat="none"):
    config = OptimizerConfig(lr=1e-2, warmup_fraction=0.0, max_grad_norm=1e6)
    schedule = state.learning_rate(config, 100)
    return step.Programs(
        model_config,
        sharding.make_mesh(dict(zip(sharding.AXES, mesh, strict=True)), jax.devices()[: int(np.prod(mesh))]),
        state.make_optimizer(config, schedule),
        schedule,
        step.supervised_objective,
        {"temperature": np.float32(1.0)},
        compute_dtype=dtype,
        export_dtype="float32",
        vocab_block=24,  # the head's gradient, which XLA drops, has shapes of its own
        remat=remat,
        trainable=lora.trainable(model_config, section),
    )


@pytest.fixture(scope="module")
def adapted(model_config):
    return programs_for(model_config, LORA)


@pytest.fixture(scope="module")
def begin(params):
    """A new train state of version 0."""
    return lambda programs: programs.begin(lambda places: state.copies(params, places), seed=7)


@pytest.fixture
def some_adapters(params):
    """Params of a state in the middle of training: A and B are random."""
    rng, adapters = np.random.default_rng(1), {}
    for word, (_, *shapes) in KERNELS.items():
        for side, shape in zip("ab", shapes, strict=True):
            adapters[f"layers.0.{word}.lora_{side}"] = 0.1 * rng.normal(size=shape).astype(np.float32)
    return {**params, **adapters}


@pytest.fixture(scope="module")
def minibatch(make_trajectories, make_minibatch):
    return make_minibatch(make_trajectories(6), LENGTH, BUDGET)


def logprobs_of(programs, params, minibatch):
    rows = programs.put(minibatch.batches[0], step.CONTEXT)
    return np.asarray(programs.logprobs(params, rows, np.float32(1.0)))


def gradient(programs, params, minibatch):
    rows = programs.put(minibatch.batches[0], step.TRAINED)
    rows["prox_logprobs"] = rows["behav_logprobs"]
    inverse = np.float32(1 / packing.loss_tokens(minibatch.batches[:1]))
    return programs.accumulate(params, programs.zeros(), rows, inverse, programs.with_own_prox(False))[0]


def test_version_0_is_the_base_model(adapted, begin, params, minibatch, make_programs):
    first = begin(adapted)
    assert {name for name in first.params if name not in params} == ADAPTERS
    exported = adapted.export(first.params)
    assert exported.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(exported[name], value)
    base = make_programs(objective=step.supervised_objective)
    expected = logprobs_of(base, params, minibatch)
    np.testing.assert_allclose(logprobs_of(adapted, first.params, minibatch), expected, rtol=1e-6, atol=1e-6)


def test_a_begins_as_peft_begins_it_and_b_with_nothing(adapted, params):
    first, same, other = (adapted.trainable.with_adapters({}, adapted.abstract.params, seed) for seed in (7, 7, 8))
    for word, (_, shape_a, shape_b) in KERNELS.items():
        a, b = (np.asarray(first[f"layers.0.{word}.lora_{side}"]) for side in "ab")
        assert (a.shape, b.shape) == (shape_a, shape_b) and not b.any()
        bound = {16: 0.25, 32: 32**-0.5}[a.size // 2]  # 1 / sqrt(D), 1 / sqrt(N H), 1 / sqrt(F)
        assert 0.8 * bound < np.abs(a).max() <= bound and a.min() < 0 < a.max()
        np.testing.assert_array_equal(a, same[f"layers.0.{word}.lora_a"])
        assert not np.array_equal(a, other[f"layers.0.{word}.lora_a"])
    assert len({float(first[f"layers.0.feed_forward.{word}.lora_a"][0, 0]) for word in ("gate", "up")}) == 2


@pytest.fixture(scope="module")
def hand_written(model_config):
    """Slow twin: gradient of the cross-entropy of a microbatch in A and B, whole logits, autodiff of the merge."""

    @jax.jit
    @jax.grad
    def loss(adapters, params, tokens_RL, positions_RL, segment_ids_RL, loss_mask_RL):
        model = transformer.bind(transformer.graph(model_config), merged_by_hand(params | adapters, jnp.einsum))
        logp_RLV = jax.nn.log_softmax(model.logits(model(tokens_RL, positions_RL, segment_ids_RL)))
        logp_RL = jnp.take_along_axis(logp_RLV[:, :-1], tokens_RL[:, 1:, None], axis=2)[..., 0]
        return -jnp.sum(logp_RL * loss_mask_RL[:, 1:]) / jnp.sum(loss_mask_RL)

    def of(params, batch):
        adapters = {name: params[name] for name in ADAPTERS}
        return loss(adapters, params, batch.tokens, batch.positions, batch.segment_ids, batch.loss_mask)

    return of


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_the_gradient_of_a_and_b_is_that_of_the_merged_loss(
    mesh, adapted, some_adapters, hand_written, model_config, minibatch
):
    programs = adapted if mesh == (1, 1, 1) else programs_for(model_config, LORA, mesh)
    got = gradient(programs, state.copies(some_adapters, programs.abstract.params), minibatch)
    expected = hand_written(some_adapters, minibatch.batches[0])
    assert got.keys() == ADAPTERS
    for name, value in expected.items():
        assert np.abs(value).max() > 1e-3
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    out_a, query_b = (got[f"layers.0.attention.{name}"] for name in ("out.lora_a", "query.lora_b"))
    tensor, fsdp = mesh[2], mesh[1]
    assert out_a.addressable_shards[0].data.shape == (4 // tensor, 8, 2)
    assert query_b.addressable_shards[0].data.shape == (2, 4 // tensor, 8)
    assert got["layers.0.feed_forward.up.lora_a"].addressable_shards[0].data.shape == (16 // fsdp, 2)


def products(jaxpr):
    """The sorted shape of the result of each matrix product in a program and in the programs inside of it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(sorted(equation.outvars[0].aval.shape))
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from products(inner)


def trace_of_accumulate(programs):
    params, rows = programs.abstract.params, programs._abstract_rows((4, LENGTH - 4))  # tokens: no number of the model
    grads, number = programs.trainable.trained(params), jax.ShapeDtypeStruct((), np.float32)
    return programs.accumulate.trace(params, grads, rows, number, programs.with_own_prox(False))


def test_no_gradient_of_the_size_of_a_kernel_is_ever_computed(adapted):
    found = collections.Counter(products(trace_of_accumulate(adapted).jaxpr.jaxpr))
    # A B of gate, up and down; of query and out; of key and value. Autodiff of the merge has twice as many.
    assert (found[16, 32], found[4, 8, 16], found[2, 8, 16]) == (3, 2, 2)


@pytest.fixture(scope="module")
def moved(adapted, begin, minibatch):
    """The state after two updates."""
    moving, outcomes = begin(adapted), []
    for _ in range(2):
        moving, outcome = step.update(adapted, moving, minibatch)
        outcomes.append(outcome)
    assert all(float(outcome.facts["grad_norm"]) > 0 for outcome in outcomes)
    return moving


def test_updates_move_a_and_b_and_no_bit_of_the_base(moved, adapted, params):
    first = adapted.trainable.with_adapters(params, adapted.abstract.params, seed=7)
    for name, value in moved.params.items():
        assert np.array_equal(value, first[name]) == (name in params), name


def test_a_and_b_decay_as_the_kernels_that_they_change():
    names = ["layers.0.attention.query.lora_a", "layers.0.feed_forward.up.lora_b"]
    params = {name: jnp.full((2, 2), 4.0) for name in names}
    update = jax.jit(functools.partial(test_state.one_update, config=test_state.OPTIMIZER))
    moved = update(params, jax.tree.map(jnp.zeros_like, params))
    # No gradient: lr * decay * weight = 0.5 * 0.05 * 4 = 0.1 is taken off.
    assert [float(moved[name][0, 0]) for name in names] == pytest.approx([3.9, 3.9])


def held_by_moments(opt_state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state) if leaf.ndim)


def test_only_a_and_b_have_moments_and_gradients(moved, adapted):
    # 2 x 16 + 2 x 32 for five of the kernels, 2 x 16 + 2 x 16 for key and value; two moments of 4 bytes.
    numbers = 5 * 96 + 2 * 64
    assert held_by_moments(moved.opt_state) == 2 * 4 * numbers
    assert optax.tree.get(moved.opt_state, "mu").keys() == ADAPTERS
    assert sum(leaf.nbytes for leaf in adapted.zeros().values()) == 4 * numbers


def test_generators_get_the_merged_model_and_it_is_what_the_trainer_computes(moved, adapted, minibatch, make_programs):
    host = {name: np.asarray(value) for name, value in moved.params.items()}
    exported = adapted.export(moved.params)
    for name, value in merged_by_hand(host).items():
        np.testing.assert_allclose(exported[name], value, atol=1e-6, err_msg=name)
    assert not np.allclose(exported["layers.0.attention.out.kernel"], host["layers.0.attention.out.kernel"], atol=1e-3)
    plain = logprobs_of(make_programs(objective=step.supervised_objective), exported, minibatch)
    np.testing.assert_allclose(logprobs_of(adapted, moved.params, minibatch), plain, rtol=1e-6, atol=1e-6)


def test_frozen_params_stay_and_have_neither_gradient_nor_moments(begin, params, minibatch, model_config):
    programs = programs_for(model_config, FREEZE)
    moving = {f"layers.0.attention.{word}.kernel" for word in ("query", "key", "value", "out")} | {"head.kernel"}
    assert programs.zeros().keys() == moving
    moved, _ = step.update(programs, begin(programs), minibatch)
    for name, value in params.items():
        assert np.array_equal(moved.params[name], value) == (name not in moving), name
    # query and out 16 x 4 x 8, key and value 16 x 2 x 8, head 16 x 32; two moments of 4 bytes
    assert held_by_moments(moved.opt_state) == 2 * 4 * (2 * 512 + 2 * 256 + 512)


@pytest.mark.parametrize(
    ("kernels", "how", "off"),
    [
        ("auto", {"dtype": "bfloat16"}, 0.03),
        ("auto", {"remat": "layers"}, 1e-5),
        ("batch_invariant", {"remat": "dots"}, 1e-5),
    ],
)
def test_every_way_to_compute_gives_that_gradient(
    kernels, how, off, some_adapters, hand_written, model_config, minibatch
):
    programs = programs_for(dataclasses.replace(model_config, kernels=kernels), LORA, **how)
    got = gradient(programs, state.copies(some_adapters, programs.abstract.params), minibatch)
    for name, value in hand_written(some_adapters, minibatch.batches[0]).items():
        assert got[name].dtype == np.float32
        assert np.linalg.norm(got[name] - value) <= off * np.linalg.norm(value), name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            ModelConfig(freeze=("embeding",)),
            r"'embeding' matches none of the \d+ parameters; .* near it are embedding",
        ),
        (
            ModelConfig(freeze=("norm.scale", "attention_norm")),
            r"'attention_norm' matches none .* layers.0.attention_norm.scale \('\.\*attention_norm\.\*' would match",
        ),
        (
            ModelConfig(freeze=("embedding", "*norm")),
            r"'\*norm' is no regular expression: nothing to repeat.*norm.scale",
        ),
        (ModelConfig(freeze=(".*",)), r"freeze=\('\.\*',\) matches all \d+ parameters, so that nothing would train"),
        (
            ModelConfig(lora=LoraConfig(rank=1, targets=("up",)), freeze=(".*up.*",)),
            r"matches all 1 kernels of config.model.lora.targets=\('up',\), so that nothing would train",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(section, message, model_config):
    with pytest.raises(ValueError, match=message):
        lora.trainable(model_config, section)


def test_a_frozen_kernel_gets_no_adapter(model_config):
    section = ModelConfig(lora=LoraConfig(rank=4, alpha=2.0, targets=("query", "down")), freeze=(r"layers\.0\..*",))
    found = lora.trainable(dataclasses.replace(model_config, layers=2), section)
    assert found.adapted == ("layers.1.attention.query.kernel", "layers.1.feed_forward.down.kernel")
    assert (found.rank, found.scale) == (4, 0.5)
    assert lora.trainable(model_config, ModelConfig()) == lora.EVERYTHING


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_config, params, make_trajectories):
    """A run of two steps with adapters; it has the checkpoints of both."""
    config = test_loop.make_config(tmp_path_factory.mktemp("lora"), steps=2)
    run = test_loop.Run(dataclasses.replace(config, model=LORA), model_config, params)
    trajectories = make_trajectories(4 * test_loop.GROUP, group_size=test_loop.GROUP)
    for uid in range(4):
        run.queue.put([t for t in trajectories if t.uid == uid])
    assert run.train() == 2
    return run


def test_a_run_publishes_versions_of_the_whole_model(run, params):
    versions = run.publisher.published
    assert list(versions) == [0, 1, 2] and versions[2].keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(versions[0][name], value)
        changed = name.endswith("kernel") and name != "head.kernel"
        assert np.array_equal(versions[1][name], versions[2][name]) == (not changed), name


def test_a_checkpoint_is_read_merged_or_as_the_state_has_it(run, params):
    saved = SavedParams(run.config.run_dir / "checkpoints" / "2")
    assert set(saved) == params.keys() and len(saved) == len(params)
    state_params = {name: saved.read(name) for name in [*params, *ADAPTERS]}
    for name, value in merged_by_hand(state_params).items():
        np.testing.assert_allclose(saved[name], value, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(saved[name], run.publisher.published[2][name], atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(state_params[name], params[name])


def test_a_run_that_goes_on_computes_the_same_bits(run, tmp_path, model_config):
    shutil.copytree(run.config.run_dir, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    config = dataclasses.replace(run.config, run=dataclasses.replace(run.config.run, dir=str(tmp_path)))
    second = test_loop.Run(config, model_config, None)
    assert second.train() == 2 and second.opened_at == 1
    for name, value in run.publisher.published[2].items():
        np.testing.assert_array_equal(second.publisher.published[2][name], value)
    states = [SavedParams(directory / "checkpoints" / "2") for directory in (run.config.run_dir, tmp_path)]
    for name in ADAPTERS:
        np.testing.assert_array_equal(states[0].read(name), states[1].read(name))


def test_a_checkpoint_with_adapters_is_not_restored_without_them(run, model_config):
    without = loop.facts(dataclasses.replace(run.config, model=ModelConfig()), model_config, 0)
    assert "lora" not in without["run"] and "freeze" not in without["run"]
    checkpoints = Checkpoints(run.config.run_dir / "checkpoints", keep=2)
    with pytest.raises(ValueError, match="of another run: lora is {'rank': 2, 'alpha': 6.0.* there and None here"):
        checkpoints.restore(None, without)
    checkpoints.close()
