"""Whether attention and the weight swap are right on the accelerator that is here, and what benchmarks measured on it.

    python -m experiments.gpu_check --out=DIR [--bench=DIR/results.json] [--trainer=DIR/results.json]

In: nothing, or the results of `experiments.bench_generation` and `experiments.bench_trainer`. Out: one table, and the
same as DIR/results.json; the exit status is 1 when a check failed. Called by gpu_check.sh. Runs on a CPU too, where
attention is the plain form.

    attention   the backend's kernels in bfloat16 against the plain form in float32, and the time of both in bfloat16
    swap        log-probabilities after a recompute against a fresh forward under the new weights; in float32 every
                product is of the highest precision, as an accelerator else rounds its factors to fewer bits

Shapes: B rows, L tokens, S slots, N query heads, K key/value heads, H head size.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import Array

from areal_jax.generation.engine import Engine, EngineOptions, empty_requests
from areal_jax.models import attention, attention_kernels, sharding
from areal_jax.models.attention import PLAIN, Kernels
from areal_jax.models.kv_cache import CacheLayout
from areal_jax.models.logprobs import from_logits
from areal_jax.models.transformer import TransformerConfig, bind, graph, init_params
from experiments import bench_prox, runs

_OUT = runs.OUT
_BENCH = flags.DEFINE_string("bench", "", "results.json of experiments.bench_generation, for the same table.")
_TRAINER = flags.DEFINE_string("trainer", "", "results.json of experiments.bench_trainer, for the same table.")
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of a row and of a slot's cache.")

ALLOWED = {"attention": 3e-2, "float32": 1e-5, "bfloat16": 0.4}  # greatest errors; a bfloat16 near 4 has steps of 3e-2
RATIOS = ("vs_huggingface", "vs_static", "over_bound", "swap_throughput")  # in results.json of the benchmark
AIM = 0.35  # MFU of the trainer
REPEATS = 20

# SmolLM2-135M's layers with heads that the tensor cores like, few of them and a small vocabulary.
MODEL = TransformerConfig(
    vocab_size=1024, d_model=512, layers=4, heads=8, kv_heads=2, head_size=64, d_ff=1024, max_positions=8192
)


class Line(NamedTuple):
    """One line of the table."""

    check: str
    found: str
    allowed: str = ""
    passed: bool = True


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value)
    lines = [Line("device", jax.devices()[0].device_kind), *attention_lines(_LENGTH.value), *swap_lines(_LENGTH.value)]
    if _BENCH.value:
        lines += bench_lines(_results(_BENCH.value))
    if _TRAINER.value:
        lines += trainer_lines(_results(_TRAINER.value))
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps([line._asdict() for line in lines], indent=2) + "\n")
    print(table(lines))
    sys.exit(not all(line.passed for line in lines))


def table(lines: Sequence[Line]) -> str:
    rows = [("check", "found", "allowed", ""), *((*line[:3], "" if line.passed else "FAILED") for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# Attention.


def attention_lines(length: int) -> list[Line]:
    """Error and time of every form of attention, with the name of what computes it."""
    mesh = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
    kernels = attention_kernels.kernels_for("auto", mesh)
    return [
        line
        for name, (program, arguments) in attention_programs(length, kernels.cache).items()
        for line in _compared(name, getattr(kernels, name.split()[0]), program, arguments, kernels)
    ]


def attention_programs(length: int, layout: CacheLayout) -> dict[str, tuple[Callable[..., Any], tuple[Array, ...]]]:
    """Name -> (program of kernels and arrays, bfloat16 arrays); the first word of a name is the kernel's field."""
    N, K, H = MODEL.heads, MODEL.kv_heads, MODEL.head_size
    keys = jax.random.split(jax.random.key(0), 3)
    rows = [
        jax.random.normal(key, (4, length, heads, H), jnp.bfloat16) for key, heads in zip(keys, (N, K, K), strict=True)
    ]
    cached = [jnp.einsum(f"sckh->{layout.keys}", rows[1]), jnp.einsum(f"sckh->{layout.values}", rows[2])]
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (4, length))), jnp.int32)
    positions = jnp.asarray([0, length // 3, length - 1, length], jnp.int32)

    def causal(kernels: Kernels, query: Array, key: Array, value: Array) -> Array:
        return attention.causal_attention(query, key, value, kernels)

    def packed(kernels: Kernels, query: Array, key: Array, value: Array) -> Array:
        return attention.packed_attention(query, key, value, segments, kernels)

    def gradient(kernels: Kernels, *arrays: Array) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(packed(kernels, *a).astype(jnp.float32))), (0, 1, 2))(*arrays)

    def decode(kernels: Kernels, query: Array, key: Array, value: Array) -> Array:
        return attention.decode_attention(query, ((key, value),), positions, attended=length, kernels=kernels)

    return {
        "causal": (causal, (*rows,)),
        "packed": (packed, (*rows,)),
        "packed gradient": (gradient, (*rows,)),
        "decode": (decode, (rows[0][:, 0], *cached)),
    }


