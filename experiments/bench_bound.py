"""The time of a decode step against what memory and arithmetic allow, and where the rest of it goes.

In: a model, batch sizes, cache lengths. Out: seconds. Called by `bench_generation`. Waits for the device.

With B running sequences that have c tokens on average, a step in which every byte is read once and every product is
computed once takes

    bytes = 4 * W + B * c * M        W weights that are read, M bytes of cache per token
    FLOPs = 2 * B * P + 4 * B * c * layers * heads * head_size
    bound = max(bytes / bandwidth, FLOPs / rate)

P counts the weights of matrix products, the LM head among them; W the same and those of the norms (an embedding that is
not the head is looked up and not read). M = 2 * layers * kv_heads * head_size * bytes of a number. Bandwidth is that of
reading: the better of a large matrix times a vector, and of a large copy (read and written). Rate is that of a product
of two large square matrices of the step's dtype, summed in float32. Both are measured before and after each step time,
in the same process.

Between bound and step lie the step's own products with weights: a product with few rows is far from the rate of the
square one. They are measured alone, by XLA, and by numpy and torch, where these are there: what another library for
them would gain. The rest of the distance is the engine's.

Shapes: B = S slots, C cached tokens, D model, N query heads, K key/value heads, H head size, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from areal_jax.generation import sampling
from areal_jax.generation.engine import DecodeState, Engine, Weights, empty_requests
from areal_jax.models import attention
from areal_jax.models.kv_cache import LayerCache
from areal_jax.models.products import product_in_float32
from areal_jax.models.transformer import Params, TransformerConfig, bind, graph, param_shapes
from experiments import bench_products
from experiments.bench_workload import Bench, medians, take_turns, timed

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128  # cached tokens that a step of the bound attends to, at most
REPETITIONS = 5


class Sizes(NamedTuple):
    """Of what the rates are measured with: far more bytes than any cache holds, and milliseconds of work."""

    read_bytes: int
    square: int  # rows and columns of a matrix


ON_CPU, ON_ACCELERATOR = Sizes(2**28, 2048), Sizes(2**32, 16_384)


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machine does at its best."""

    bytes_per_s: float
    flops_per_s: float


def measure_rates(dtype: str = "float32") -> Rates:
    """The best of several attempts at each; the products are those of `dtype`."""
    return Rates(read_rate(), matmul_rate(dtype))


