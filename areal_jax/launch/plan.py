"""What a run will need, before it starts: parameters, and bytes for each device and for the host.

In: a checked config, and the shape of its model (`config.json` of the model directory, or `model.shape` when the model
is not on this machine). Out: numbers, and a report for people. Called by `main --dry_run`. Waits for nobody: no device
is touched and nothing is downloaded.

What has a fixed size is counted exactly, as the arrays that trainer and generation server hold. What the compiler
decides is estimated, and the report says so:

    activations    tokens of a microbatch * layers * b * (4 D + 3 (N + 2 K) H + 5 F)
    with remat     the same of one layer, and of each other one tokens * b * 3 D (layers), or
                   tokens * b * (2 D + (N + 2 K) H + 2 F) (dots)
    rows split     the layers' weights that fsdp gathers, and four tables of the vocabulary's gradients: see `_whole`
    logits         of two blocks of the vocabulary, for all tokens of a microbatch
    prefill        rows * L * (keys and values + b * (2 D + 2 (N + K) H + 2 F)), for the bucket L that needs most; rows
                   are prefill_tokens // L, at least 1 and at most prefill_rows

with b bytes of the forward pass's dtype, D model, N query heads, K key/value heads, H head size, F feed-forward. No
form of attention keeps its scores. The factors were fitted to XLA's own `memory_analysis` on the CPU, float32;
tests/launch/test_plan.py holds them to a factor of 1.5 there. A server's numbers are those of each of its devices; on a
CPU a bfloat16 cache takes twice as much (`placement.cache_dtype`).

Gradients and moments are those of the parameters that train; adapters (`model.lora`) are weights beside the model's,
and the kernels that they change are computed with as copies, merged.

A generation server holds two sets of weights while it takes new ones, or one with `generation.double_buffer=False`,
which stands still while the new ones load.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from areal_jax import hub
from areal_jax.algorithms.packing import Layout, make_layout
from areal_jax.config import Config
from areal_jax.generation import placement
from areal_jax.generation.buckets import HELD, PrefillShapes, default_buckets
from areal_jax.launch.model_config import model_config, supervised_model_config
from areal_jax.models import decode, sharding, transformer
from areal_jax.models.huggingface import load_config
from areal_jax.models.transformer import TransformerConfig
from areal_jax.trainer import lora, state

FLOAT32 = 4
SLOT_STATE = 58  # bytes of a slot beside its tokens and cache: lengths, limits, truncation, stop tokens, key
LOGIT_ARRAYS = 2  # float32 [tokens, block of the vocabulary] that live at once: logits, their gradient
VERSIONS_ON_HOST = 3  # files of weights: the newest, the one before, and the one that is being written

_SWAPS = {True: "new weights load beside the old", False: "new weights take the place of the old; it waits for them"}

ESTIMATED = (
    "gradients of a microbatch",
    "weights as computed with",
    "whole, though rows are split",
    "activations",
    "logits of a block",
    "prefill",
    "logits",
)


ESTIMATES = "~ marks estimates; their formulas, and what is counted exactly, are in areal_jax/launch/plan.py"


def find_model_config(config: Config) -> TransformerConfig | None:
    """The shape of the model; None when it is neither on this machine nor given as `model.shape`.

    Raises ValueError when the model is here and not of the shape that the config gives.
    """
    return _find(config, model_config)


def _find(config: Config, read: Callable[[Config], TransformerConfig]) -> TransformerConfig | None:
    """`read` makes the shape of a model that is on this machine."""
    if hub.find_model(config.model.path) is not None:
        return read(config)
    if not config.model.shape:
        return None
    return load_config(pathlib.Path(config.model.shape), vocab_multiple=config.vocab_multiple)


def report(config: Config, *, devices: int = 0) -> str:
    """The plan as text. `devices` is how many the trainer has; 0 = as many as its mesh needs, with data=-1 as 1."""
    model = find_model_config(config)
    if model is None:
        return _unknown(config)
    mesh = abstract_mesh(config, devices)
    sections = [
        _count_text(config, model) + _trained_text(config, model),
        _section(_mesh_text(config, mesh, devices), trainer_bytes(config, model, mesh)),
        _generation(config, model),
        _section("host", host_bytes(config, model)),
        ESTIMATES,
    ]
    return "\n".join(sections)


def supervised_report(config: Config, *, devices: int = 0) -> str:
    """The part of the plan that supervised fine-tuning needs: a trainer that publishes nothing."""
    model = _find(config, supervised_model_config)
    if model is None:
        return _unknown(config)
    mesh = abstract_mesh(config, devices)
    parts = trainer_bytes(config, model, mesh)
    del parts["copy to publish"]
    head = _count_text(config, model) + _trained_text(config, model)
    return "\n".join([head, _section(_mesh_text(config, mesh, devices), parts), ESTIMATES])


def _mesh_text(config: Config, mesh: AbstractMesh, devices: int) -> str:
    assumed = "; data=-1 taken as 1, --devices=N says how many" if not devices and -1 in _mesh_sizes(config) else ""
    axes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in sharding.AXES)
    return f"trainer, on each of {mesh.size} device(s) ({axes}{assumed})"


def serving_report(config: Config) -> str:
    """The part of the plan that a generation server by itself needs."""
    model = find_model_config(config)
    if model is None:
        return _unknown(config)
    return "\n".join([_count_text(config, model), _generation(config, model), ESTIMATES])


def _unknown(config: Config) -> str:
    return (
        f"model {config.model.path}: not on this machine, so its parameters and memory are not known; set "
        "model.shape to its config.json, or give model.path as a directory that has one"
    )


def _generation(config: Config, model: TransformerConfig) -> str:
    servers, tensor = len(config.generation.addresses), config.generation.tensor
    places = "the device" if tensor == 1 else f"each of the {tensor} devices"
    return _section(
        f"generation, on {places} of each of {servers} server(s) ({_SWAPS[config.generation.double_buffer]})",
        generator_bytes(config, model),
    )


def count(model: TransformerConfig) -> tuple[int, int]:
    """Parameters, and how many of them are embeddings or the head on the vocabulary; padding is none."""
    tables = 1 if model.tied_embeddings else 2
    return transformer.param_count(model), tables * model.vocab_size * model.d_model


def trainer_bytes(config: Config, model: TransformerConfig, mesh: AbstractMesh) -> dict[str, int]:
    """Bytes on one of the trainer's devices, by purpose. ValueError when mesh, model and token budget do not fit."""
    shapes = transformer.param_shapes(model)
    trainable = lora.trainable(model, config.model)
    held = trainable.shapes(shapes)

    def numbers(names: Iterable[str]) -> int:
        return sum(_shard_size(name, held[name], mesh) for name in names)

    trained = numbers(trainable.trained(held))
    layout = make_layout(
        config.trainer.row_buckets,
        max_length=config.trained_length,
        token_budget=config.trainer.token_budget,
        shards=mesh.shape["data"] * mesh.shape["fsdp"],
    )
    computed = _itemsize(config.trainer.dtype)
    block = min(config.trainer.vocab_block, model.vocab_rows // mesh.shape["tensor"])
    return {
        "weights": FLOAT32 * numbers(held),
        "gradients": FLOAT32 * trained,
        "optimizer moments": (_itemsize(config.trainer.optimizer.moment_dtype) + FLOAT32) * trained
        + _counters(config, shapes),
        "copy to publish": _itemsize(config.generation.dtype) * numbers(shapes),
        "gradients of a microbatch": FLOAT32 * trained,
        "weights as computed with": computed * numbers(trainable.adapted if computed == FLOAT32 else shapes),
        "whole, though rows are split": _whole(config, model, mesh),
        "activations": _activations(config, model, mesh, layout),
        "logits of a block": LOGIT_ARRAYS * FLOAT32 * _microbatch_tokens(layout) * block,
    }


def generator_bytes(config: Config, model: TransformerConfig) -> dict[str, int]:
    """Bytes on each device of a generation server, by purpose. ValueError when its devices cannot split the model."""
    settings, itemsize = config.generation, _itemsize(config.generation.dtype)
    buckets = tuple(sorted(settings.length_buckets)) or default_buckets(config.cache_length)
    longest = buckets[-1]
    placement.check(model, settings.tensor)
    mesh = AbstractMesh((1, 1, settings.tensor), sharding.AXES)
    shapes_of = transformer.param_shapes(model).items()
    weights = itemsize * sum(_shard_size(name, leaf, mesh) for name, leaf in shapes_of)

    def cache(slots: int, *, length: int = longest) -> int:
        return _cache_bytes(model, slots, length=length, dtype=settings.dtype) // settings.tensor

    shapes = PrefillShapes(buckets, min(settings.prefill_rows, settings.slots), settings.prefill_tokens)

    def rows(length: int) -> int:
        return shapes.most(length) * cache(1, length=length)

    def prefill(length: int) -> int:
        split = (model.heads + model.kv_heads) * model.head_size + model.d_ff
        width = 2 * model.d_model + 2 * split // settings.tensor
        return rows(length) + shapes.most(length) * length * itemsize * width

    return {
        "weights": weights,
        "weights of the next version": weights if settings.double_buffer else 0,
        "key/value cache": cache(settings.slots),
        "tokens and state of the slots": settings.slots * (4 * longest + SLOT_STATE),
        "prefill": max(map(prefill, buckets)),
        "prefilled rows that wait": (HELD - 1) * max(map(rows, buckets)),
        "logits": 2 * FLOAT32 * settings.slots * model.vocab_rows,
    }


def host_bytes(config: Config, model: TransformerConfig) -> dict[str, int]:
    """Bytes of the host's memory that weights take on their way to the servers."""
    numbers = sum(math.prod(leaf.shape) for leaf in transformer.param_shapes(model).values())
    version = _itemsize(config.generation.dtype) * numbers
    return {
        "one version of the weights": version,
        f"at most {VERSIONS_ON_HOST} of them, in shared memory": VERSIONS_ON_HOST * version,
    }


def abstract_mesh(config: Config, devices: int) -> AbstractMesh:
    """The trainer's mesh without its devices; 0 = as many as it needs. ValueError when `devices` do not fill it."""
    sizes = _mesh_sizes(config)
    fixed = math.prod(size for size in sizes if size != -1)
    devices = devices or fixed
    if devices % fixed or (-1 not in sizes and devices != fixed):
        raise ValueError(
            f"--devices={devices} do not fill config.trainer.mesh (data, fsdp, tensor)={sizes}, whose sizes must "
            f"multiply to that number; try --devices={fixed}, or data=-1"
        )
    return AbstractMesh(tuple(devices // fixed if size == -1 else size for size in sizes), sharding.AXES)


def _mesh_sizes(config: Config) -> tuple[int, int, int]:
    mesh = config.trainer.mesh
    return mesh.data, mesh.fsdp, mesh.tensor


def _activations(config: Config, model: TransformerConfig, mesh: AbstractMesh, layout: Layout) -> int:
    """Bytes that a microbatch of the largest shape needs on one device."""
    width = _numbers_per_token(config.trainer.remat, model, mesh.shape["tensor"])
    return round(_microbatch_tokens(layout) * _itemsize(config.trainer.dtype) * width)


def _whole(config: Config, model: TransformerConfig, mesh: AbstractMesh) -> int:
    """Bytes of what is whole on a device along the model axis, where the mesh splits rows.

    Of the layers their gathered weights, and once these go, gradients not yet summed. Of tables that train four: the
    gradients of embedding and head, which may be one table, before and after they are summed over the devices.
    """
    if sharding.row_shards(mesh) == 1:
        return 0
    along_tensor = AbstractMesh((1, 1, mesh.shape["tensor"]), sharding.AXES)
    sizes = {name: _shard_size(name, leaf, along_tensor) for name, leaf in transformer.param_shapes(model).items()}
    tables = {name: sizes.pop(name) for name in transformer.VOCAB_AXIS if name in sizes}
    gathered = _itemsize(config.trainer.dtype) if mesh.shape["fsdp"] > 1 else 0  # bytes of a number that is
    if not lora.trainable(model, config.model).trained(tables):
        return gathered * (sum(sizes.values()) + sum(tables.values()))
    counted = 0 if gathered else len(tables)  # with the gradients of a microbatch
    return gathered * sum(sizes.values()) + FLOAT32 * (4 - counted) * tables["embedding"]


def _microbatch_tokens(layout: Layout) -> int:
    """Of the largest shape, on one device."""
    return max(rows // layout.shards * length for rows, length in layout.shapes)


def _numbers_per_token(remat: str, model: TransformerConfig, tensor: int) -> float:
    """How many numbers of activations the backward pass needs at once for each token, all layers together."""
    heads = (model.heads + 2 * model.kv_heads) * model.head_size / tensor
    feed_forward = model.d_ff / tensor
    whole = 4 * model.d_model + 3 * heads + 5 * feed_forward
    # Of a layer that is computed again its input, and what the gradients of the scales of its two norms will sum.
    kept = {"none": whole, "layers": 3 * model.d_model, "dots": 2 * model.d_model + heads + 2 * feed_forward}[remat]
    return (model.layers - 1) * kept + whole


def _shard_size(name: str, leaf: jax.ShapeDtypeStruct, mesh: AbstractMesh) -> int:
    return math.prod(NamedSharding(mesh, sharding.param_spec(name, leaf.shape, mesh)).shard_shape(leaf.shape))


def _counters(config: Config, shapes: Mapping[str, Any]) -> int:
    """Bytes of what the optimizer holds that is no moment: its step counters."""
    optimizer = state.make_optimizer(config.trainer.optimizer, state.learning_rate(config.trainer.optimizer, 1))
    leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, shapes))
    return sum(leaf.dtype.itemsize for leaf in leaves if leaf.shape == ())


def _cache_bytes(model: TransformerConfig, slots: int, *, length: int, dtype: str) -> int:
    cache = jax.eval_shape(functools.partial(decode.init_cache, model, slots, (length,), dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _count_text(config: Config, model: TransformerConfig) -> str:
    total, embeddings = count(model)
    tied = "one matrix for input and output" if model.tied_embeddings else "input and output"
    return f"model {config.model.path}: {total:,} parameters, {embeddings:,} of them embeddings ({tied})"


def _trained_text(config: Config, model: TransformerConfig) -> str:
    """How many parameters train; nothing where all of them do."""
    trainable = lora.trainable(model, config.model)
    if trainable == lora.EVERYTHING:
        return ""
    held = trainable.shapes(transformer.param_shapes(dataclasses.replace(model, padded_vocab=0)))
    trained = sum(math.prod(leaf.shape) for leaf in trainable.trained(held).values())
    how = f"adapters of rank {trainable.rank} on {len(trainable.adapted)} kernels" if trainable.adapted else "the rest"
    return f"; {trained:,} train ({how}), {len(trainable.frozen)} arrays of the model are frozen"


def _section(title: str, parts: Mapping[str, int]) -> str:
    lines = [f"  {'~' if name in ESTIMATED else ' '} {_text(size)}  {name}" for name, size in parts.items() if size]
    total = [] if title == "host" else [f"    {_text(sum(parts.values()))}  together"]
    return "\n".join([title, *lines, *total])


def _text(size: int) -> str:
    return f"{size / 2**30:9.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:9.2f} MiB"
