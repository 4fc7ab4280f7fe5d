"""The transformer against Hugging Face's, in float32, on tiny random models of every family.

The tests run on the files of golden/ (made by make_golden.py with torch and transformers); forward, prefill and decode
also, where torch and transformers are installed, on models made on the spot with another seed and longer rows.

Shapes: B rows, L tokens, V vocabulary.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import decode, kv_cache
from areal_jax.models.huggingface import load_config
from areal_jax.models.kv_cache import IN_PIECES
from areal_jax.models.logprobs import from_logits, token_logprobs
from areal_jax.models.safetensors_files import load_model, read_params, save_model
from areal_jax.models.transformer import Transformer, bind, graph, param_shapes

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = pathlib.Path(__file__).parent / "golden"
VARIANTS = sorted(path.name for path in GOLDEN.iterdir())
ORIGINAL_POSITIONS = 32  # from which on rope scaling is for


def make_golden():
    """The module that makes models, where it can be imported."""
    pytest.importorskip("torch", reason="the live comparison needs `pip install torch==2.13.0 transformers`")
    pytest.importorskip("transformers", reason="the live comparison needs `pip install torch==2.13.0 transformers`")
    from tests.models import make_golden

    return make_golden


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Variant -> a directory as in golden/, written by transformers now."""

    @functools.cache
    def directory(variant: str) -> pathlib.Path:
        out = tmp_path_factory.mktemp(variant)
        make_golden().write(out, variant, seed=1, length=100)
        return out

    return directory


@pytest.fixture(params=["golden", "live"])
def reference(request):
    """Variant -> directory."""
    return (lambda variant: GOLDEN / variant) if request.param == "golden" else request.getfixturevalue("live")


def open_reference(directory: pathlib.Path) -> tuple[Transformer, jax.Array, np.ndarray]:
    """Our model, two rows of tokens [B, L], and transformers' logits [B, L, V] of them."""
    config, params = load_model(directory)
    golden = np.load(directory / "logits.npz")
    assert golden["tokens"].shape[1] > ORIGINAL_POSITIONS + 10
    return bind(graph(config), jax.tree.map(jnp.asarray, params)), jnp.asarray(golden["tokens"]), golden["logits"]


@jax.jit
def forward(model: Transformer, tokens_BL: jax.Array) -> jax.Array:
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    return model.logits(model(tokens_BL, positions_BL, jnp.ones_like(tokens_BL)))


def assert_relative(found: jax.Array | np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """The largest difference, relative to the largest expected value."""
    found = np.asarray(found)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_the_full_forward_are_those_of_transformers(variant, reference):
    model, tokens_BL, expected_BLV = open_reference(reference(variant))
    assert_relative(forward(model, tokens_BL), expected_BLV, 1e-4)


@jax.jit
def prefilled(model: Transformer, tokens_BL: jax.Array) -> tuple[kv_cache.LayerCache, ...]:
    """A cache of two slots, the second row in the first one."""
    cache = decode.init_cache(model.config, 2, (16, 48), jnp.float32)
    return kv_cache.write_rows(IN_PIECES, cache, decode.prefill(model, tokens_BL), jnp.array([1, 0]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_prefill_and_decode_are_those_of_transformers(variant, reference):
    """The prompt ends before the original positions of rope scaling do, and decoding goes on beyond them."""
    model, tokens_BL, expected_BLV = open_reference(reference(variant))
    start, end = ORIGINAL_POSITIONS - 4, ORIGINAL_POSITIONS + 8
    cache = prefilled(model, tokens_BL[:, :start])
    step = jax.jit(functools.partial(decode.decode_step, attended=48))
    for at in range(start, end):
        logits_SV, cache = step(model, tokens_BL[::-1, at], jnp.array([at, at]), cache)
        assert_relative(logits_SV, expected_BLV[::-1, at], 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_of_a_packed_row_are_those_of_single_ones(variant):
    """cases.md, packing: two sequences in one row, positions from 0 in each; also against transformers' logits."""
    model, tokens_BL, expected_BLV = open_reference(GOLDEN / variant)
    L = tokens_BL.shape[1]
    single = np.concatenate([_logprobs(model, row, (L,)) for row in tokens_BL])
    packed = np.asarray(_logprobs(model, tokens_BL.reshape(-1), (L, L)))
    theirs, _ = jax.jit(functools.partial(from_logits, temperature=1.0))(expected_BLV[:, :-1], tokens_BL[:, 1:])
    inside = np.arange(2 * L) % L != 0  # the first token of a sequence has no log-probability
    np.testing.assert_allclose(packed[inside], single[inside], atol=1e-5)
    np.testing.assert_allclose(packed[inside], np.asarray(theirs).reshape(-1), atol=1e-4)


@functools.partial(jax.jit, static_argnames="lengths")
def _logprobs(model: Transformer, tokens_L: jax.Array, lengths: tuple[int, ...]) -> jax.Array:
    positions_L = jnp.concatenate([jnp.arange(length) for length in lengths])
    segments_L = jnp.repeat(jnp.arange(1, len(lengths) + 1), np.array(lengths))
    hidden_RLD = model(tokens_L[None], positions_L[None], segments_L[None])
    return token_logprobs(model, hidden_RLD, tokens_L[None], temperature=1.0, block=64)[0][0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_vocabulary_padded_by_us_leaves_the_logits_as_they_are(variant):
    directory = GOLDEN / variant
    config = load_config(directory, vocab_multiple=7)
    assert config.vocab_rows == 28 > config.vocab_size == 24
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here) for name, s in param_shapes(config).items()}
    params = read_params(directory, config, places)
    _, tokens_BL, expected_BLV = open_reference(directory)
    logits_BLV = np.asarray(forward(bind(graph(config), params), tokens_BL))
    assert_relative(logits_BLV[..., :24], expected_BLV, 1e-4)
    assert (logits_BLV[..., 24:] == np.finfo(np.float32).min).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_what_we_write(variant, live, tmp_path):
    """In, out, and in again at transformers: the same bits, the same logits, the same config where it counts."""
    directory = live(variant)
    import transformers

    config, params = load_model(directory)
    save_model(tmp_path / "out", config, params)
    first, again = (
        transformers.AutoModelForCausalLM.from_pretrained(path).eval() for path in (directory, tmp_path / "out")
    )
    assert type(first) is type(again)
    theirs = again.state_dict()
    for name, tensor in first.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), theirs.pop(name).numpy())
    assert not theirs
    tokens = np.load(directory / "logits.npz")["tokens"]
    ids = make_golden().torch.tensor(tokens, dtype=make_golden().torch.long)
    np.testing.assert_array_equal(first(ids).logits.detach().numpy(), again(ids).logits.detach().numpy())
    assert load_config(tmp_path / "out") == config