def read_rate() -> float:
    """Bytes per second from the memory of the device."""
    sizes = device_sizes()
    matrix, vector = jnp.ones((sizes.read_bytes // 4 // 4096, 4096)), jnp.ones(4096)
    found = [sizes.read_bytes / fastest(lambda: _product(matrix, vector))]
    if jax.default_backend() == "cpu":  # half the bytes, read and written
        source, target = (np.ones(sizes.read_bytes // 8, np.float32) for _ in range(2))
        found.append(sizes.read_bytes / fastest(lambda: np.copyto(target, source)))
    return max(found)


def matmul_rate(dtype: str) -> float:
    """FLOP/s of the product of two square matrices of `dtype`, summed in float32."""
    side = device_sizes().square
    square = jnp.ones((side, side), dtype)
    return 2 * side**3 / fastest(lambda: _product(square, square))


def fastest(call: Callable[[], Any]) -> float:
    return min(timed(call) for _ in range(REPETITIONS))


@jax.jit
def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def device_sizes() -> Sizes:
    return ON_CPU if jax.default_backend() == "cpu" else ON_ACCELERATOR


# The bound.


def cache_bytes(config: TransformerConfig, dtype: Any) -> int:
    """Bytes of keys and values per token of a sequence."""
    return 2 * config.layers * config.kv_heads * config.head_size * jnp.dtype(dtype).itemsize


def weight_counts(config: TransformerConfig) -> tuple[int, int]:
    """Weights of matrix products, and all weights that a step reads."""
    shapes = {name: math.prod(shape.shape) for name, shape in param_shapes(config).items()}
    head = shapes["embedding"] if config.tied_embeddings else 0
    kernels = sum(size for name, size in shapes.items() if name.endswith("kernel"))
    others = sum(size for name, size in shapes.items() if not name.endswith("kernel") and name != "embedding")
    return kernels + head, kernels + head + others


def bound(config: TransformerConfig, dtype: str, batch: int, context: float, rates: Rates) -> float:
    """Seconds that a step of `batch` sequences of `context` tokens on average takes at least."""
    products, read = weight_counts(config)
    moved = read * jnp.dtype(dtype).itemsize + batch * context * cache_bytes(config, dtype)
    flops = 2 * batch * products + 4 * batch * context * config.layers * config.heads * config.head_size
    return max(moved / rates.bytes_per_s, flops / rates.flops_per_s)


# The step.


@dataclasses.dataclass
class Decoding:
    """An engine whose slots all run; its steps can be timed."""

    engine: Engine
    weights: Weights
    state: DecodeState
    length: int  # known tokens of each slot

    def step(self, attended: int) -> float:
        """Seconds per decode step, over one dispatch that attends to `attended` cached tokens."""
        steps = self.engine.options.decode_steps

        def dispatch() -> Array:
            self.state, decoded = self.engine.decode(self.weights, self.state, attended)
            return decoded.count

        seconds = timed(dispatch)
        self.length += steps
        return seconds / steps

    def idle_dispatch(self) -> float:
        """Seconds of a dispatch that finds nothing to do; the slots have stopped from here on."""
        self.state = self.engine.deactivate(self.state, range(self.engine.options.slots))
        jax.block_until_ready(self.state)
        return self.step(1) * self.engine.options.decode_steps


def decoding(bench: Bench, batch: int, buckets: tuple[int, ...]) -> Decoding:
    """All slots run from the same prompt, each with samples of its own; nothing ends before the cache is full."""
    engine = bench.engine(batch, buckets[-1], buckets)
    weights = engine.load(bench.params, 0)
    requests = empty_requests(batch)
    requests.row[:] = 0
    requests.length[:] = requests.prompt_length[:] = bench.prompt_tokens
    requests.limit[:] = buckets[-1]
    requests.sample[:] = np.arange(batch)
    state = engine.start(engine.init_decode_state(), engine.prefill_rows(weights, [bench.prompts[0]]), requests)
    return Decoding(engine, weights, state, bench.prompt_tokens)


def check_memory(bench: Bench) -> dict[str, Any]:
    """Bytes of the cache per slot and per token of it, as allocated, beside those of `cache_bytes`.

    An AssertionError when they differ. The dtype is the one that the cache has here (`placement.cache_dtype`).
    """
    slots, length = 2, bench.contexts[-1]
    arrays = jax.tree.leaves(bench.engine(slots, length, (length,)).init_decode_state().cache)
    per_slot, dtype = sum(array.nbytes for array in arrays) / slots, arrays[0].dtype
    per_token = cache_bytes(bench.config, dtype)
    found = {
        "cache_dtype": dtype.name,
        "slot_tokens": length,
        "cache_bytes_per_token": per_slot / length,
        "cache_bytes_per_token_expected": per_token,
        "cache_bytes_per_slot": per_slot,
        "cache_bytes_per_slot_expected": length * per_token,
    }
    for name in ("cache_bytes_per_token", "cache_bytes_per_slot"):
        assert found[name] == found[f"{name}_expected"], found
    return found


def over_bound(bench: Bench, batch: int, seconds: float) -> dict[str, Any]:
    """Step time, bound and their ratio for a batch, the rates measured in turns with the steps."""
    context = min(CONTEXT, bench.contexts[-1])
    run = decoding(bench, batch, (context,))
    run.step(context)  # compiles
    found, rates, lengths = [], [measure_rates(bench.dtype)], []
    room = (context - run.length) // run.engine.options.decode_steps
    for _ in range(min(REPETITIONS, room)):
        lengths.append(run.length + run.engine.options.decode_steps / 2)
        found.append(run.step(context))
    rates.append(measure_rates(bench.dtype))
    best = Rates(*(max(getattr(rate, field.name) for rate in rates) for field in dataclasses.fields(Rates)))
    step = float(np.median(found))
    least = bound(bench.config, bench.dtype, batch, float(np.mean(lengths)), best)
    shares = parts(bench, run, context, step, seconds)
    alone = {"xla": shares["layer products"] + shares["LM head"], **bench_products.elsewhere(bench, batch, seconds / 4)}
    return {
        "step_ms": 1e3 * step,
        "bound_ms": 1e3 * least,
        "ratio": step / least,
        "tokens_per_second": batch / step,
        "bandwidth_GB_per_s": best.bytes_per_s / 1e9,
        "matmul_GFLOP_per_s": best.flops_per_s / 1e9,
        "parts_ms": {name: 1e3 * s for name, s in shares.items()},
        "products_ms": {library: 1e3 * s for library, s in alone.items()},
    }


def step_by_context(bench: Bench, batch: int, seconds: float) -> dict[int, float]:
    """Milliseconds per step by cached tokens attended to, the lengths taking turns."""
    run = decoding(bench, batch, bench.contexts)
    for attended in bench.contexts:
        run.step(attended)  # compiles
    calls: dict[str, Callable[[], float]] = {
        str(attended): functools.partial(run.step, attended) for attended in bench.contexts
    }
    room = (bench.contexts[0] - run.length) // run.engine.options.decode_steps // len(calls)
    found = medians(take_turns(calls, seconds, rounds=max(2, min(REPETITIONS, room))))
    return {int(attended): 1e3 * step for attended, step in found.items()}


# Where the rest goes: the parts of a step as programs of their own, as often per dispatch as the engine does them.


def parts(bench: Bench, run: Decoding, context: int, step: float, seconds: float) -> dict[str, float]:
    """Seconds per step of its parts, each a program of its own; the rest is norms, rotations and copies."""
    batch, steps = run.engine.options.slots, run.engine.options.decode_steps
    model_graph, params = graph(bench.config), run.weights.params
    hidden_SD = jnp.ones((batch, bench.config.d_model), bench.dtype)
    query_SNH = jnp.ones((batch, bench.config.heads, bench.config.head_size), bench.dtype)
    logits_SV = jnp.ones((batch, bench.config.vocab_rows))
    programs: dict[str, tuple[Callable[..., Array], tuple[Any, ...]]] = {
        "layer products": (functools.partial(layer_products, bench.config), (hidden_SD, params)),
        "LM head": (functools.partial(head_product, model_graph), (hidden_SD, params)),
        "attention": (
            functools.partial(attention_of_layers, attended=context),
            (query_SNH, run.state.cache.layers, run.state.length),
        ),
        "sampling": (draw_tokens, (run.state.length, logits_SV, run.state.keys)),
    }
    calls: dict[str, Callable[[], float]] = {}
    for name, (part, arguments) in programs.items():
        program = jax.jit(functools.partial(repeated, part, steps))
        calls[name] = functools.partial(timed, functools.partial(program, *arguments))
        calls[name]()  # compiles
    found = {name: s / steps for name, s in medians(take_turns(calls, seconds, rounds=REPETITIONS)).items()}
    found["dispatch"] = min(run.idle_dispatch() for _ in range(REPETITIONS)) / steps
    return {**found, "rest": step - sum(found.values())}


def repeated(part: Callable[..., Array], steps: int, carry: Array, *others: Any) -> Array:
    """A part again and again, each time on what it made before, so that none is left out or shared."""
    return jax.lax.fori_loop(0, steps, lambda _, carry: part(carry, *others), carry)


def layer_products(config: TransformerConfig, hidden_SD: Array, params: Params) -> Array:
    """The products of the layers, one after the other as they need each other, and as little as possible between."""

    def of(name: str, x: Array, contracted: int = 1) -> Array:
        return product_in_float32(x, params[f"layers.{name}.kernel"], contracted).astype(x.dtype)

    for i in range(config.layers):
        query_SNH, key_SKH, value_SKH = (of(f"{i}.attention.{name}", hidden_SD) for name in ("query", "key", "value"))
        own_SNH = query_SNH + jnp.repeat(key_SKH + value_SKH, config.heads // config.kv_heads, axis=1)
        hidden_SD = hidden_SD + 1e-3 * of(f"{i}.attention.out", own_SNH, 2)
        inner_SF = of(f"{i}.feed_forward.gate", hidden_SD) * of(f"{i}.feed_forward.up", hidden_SD)
        hidden_SD = hidden_SD + 1e-3 * of(f"{i}.feed_forward.down", inner_SF)
    return hidden_SD


def head_product(model_graph: nnx.GraphDef, hidden_SD: Array, params: Params) -> Array:
    logits_SV = jax.lax.optimization_barrier(bind(model_graph, params).logits(hidden_SD))  # all of them, not a slice
    return hidden_SD + (1e-9 * logits_SV[:, :1]).astype(hidden_SD.dtype)


def attention_of_layers(query_SNH: Array, cached: tuple[LayerCache, ...], length_S: Array, *, attended: int) -> Array:
    for layer in cached:
        query_SNH = attention.decode_attention(query_SNH, layer, length_S - 1, attended=attended)
    return query_SNH


def draw_tokens(length_S: Array, logits_SV: Array, keys_S2: Array) -> Array:
    slots = logits_SV.shape[0]
    length_S, logits_SV = jax.lax.optimization_barrier((length_S, logits_SV))  # anew in every round
    tokens_S, _ = sampling.sample(logits_SV, jnp.full(slots, -jnp.inf), keys_S2, length_S, jnp.ones(slots))
    return length_S + (tokens_S < slots)