def _compared(
    name: str, kernel: Any, program: Callable[..., Any], arguments: tuple[Array, ...], kernels: Kernels
) -> list[Line]:
    plain_form = dataclasses.replace(PLAIN, cache=kernels.cache)
    refusal = kernel.refusal(*arguments[:2]) if kernel is not None else "there is none for this backend"
    by_kernel, plain = (jax.jit(functools.partial(program, form)) for form in (kernels, plain_form))
    with jax.default_matmul_precision("highest"):
        exact = plain(*(array.astype(jnp.float32) for array in arguments))
    error = _error(by_kernel(*arguments), exact)
    by = f"plain ({refusal})" if refusal else kernel.name
    times = f"{_milliseconds(by_kernel, arguments):.3f} ms, plain form {_milliseconds(plain, arguments):.3f} ms"
    label = f"attention, {name}"
    return [
        Line(label, by),
        Line(f"{label}: relative error", f"{error:.1e}", f"{ALLOWED['attention']:.0e}", error < ALLOWED["attention"]),
        Line(f"{label}: time", times),
    ]


def _error(found: Any, exact: Any) -> float:
    """Greatest difference over the greatest number of each array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.abs(f.astype(jnp.float32) - e).max() / jnp.abs(e).max()) for f, e in pairs)


def _milliseconds(program: Callable[..., Any], arguments: tuple[Array, ...]) -> float:
    jax.block_until_ready(program(*arguments))
    began = time.perf_counter()
    for _ in range(REPEATS):
        out = program(*arguments)
    jax.block_until_ready(out)
    return 1000 * (time.perf_counter() - began) / REPEATS


# Swap.


def swap_lines(length: int) -> list[Line]:
    """The greatest error of a log-probability after a swap, and what the recompute of all slots took, by dtype."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        precision = "highest" if dtype == "float32" else "default"
        with jax.default_matmul_precision(precision):
            error, milliseconds = swap(MODEL, length, dtype)
        passed = error < ALLOWED[dtype]
        lines += [
            Line(f"swap, {dtype}: error of log-probabilities", f"{error:.1e}", f"{ALLOWED[dtype]:.0e}", passed),
            Line(f"swap, {dtype}: recompute of 8 slots", f"{milliseconds:.1f} ms"),
        ]
    return lines


