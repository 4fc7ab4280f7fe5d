"""A JetStream engine for reinforcement learning: slots, a cache that can be rebuilt in mid sequence, exact bookkeeping.

In: weights of one version, prompts, sampling parameters. Out: tokens with their log-probabilities. Called by the
scheduler, which owns the one `DecodeState`, or by JetStream's own driver through the `Engine` interface.

All of a sequence lives on the device. The invariant: of a slot with `length` known tokens the cache holds the first
`length - 1`; the last one is fed next. So prefill needs neither LM head nor sampler, every token comes out of the same
decode path, and rebuilding the cache under new weights is a prefill over the slot's own history.

Every program is one jit in sight, and compiled ahead for each length bucket by `warm_up`.

Shapes: S slots, P of them that a step takes, C tokens a slot can hold, B rows of a prefill, L tokens of a row, T decode
steps of one dispatch.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import Array
from jax.sharding import Mesh, NamedSharding

from third_party.jetstream import compat  # noqa: F401  isort: skip  (mends JetStream, so it comes first)
from jetstream.engine import engine_api, tokenizer_pb2

from areal_jax.generation import placement, sampling
from areal_jax.generation.buckets import PrefillShapes, default_buckets, default_slot_buckets
from areal_jax.generation.jetstream_tokenizer import JetStreamTokenizer
from areal_jax.models import attention_kernels, decode, kv_cache
from areal_jax.models.kv_cache import CacheLayout, KVCache
from areal_jax.models.logprobs import from_logits_of
from areal_jax.models.transformer import Params, Transformer, TransformerConfig, bind, graph, param_shapes

STOP_TOKENS = 4  # stop tokens a request may have


@struct.dataclass
class Weights:
    """What JetStream calls params: the weights and the version that tokens sampled from them carry."""

    params: Params
    version: Array  # [] int32


@struct.dataclass
class DecodeState:
    """Everything that a decode step changes; donated to it."""

    cache: KVCache
    tokens: Array  # [S, C] int32, prompt and completion
    length: Array  # [S] int32, known tokens
    prompt_length: Array  # [S] int32
    limit: Array  # [S] int32, the length at which a sequence ends
    active: Array  # [S] bool
    temperature: Array  # [S] float32
    truncation: sampling.Truncation
    stop_tokens: Array  # [S, STOP_TOKENS] int32, -1 = none
    min_length: Array  # [S] int32, the length below which no stop token is drawn
    wants_alternatives: Array  # [S] bool, whether the most likely tokens are asked for
    keys: Array  # [S, 2] uint32


@struct.dataclass
class Requests:
    """Per-slot parameters of newly admitted sequences; entries of slots that are not admitted are ignored."""

    row: Any  # [S] int32, the prefill row that a slot takes, -1 = none
    length: Any  # [S] int32
    prompt_length: Any  # [S] int32
    limit: Any  # [S] int32
    temperature: Any  # [S] float32
    truncation: sampling.Truncation
    stop_tokens: Any  # [S, STOP_TOKENS] int32
    min_length: Any  # [S] int32
    wants_alternatives: Any  # [S] bool
    seed: Any  # [S] uint32
    uid: Any  # [S] uint32
    sample: Any  # [S] uint32


@struct.dataclass
class Decoded:
    """What one dispatch made: the first `count[s]` of each row are new tokens of slot s."""

    tokens: Array  # [S, T] int32
    logprobs: Array  # [S, T] float32
    alternatives: tuple[Array, Array]  # the most likely tokens [S, T, N] int32 and their log-probabilities, where asked
    count: Array  # [S] int32
    active: Array  # [S] bool, after the dispatch


@struct.dataclass
class ScoredTokens(engine_api.ResultTokens):
    """JetStream's result, and the log-probability of each token under the distribution that it was drawn from."""

    logprobs: Any  # [S, T] float32

    def convert_to_numpy(self) -> "ScoredTokens":
        return jax.device_get(self)


@struct.dataclass
class Prefix:
    """The result of a JetStream prefill: one row of keys and values, its tokens and how many of them are real."""

    rows: decode.Rows
    tokens: Array  # [1, L] int32
    length: Array  # [] int32


# Tokens [S], their log-probabilities [S], alternatives as in `Decoded` without T; for at most N alternatives.
Drawn = tuple[Array, Array, tuple[Array, Array]]
Draw = Callable[[int, Transformer, DecodeState, Array], Drawn]


