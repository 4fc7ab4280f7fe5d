"""Bit for bit: a token's log-probability is the same in decoding, prefill and training, whatever is computed beside it.

Every comparison is made a second time without the mode, where it must fail: else it would show nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.generation.engine import Engine, EngineOptions, empty_requests
from areal_jax.models import attention, batch_invariant, sharding
from areal_jax.models.attention_kernels import kernels_for
from areal_jax.models.kv_cache import TOKENS_FIRST
from areal_jax.models.logprobs import token_logprobs
from areal_jax.models.transformer import TransformerConfig, bind, cast, graph, init_params
from tests.generation.by_hand import ByHand

SMALL = TransformerConfig(vocab_size=97, d_model=64, layers=2, heads=4, kv_heads=2, head_size=16, d_ff=128)
MODELS = {
    "tied, norms": dataclasses.replace(SMALL, qk_norm=True, tied_embeddings=True),
    "untied, biases, dead ids": dataclasses.replace(SMALL, qkv_bias=True, live_vocab=90),
}
TEMPERATURE = 0.7
PROMPTS = [np.arange(1, 1 + length, dtype=np.int32) % 90 for length in (3, 40, 17, 70, 9)]
NEW = 30  # tokens sampled after each prompt
DEVICE = jax.devices()[:1]


# Each compiles a dozen programs of its own: the other by `-m slow`.
each_model_and_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tied, norms", "float32"),
        pytest.param("untied, biases, dead ids", "bfloat16", marks=pytest.mark.slow),
    ],
)


@functools.cache
def params_of(name: str) -> dict[str, jax.Array]:
    params = init_params(MODELS[name], jax.random.key(1))
    noise = {key: 0.1 * jax.random.normal(jax.random.key(2), array.shape) for key, array in params.items()}
    return {key: array + noise[key] for key, array in params.items()}  # biases and scales that are not 0 and 1


def config_of(name: str, kernels: str) -> TransformerConfig:
    return dataclasses.replace(MODELS[name], kernels=kernels)


def generate(name, kernels, dtype, prompts, *, slots, buckets, decode_steps):
    """Prompt number -> (tokens, log-probabilities) of NEW sampled tokens, by an engine with room for all prompts."""
    options = EngineOptions(
        slots=slots, max_length=buckets[-1], decode_steps=decode_steps, length_buckets=buckets, dtype=dtype
    )
    engine = Engine(config_of(name, kernels), options, devices=DEVICE)
    weights, state = engine.load(params_of(name), version=0), engine.init_decode_state()
    where = {number: slots - 1 - place for place, number in enumerate(prompts)}
    requests = empty_requests(slots)
    for row, (number, slot) in enumerate(where.items()):
        length = len(PROMPTS[number])
        requests.row[slot], requests.length[slot], requests.prompt_length[slot] = row, length, length
        requests.limit[slot], requests.temperature[slot], requests.uid[slot] = length + NEW, TEMPERATURE, number
    state = engine.start(state, engine.prefill_rows(weights, [PROMPTS[number] for number in where]), requests)
    logprobs = {number: [] for number in where}
    while np.asarray(state.active).any():
        state, decoded = engine.decode(weights, state, buckets[-1])
        for number, slot in where.items():
            logprobs[number] += list(np.asarray(decoded.logprobs)[slot, : decoded.count[slot]])
    tokens = np.asarray(state.tokens)
    return {n: (tokens[slot, : len(PROMPTS[n]) + NEW], np.array(logprobs[n])) for n, slot in where.items()}


def forward(name, kernels, dtype, params, tokens_RL, positions_RL, segments_RL, block):
    model = bind(graph(config_of(name, kernels), kernels_for(kernels, one_device())), cast(params, dtype))
    hidden_RLD = model(tokens_RL, positions_RL, segments_RL)
    return token_logprobs(model, hidden_RLD, tokens_RL, temperature=np.float32(TEMPERATURE), block=block)[0]


def one_device():
    return sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, DEVICE)


def pack(sequences, rows, length):
    """Tokens, positions and segment ids [R, L] of rows that name sequences, and where each begins."""
    arrays, begins = np.zeros((3, len(rows), length), np.int32), {}
    for r, row in enumerate(rows):
        at = 0
        for segment, number in enumerate(row, 1):
            size = len(sequences[number])
            arrays[:, r, at : at + size] = sequences[number], range(size), [segment] * size
            begins[number] = (r, at)
            at += size
    return arrays, begins


def train(name, kernels, dtype, sequences, rows, *, length, block, with_gradient=False):
    """Prompt number -> log-probabilities of its sampled tokens, and the gradient of their sum ({} if not asked for)."""
    arrays, begins = pack(sequences, rows, length)

    @jax.jit
    def logprobs(params, arrays):
        return forward(name, kernels, dtype, params, *arrays, block)

    @jax.jit
    def with_grad(params, arrays):
        def loss(params):
            logprobs_RL = forward(name, kernels, dtype, params, *arrays, block)
            return jnp.sum(jnp.where(arrays[1] > 0, logprobs_RL, 0.0)) / 100, logprobs_RL

        return jax.grad(loss, has_aux=True)(params)

    params = {key: np.asarray(array) for key, array in params_of(name).items()}
    gradient, found_RL = with_grad(params, arrays) if with_gradient else ({}, logprobs(params, arrays))
    found_RL = np.asarray(found_RL)
    ends = {number: at + len(sequences[number]) for number, (_, at) in begins.items()}
    return {n: found_RL[r, ends[n] - NEW : ends[n]] for n, (r, _) in begins.items()}, gradient


def all_ways(name, kernels, dtype):
    """The reference, prompt number -> log-probabilities as first sampled; the same in other ways; and a gradient."""
    first = generate(name, kernels, dtype, [0, 1, 2, 3, 4], slots=6, buckets=(100,), decode_steps=7)
    sequences = {number: tokens for number, (tokens, _) in first.items()}
    run = functools.partial(train, name, kernels, dtype, sequences)
    ways = {
        "alone in a row": run([[3]], length=100, block=1024)[0],
        "packed": run([[1, 0, 2], [4, 3]], length=200, block=64)[0],
    }
    ways["inside value_and_grad"], gradient = run([[0, 1], [2], [3, 4]], length=160, block=32, with_gradient=True)
    return {number: logprobs for number, (_, logprobs) in first.items()}, ways, gradient, sequences


@functools.cache
def exact(name, dtype):
    return all_ways(name, "batch_invariant", dtype)


@each_model_and_dtype
def test_the_trainers_log_probabilities_are_the_engines_bit_for_bit(name, dtype):
    reference, ways, _, _ = exact(name, dtype)
    for way, found in ways.items():
        for number, logprobs in found.items():
            np.testing.assert_array_equal(logprobs, reference[number], err_msg=f"{way}, prompt {number}")


@each_model_and_dtype
def test_company_slots_buckets_and_dispatches_change_no_bit(name, dtype):
    reference, _, _, sequences = exact(name, dtype)
    others = [
        generate(name, "batch_invariant", dtype, [3], slots=1, buckets=(128,), decode_steps=1),
        generate(name, "batch_invariant", dtype, [1, 0], slots=17, buckets=(72, 90), decode_steps=30),
    ]
    for number, (tokens, logprobs) in (others[0] | others[1]).items():
        np.testing.assert_array_equal(tokens, sequences[number])
        np.testing.assert_array_equal(logprobs, reference[number])


def test_without_the_mode_the_same_comparison_shows_rounding():
    reference, ways, _, _ = all_ways("tied, norms", "plain", "float32")
    for found in ways.values():
        assert any((logprobs != reference[number]).any() for number, logprobs in found.items())


def after_a_swap(kernels):
    """What was recorded under new weights behind a recompute in mid sequence, and what the trainer makes of it."""
    name, old = "tied, norms", params_of("tied, norms")
    new = {key: array + 0.1 * jax.random.normal(jax.random.key(3), array.shape) for key, array in old.items()}
    options = EngineOptions(slots=6, max_length=100, decode_steps=7, length_buckets=(60, 100), prefill_rows=4)
    hand = ByHand(Engine(config_of(name, kernels), options, devices=DEVICE), old)
    for uid, prompt in enumerate(PROMPTS):
        hand.ask(uid, len(prompt), NEW, temperature=TEMPERATURE)
    hand.turn(2)
    swap = hand.scheduler.update_weights(new, 1)
    hand.finish()
    assert swap.done() and hand.scheduler.status()["recomputed_tokens"] > sum(map(len, PROMPTS))
    sequences = {uid: np.concatenate([hand.known(uid, 0), hand.joined(uid, 0, "tokens")]) for uid in range(5)}
    arrays, begins = pack(sequences, [[1, 0, 2], [4, 3]], 200)
    trained_RL = np.asarray(jax.jit(functools.partial(forward, name, kernels, "float32", block=64))(new, *arrays))
    for uid, (r, at) in begins.items():
        versions = np.array(hand.versions(uid))
        assert set(versions) == {0, 1}
        found = trained_RL[r, at + len(PROMPTS[uid]) : at + len(sequences[uid])]
        yield hand.joined(uid, 0, "logprobs")[versions == 1], found[versions == 1]


def test_a_recompute_in_mid_sequence_changes_no_bit_of_what_follows():
    for recorded, trained in after_a_swap("batch_invariant"):
        np.testing.assert_array_equal(recorded, trained)
    assert any((recorded != trained).any() for recorded, trained in after_a_swap("plain"))


@pytest.mark.parametrize("name", ["tied, norms", pytest.param("untied, biases, dead ids", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_normal_mode(name):
    _, _, gradient, sequences = exact(name, "float32")
    rows = [[0, 1], [2], [3, 4]]
    _, expected = train(name, "plain", "float32", sequences, rows, length=160, block=32, with_gradient=True)
    for key, value in expected.items():
        assert np.isfinite(gradient[key]).all()
        assert np.abs(gradient[key] - value).max() <= 1e-5 * max(1.0, np.abs(value).max()), key


def test_attention_is_that_of_the_plain_form():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 150, 4, 8))
    key, value = (jax.random.normal(k, (2, 150, 2, 8)) for k in keys[1:])
    segments = np.array([[1] * 30 + [2] * 100 + [0] * 20, [1] * 150])
    found = batch_invariant.packed_attention(query, key, value, segments)
    np.testing.assert_allclose(found, attention.packed_attention(query, key, value, segments), atol=2e-6)
    lengths = np.array([7, 150])
    slot = batch_invariant.decode_attention(query[:, 3], key, value, lengths)
    plain = dataclasses.replace(attention.PLAIN, cache=TOKENS_FIRST)
    expected = attention.decode_attention(query[:, 3], ((key, value),), lengths - 1, attended=150, kernels=plain)
    np.testing.assert_allclose(slot, expected, atol=2e-6)


def test_a_mesh_of_several_devices_is_refused():
    mesh = sharding.make_mesh({"data": 2, "fsdp": 1, "tensor": 1}, jax.devices()[:2])
    with pytest.raises(ValueError, match="promises its bits on one device, and this mesh has 2"):
        kernels_for("batch_invariant", mesh)