def swap(config: TransformerConfig, length: int, dtype: str) -> tuple[float, float]:
    """(greatest error, milliseconds) over eight slots of very different lengths that decode, swap and decode on."""
    engine = Engine(config, EngineOptions(slots=8, max_length=length, dtype=dtype))
    init = jax.jit(functools.partial(init_params, config))
    old, new = ({name: np.asarray(a) for name, a in init(jax.random.key(v)).items()} for v in (1, 2))
    rows = [np.arange(n, dtype=np.int32) % config.vocab_size for n in np.linspace(2, length - 17, 8).astype(int)]
    requests, longest = empty_requests(8), max(map(len, rows))
    for slot, row in enumerate(rows):
        requests.row[slot], requests.uid[slot], requests.limit[slot] = slot, slot, length
        requests.length[slot] = requests.prompt_length[slot] = len(row)
    weights = engine.load(old, 1)
    state = engine.start(engine.init_decode_state(), engine.prefill_rows(weights, rows), requests)
    state, _ = engine.decode(weights, state, longest + 8)
    weights = engine.load(new, 2)
    recompute = functools.partial(engine.recompute, weights, slots=range(8), lengths=[longest + 8] * 8)
    state = jax.block_until_ready(recompute(state=state))
    began = time.perf_counter()
    state = jax.block_until_ready(recompute(state=state))
    milliseconds = 1000 * (time.perf_counter() - began)
    state, decoded = engine.decode(weights, state, longest + 16)
    with jax.default_matmul_precision("highest"):
        fresh_SL = np.asarray(jax.jit(functools.partial(fresh_logprobs, config))(new, state.tokens))
    ends = [len(row) + 16 for row in rows]
    expected_S8 = np.stack([fresh_SL[slot, end - 9 : end - 1] for slot, end in enumerate(ends)])
    return float(np.abs(np.asarray(decoded.logprobs) - expected_S8).max()), milliseconds


def fresh_logprobs(config: TransformerConfig, params: Mapping[str, Array], tokens_SL: Array) -> Array:
    """log p of every token but a row's first, by one forward of whole rows in the params' dtype and the plain form."""
    model = bind(graph(config), params)
    logits_SLV = model.logits(
        model(tokens_SL, jnp.broadcast_to(jnp.arange(tokens_SL.shape[1]), tokens_SL.shape), jnp.ones_like(tokens_SL))
    )
    return from_logits(logits_SLV[:, :-1], tokens_SL[:, 1:], temperature=1.0)[0]


# Benchmarks.


def _results(path: str) -> dict[str, dict[str, Any]]:
    """What a benchmark measured, by model."""
    found = json.loads(pathlib.Path(path).read_text())
    return {model: of for model, of in found.items() if model not in ("machine", "sizes")}


def bench_lines(results: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """The ratios of experiments.bench_generation, of every model and part that it measured."""
    return [
        Line(f"generation, {model}: {name}", _short(found[name]))
        for model, found in results.items()
        for name in RATIOS
        if name in found
    ]


def _short(value: Any) -> str:
    """JSON with two decimals."""
    return json.dumps(json.loads(json.dumps(value), parse_float=lambda digits: round(float(digits), 2)))


def trainer_lines(results: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Speed, utilisation and memory by length of rows, and the proximal pass by minibatches, of every model.

    `AIM` is no check: it says what is wanted of a 1.5B model in bfloat16.
    """
    lines = []
    for model, found in results.items():
        for row, of in found.get("lengths", {}).items():
            label, planned = f"trainer, {model}, {found['dtype']}, rows of {row}", sum(of["planned_bytes"].values())
            mfu = f"{of['mfu']:.2f} of the peak" if "mfu" in of else "peak not known"
            memory = f"{of['peak_bytes'] / 1e9:.2f} GB at most, planned {planned / 1e9:.2f} GB"
            lines += [
                Line(f"{label}: tokens/s", f"{of['tokens_per_second']:,.0f}, remat={of['remat']}"),
                Line(f"{label}: utilisation", f"{mfu}, {of['matmul_utilisation']:.2f} of products", f"aim {AIM}"),
                Line(f"{label}: memory", memory),
            ]
        for n, of in found.get("prox", {}).items():
            must, calls = of["calls_of_whole_pass"] * (int(n) - 1) // int(n), of["calls"]
            found_n = f"{calls} calls, {of['over_updates']:.3f} of the updates' time, {bench_prox.compared(of)}"
            lines.append(Line(f"trainer, {model}, {n} minibatch(es): proximal pass", found_n, f"{must}", calls == must))
    return lines


if __name__ == "__main__":
    app.run(main)