@dataclasses.dataclass(frozen=True, eq=False)
class PrefilledRows:
    """Keys and values of rows, and their tokens, padded; any number of slots may start from them."""

    rows: decode.Rows
    tokens: np.ndarray  # [B, L] int32


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Static sizes of an engine; see `config.GenerationConfig`."""

    slots: int
    max_length: int
    decode_steps: int = 8
    prefill_rows: int = 8
    prefill_tokens: int = 32768  # most tokens of one prefill or recompute, if that is more than one row
    length_buckets: tuple[int, ...] = ()
    slot_buckets: tuple[int, ...] = ()
    dtype: str = "float32"
    top_logprobs: int = 0  # N: most of the likeliest tokens that a request may ask for
    temperature: float = 1.0  # of requests that come through JetStream, which has no field for it
    seed: int = 0  # likewise
    tensor: int = 1  # devices over which heads, feed-forward and vocabulary are split


class Engine(engine_api.Engine):
    """Prefill, insert, decode, recompute. Holds programs and sizes but no state: that is the caller's `DecodeState`."""

    def __init__(
        self,
        config: TransformerConfig,
        options: EngineOptions,
        *,
        tokenizer: Any = None,
        devices: Sequence[jax.Device] = (),
    ):
        self.config = config
        self.options = options
        self.buckets = tuple(sorted(options.length_buckets)) or default_buckets(options.max_length)
        if self.buckets[-1] < options.max_length:
            raise ValueError(
                f"generation.length_buckets={self.buckets} end below the longest sequence, {options.max_length} tokens "
                f"(data.max_prompt_tokens + the most new tokens); add a bucket of at least {options.max_length}"
            )
        if options.top_logprobs > config.vocab_size:
            raise ValueError(
                f"generation.top_logprobs={options.top_logprobs} is more than the {config.vocab_size} tokens of the "
                "model's vocabulary; lower it"
            )
        devices = tuple(devices) or tuple(jax.devices())
        self.slot_buckets = tuple(sorted(options.slot_buckets)) or default_slot_buckets(
            options.slots, devices[0].platform
        )
        if self.slot_buckets[-1] != options.slots or self.slot_buckets[0] < 1:
            raise ValueError(
                f"generation.slot_buckets={self.slot_buckets} must be numbers of slots, the largest of them all "
                f"{options.slots} of generation.slots; add {options.slots}"
            )
        self.shapes = PrefillShapes(self.buckets, min(options.prefill_rows, options.slots), options.prefill_tokens)
        self._tokenizer = tokenizer
        self._inserted = 0  # sequences that came through JetStream; each samples with a key of its own
        self._mesh = mesh = placement.make_mesh(config, options.tensor, devices)
        self._where = placement.weights(config, mesh)
        kernels = attention_kernels.kernels_for(config.kernels, mesh)
        graphdef = graph(config, kernels)
        self._layout = kernels.cache
        self._cache_dtype = placement.cache_dtype(config, options.dtype, devices[0].platform)
        draw = _draw_batch_invariant if config.kernels == "batch_invariant" else _draw
        everywhere = placement.everywhere(mesh)
        # Inputs are where these put their results, or numpy arrays, which every device gets.
        self._shardings = state = _state_shardings(placement.cache(mesh, self._layout), everywhere)
        self._prefill = jax.jit(functools.partial(_prefill, graphdef), out_shardings=placement.rows(mesh))
        insert, rebuild = (functools.partial(program, self._layout) for program in (_insert, _rebuild))
        self._insert = jax.jit(insert, donate_argnames="state", out_shardings=state)
        self._history = jax.jit(_history, static_argnames="length", out_shardings=everywhere)
        self._rebuild = jax.jit(rebuild, donate_argnames="state", out_shardings=state)
        self._deactivate = jax.jit(_deactivate, donate_argnames="state", out_shardings=state)
        self._decode = jax.jit(
            functools.partial(_decode, graphdef, self._layout, mesh, draw, options.top_logprobs),
            static_argnames=("attended", "steps"),
            donate_argnames="state",
            out_shardings=(state, everywhere),
        )

    # For the scheduler.

    def bucket(self, length: int) -> int:
        """The smallest compiled length that holds `length` tokens."""
        return self.shapes.bucket(length)

    @property
    def tokenizer(self) -> Any:
        """What turns its tokens into text; None where it was made without one."""
        return self._tokenizer

    @property
    def places(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of its weights by name: what is already so, `load` takes without a copy."""
        dtype = jnp.dtype(self.options.dtype)
        shapes = param_shapes(self.config).items()
        return {name: jax.ShapeDtypeStruct(s.shape, dtype, sharding=self._where[name]) for name, s in shapes}

    @property
    def held(self) -> tuple[dict[str, jax.ShapeDtypeStruct], DecodeState]:
        """Shape, dtype and sharding of all that lies on its devices as long as it serves: weights, and the slots."""

        def placed(sharding: NamedSharding, arrays: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arrays)

        return self.places, jax.tree.map(placed, self._shardings, jax.eval_shape(self._free_slots))

    def load(self, params: Mapping[str, np.ndarray | Array], version: int) -> Weights:
        """Weights in their places (each device gets its part) in the engine's dtype; the old ones are untouched."""
        placed = jax.device_put(dict(params), {name: self._where[name] for name in params})  # in one call
        dtype = jnp.dtype(self.options.dtype)
        placed = {n: array if array.dtype == dtype else array.astype(dtype) for n, array in placed.items()}
        counted = jax.device_put(np.int32(version), placement.everywhere(self._mesh))
        return jax.block_until_ready(Weights(placed, counted))

    def prefill_rows(self, weights: Weights, rows: Sequence[np.ndarray]) -> PrefilledRows:
        """Prefills rows of tokens, a group of `shapes.groups`."""
        tokens_BL = np.zeros(self.shapes.shape([len(row) for row in rows]), np.int32)
        for row, tokens in zip(tokens_BL, rows, strict=False):
            row[: len(tokens)] = tokens
        return PrefilledRows(self._prefill(weights.params, tokens_BL), tokens_BL)

    def start(self, state: DecodeState, prefilled: PrefilledRows, requests: Requests) -> DecodeState:
        """Starts the slots of `requests` from prefilled rows, of which several slots may take the same."""
        return self._insert(state, prefilled.rows, prefilled.tokens, requests)

    def recompute(
        self, weights: Weights, state: DecodeState, slots: Sequence[int], lengths: Sequence[int]
    ) -> DecodeState:
        """Rebuilds the cache of these slots, a group of `shapes.groups`, of these lengths, under `weights`."""
        rows, bucket = self.shapes.shape(lengths)
        slots_B = np.full(rows, -1, np.int32)
        slots_B[: len(slots)] = slots
        row_of_slot_S = np.full(self.options.slots, -1, np.int32)
        row_of_slot_S[list(slots)] = np.arange(len(slots))
        tokens_BL = self._history(state, slots_B, length=bucket)
        return self._rebuild(state, self._prefill(weights.params, tokens_BL), row_of_slot_S)

    def decode(
        self, weights: Weights, state: DecodeState, longest: int, running: Collection[int] | None = None
    ) -> tuple[DecodeState, Decoded]:
        """Up to `decode_steps` tokens for every active slot, none of which exceeds `longest` tokens by then.

        All active slots are among `running` (None: any may be), of which the narrowest compiled step takes as many.
        """
        slots = range(self.options.slots) if running is None else running
        bucket = next(bucket for bucket in self.slot_buckets if bucket >= len(slots))
        slots_P = np.full(bucket, self.options.slots, np.int32)  # beyond the last slot: none
        slots_P[: len(slots)] = list(slots)
        attended, steps = self.bucket(longest), self.options.decode_steps
        return self._decode(weights.params, state, slots_P, attended=attended, steps=steps)

    def deactivate(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Stops these slots where they are."""
        gone_S = np.zeros(self.options.slots, np.bool_)
        gone_S[list(slots)] = True
        return self._deactivate(state, gone_S)

    def warm_up(self, weights: Weights, report: Any = lambda done, total: None) -> None:
        """Compiles every program for every length bucket."""
        state = self.init_decode_state()
        nothing = empty_requests(self.options.slots)
        for done, bucket in enumerate(self.buckets):
            report(done, len(self.buckets))
            for rows in {1, self.shapes.most(bucket)}:
                prefilled = self.prefill_rows(weights, [np.zeros(bucket, np.int32)] * rows)
                state = self.start(state, prefilled, nothing)
                state = self.recompute(weights, state, range(rows), [bucket] * rows)
            for slots in self.slot_buckets:
                state, _ = self.decode(weights, state, bucket, range(slots))
        jax.block_until_ready(self.deactivate(state, []))
        report(len(self.buckets), len(self.buckets))

    # JetStream's interface.

    def load_params(self, params: Mapping[str, np.ndarray | Array], version: int = 0) -> Weights:
        return self.load(params, version)

    def prefill(
        self,
        *,
        params: Weights,
        existing_prefix: Prefix | None = None,
        padded_tokens: Array,
        true_length: int,
    ) -> Prefix:
        if existing_prefix is not None:
            raise NotImplementedError(
                "existing_prefix is not supported: a prefix cache must not outlive a weight update"
            )
        tokens_1L = jnp.asarray(padded_tokens, jnp.int32)[None]
        return Prefix(self._prefill(params.params, tokens_1L), tokens_1L, jnp.int32(true_length))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Starts a slot whose limit is the cache; JetStream's driver itself ends it at the request's `max_tokens`."""
        requests = empty_requests(self.options.slots)
        length = int(prefix.length)
        requests.row[slot], requests.length[slot], requests.prompt_length[slot] = 0, length, length
        requests.limit[slot] = self.options.max_length
        requests.temperature[slot] = self.options.temperature
        requests.seed[slot], requests.uid[slot] = self.options.seed, self._inserted
        self._inserted += 1
        return self._insert(decode_state, prefix.rows, prefix.tokens, requests)

    def generate(self, params: Weights, decode_state: DecodeState) -> tuple[DecodeState, Any]:
        """One token per slot, as JetStream's `ResultTokens` of columns token, valid, length, with log-probabilities."""
        slots_S = np.arange(self.options.slots, dtype=np.int32)
        state, decoded = self._decode(params.params, decode_state, slots_S, attended=self.buckets[-1], steps=1)
        valid_S1 = (decoded.count > 0).astype(jnp.int32)[:, None]
        generated_S1 = (state.length - state.prompt_length)[:, None]
        return state, ScoredTokens(
            data=jnp.concatenate([decoded.tokens, valid_S1, generated_S1], axis=1),
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
            logprobs=decoded.logprobs,
        )

    def get_prefix_destination_sharding(self) -> Any:
        return placement.rows(self._mesh)

    def get_tokenizer(self) -> Any:
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Any:
        assert self._tokenizer is not None, "an engine that serves text needs a tokenizer"
        return JetStreamTokenizer(self._tokenizer)

    def init_decode_state(self) -> DecodeState:
        """All slots free."""
        # In its place, as what the programs return is: they would compile once more for arrays that are not.
        return jax.device_put(self._free_slots(), self._shardings)

    def _free_slots(self) -> DecodeState:
        S, C = self.options.slots, self.buckets[-1]
        return DecodeState(
            cache=decode.init_cache(self.config, S, self.buckets, self._cache_dtype, self._layout),
            tokens=jnp.zeros((S, C), jnp.int32),
            length=jnp.zeros(S, jnp.int32),
            prompt_length=jnp.zeros(S, jnp.int32),
            limit=jnp.zeros(S, jnp.int32),
            active=jnp.zeros(S, jnp.bool_),
            temperature=jnp.ones(S, jnp.float32),
            truncation=sampling.no_truncation(S, jnp),
            stop_tokens=jnp.full((S, STOP_TOKENS), -1, jnp.int32),
            min_length=jnp.zeros(S, jnp.int32),
            wants_alternatives=jnp.zeros(S, jnp.bool_),
            keys=jnp.zeros((S, 2), jnp.uint32),
        )

    @property
    def max_concurrent_decodes(self) -> int:
        return self.options.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """JetStream pads prompts to powers of two from 16 on, and insists that this is one of them."""
        return 2 ** max(4, self.buckets[-1].bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None


def empty_requests(slots: int) -> Requests:
    """No slot admitted; the scheduler fills in those that are."""
    return Requests(
        row=np.full(slots, -1, np.int32),
        length=np.zeros(slots, np.int32),
        prompt_length=np.zeros(slots, np.int32),
        limit=np.zeros(slots, np.int32),
        temperature=np.ones(slots, np.float32),
        truncation=sampling.no_truncation(slots),
        stop_tokens=np.full((slots, STOP_TOKENS), -1, np.int32),
        min_length=np.zeros(slots, np.int32),
        wants_alternatives=np.zeros(slots, np.bool_),
        seed=np.zeros(slots, np.uint32),
        uid=np.zeros(slots, np.uint32),
        sample=np.zeros(slots, np.uint32),
    )


def _state_shardings(cache: NamedSharding, everywhere: NamedSharding) -> DecodeState:
    """A prefix tree for the shardings of a `DecodeState`."""
    shardings: dict[str, Any] = {field.name: everywhere for field in dataclasses.fields(DecodeState)}
    return DecodeState(**shardings | {"cache": cache})


# The programs.


def _prefill(graphdef: nnx.GraphDef, params: Params, tokens_BL: Array) -> decode.Rows:
    return decode.prefill(bind(graphdef, params), tokens_BL)


def _insert(
    layout: CacheLayout, state: DecodeState, rows: decode.Rows, tokens_BL: Array, requests: Requests
) -> DecodeState:
    new_S = requests.row >= 0
    L = tokens_BL.shape[1]

    def take(new: Array, old: Array) -> Array:
        return jnp.where(new_S.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return DecodeState(
        cache=kv_cache.write_rows(layout, state.cache, rows, requests.row),
        tokens=state.tokens.at[:, :L].set(take(tokens_BL[requests.row], state.tokens[:, :L])),
        length=take(requests.length, state.length),
        prompt_length=take(requests.prompt_length, state.prompt_length),
        limit=take(requests.limit, state.limit),
        active=state.active | new_S,
        temperature=take(requests.temperature, state.temperature),
        truncation=jax.tree.map(take, requests.truncation, state.truncation),
        stop_tokens=take(requests.stop_tokens, state.stop_tokens),
        min_length=take(requests.min_length, state.min_length),
        wants_alternatives=take(requests.wants_alternatives, state.wants_alternatives),
        keys=take(sampling.request_keys(requests.seed, requests.uid, requests.sample), state.keys),
    )


def _history(state: DecodeState, slots_B: Array, *, length: int) -> Array:
    return state.tokens[slots_B, :length]


def _rebuild(layout: CacheLayout, state: DecodeState, rows: decode.Rows, row_of_slot_S: Array) -> DecodeState:
    return dataclasses.replace(state, cache=kv_cache.write_rows(layout, state.cache, rows, row_of_slot_S))


def _deactivate(state: DecodeState, gone_S: Array) -> DecodeState:
    return dataclasses.replace(state, active=state.active & ~gone_S)


def _draw(top_logprobs: int, model: Transformer, state: DecodeState, logits_SV: Array) -> Drawn:
    """The next token of every slot, as its request asks for it."""
    del model
    early_S = state.active & (state.length < state.min_length)
    logits_SV = sampling.without_tokens(logits_SV, state.stop_tokens, early_S)
    least_S = sampling.least_logits(logits_SV, state.temperature, state.truncation, state.active)
    drawn = sampling.sample(logits_SV, least_S, state.keys, state.length, state.temperature)
    return *drawn, _alternatives(top_logprobs, state, logits_SV, least_S)


def _alternatives(top_logprobs: int, state: DecodeState, logits_SV: Array, least_S: Array) -> tuple[Array, Array]:
    """The most likely tokens [S, N] and their log-probabilities; -inf where no slot asks for them."""
    S = len(logits_SV)
    if not top_logprobs:
        return jnp.zeros((S, 0), jnp.int32), jnp.zeros((S, 0))
    return jax.lax.cond(
        jnp.any(state.active & state.wants_alternatives),
        lambda: sampling.most_likely(logits_SV, least_S, state.temperature, top_logprobs),
        lambda: (jnp.zeros((S, top_logprobs), jnp.int32), jnp.full((S, top_logprobs), -jnp.inf)),
    )


def _draw_batch_invariant(top_logprobs: int, model: Transformer, state: DecodeState, logits_SV: Array) -> Drawn:
    """As `_draw`, each slot by itself, and the log-probability by the very formula of the trainer."""
    per_token = functools.partial(model.kernels.per_token, axes=1)

    def kept(_: tuple[()], *rows: Any) -> Array:
        logits_SV, stop_tokens_SE, early_S, temperature_S, active_S, *truncation = rows
        logits_SV = sampling.without_tokens(logits_SV, stop_tokens_SE, early_S)
        least_S = sampling.least_logits(logits_SV, temperature_S, sampling.Truncation(*truncation), active_S)
        return jnp.where(logits_SV < least_S[:, None], -jnp.inf, logits_SV)

    def draw(_: tuple[()], logits_SV: Array, *rows: Array) -> Array:
        return sampling.sample(logits_SV, jnp.full(len(logits_SV), -jnp.inf), *rows)[0]

    early_S, limits = state.active & (state.length < state.min_length), jax.tree.leaves(state.truncation)
    logits_SV = per_token(kept, (), logits_SV, state.stop_tokens, early_S, state.temperature, state.active, *limits)
    next_S = per_token(draw, (), logits_SV, state.keys, state.length, state.temperature)
    temperature_S1 = jnp.where(state.temperature == 0, 1.0, state.temperature)[:, None]
    logprobs_S = from_logits_of(model, logits_SV, next_S, temperature=temperature_S1)[0]
    return next_S, logprobs_S, _alternatives(top_logprobs, state, logits_SV, jnp.full(len(logits_SV), -jnp.inf))


def _decode(
    graphdef: nnx.GraphDef,
    layout: CacheLayout,
    mesh: Mesh,
    draw: Draw,
    top_logprobs: int,
    params: Params,
    state: DecodeState,
    slots_P: Array,
    *,
    attended: int,
    steps: int,
) -> tuple[DecodeState, Decoded]:
    """Decodes until every slot of `slots` (where they are fewer than all) has `steps` more tokens or is done."""
    through = functools.partial(
        _through, bind(graphdef, params), mesh, draw, top_logprobs, attended=attended, steps=steps
    )
    S, P = len(state.length), len(slots_P)
    if P == S:
        return through(state)
    near = tuple(layer[: layout.reaching(layer, attended)] for layer in state.cache.layers)
    whole = dataclasses.replace(state, cache=KVCache(near))
    part, decoded = through(jax.tree.map(lambda array: array.at[slots_P].get(mode="fill", fill_value=0), whole))
    put = lambda array, rows: array.at[slots_P].set(rows, mode="drop")  # noqa: E731
    whole = jax.tree.map(put, whole, part)
    layers = tuple(ours + all_[len(ours) :] for ours, all_ in zip(whole.cache.layers, state.cache.layers, strict=True))
    decoded = jax.tree.map(lambda rows: put(jnp.zeros((S, *rows.shape[1:]), rows.dtype), rows), decoded)
    return dataclasses.replace(whole, cache=KVCache(layers)), decoded


def _through(
    model: Transformer,
    mesh: Mesh,
    draw: Draw,
    top_logprobs: int,
    state: DecodeState,
    *,
    attended: int,
    steps: int,
) -> tuple[DecodeState, Decoded]:
    """Decode steps until every slot of a state has `steps` more tokens or is done."""
    S, C = state.tokens.shape
    slots_S = jnp.arange(S)
    decoded = Decoded(
        tokens=jnp.zeros((S, steps), jnp.int32),
        logprobs=jnp.zeros((S, steps), jnp.float32),
        alternatives=(jnp.zeros((S, steps, top_logprobs), jnp.int32), jnp.zeros((S, steps, top_logprobs), jnp.float32)),
        count=jnp.zeros(S, jnp.int32),
        active=state.active,
    )

    def goes_on(carry: tuple[Array, DecodeState, Decoded]) -> Array:
        step, state, _ = carry
        return (step < steps) & jnp.any(state.active)

    def one_step(carry: tuple[Array, DecodeState, Decoded]) -> tuple[Array, DecodeState, Decoded]:
        step, state, decoded = carry
        active_S = state.active
        fed_S = jnp.where(active_S, state.length - 1, C)  # outside the cache: writes nothing
        tokens_S = state.tokens[slots_S, jnp.minimum(fed_S, C - 1)]
        logits_SV, cache = decode.decode_step(model, tokens_S, fed_S, state.cache, attended=attended)
        logits_SV = placement.gather_logits(logits_SV, mesh)
        next_S, logprobs_S, alternatives = draw(top_logprobs, model, state, logits_SV)
        length_S = state.length + active_S
        done_S = jnp.any(next_S[:, None] == state.stop_tokens, axis=1) | (length_S >= state.limit)
        state = dataclasses.replace(
            state,
            cache=cache,
            tokens=state.tokens.at[slots_S, jnp.where(active_S, state.length, C)].set(next_S, mode="drop"),
            length=length_S,
            active=active_S & ~done_S,
        )
        decoded = Decoded(
            tokens=decoded.tokens.at[:, step].set(next_S),
            logprobs=decoded.logprobs.at[:, step].set(logprobs_S),
            alternatives=jax.tree.map(lambda all_, new: all_.at[:, step].set(new), decoded.alternatives, alternatives),
            count=decoded.count + active_S,
            active=state.active,
        )
        return step + 1, state, decoded

    _, state, decoded = jax.lax.while_loop(goes_on, one_step, (jnp.int32(0), state, decoded))
    return state, decoded
