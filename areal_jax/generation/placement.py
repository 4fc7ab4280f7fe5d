"""Where the arrays of a generation server live: on one device, or split over several by heads.

In: the shape of a model and `generation.tensor`. Out: a mesh (1 x 1 x tensor) and the shardings on it. Called by the
engine. Weights are split as the trainer's are (models/sharding.py), the cache by key/value heads; tokens, lengths and
all other bookkeeping are on every device.

Shapes: S slots, B rows, L tokens, K key/value heads, H head size, V vocabulary.
"""

import math
from collections.abc import Sequence

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.models import sharding
from areal_jax.models.kv_cache import CacheLayout
from areal_jax.models.transformer import TransformerConfig, param_shapes

ROWS = PartitionSpec(None, None, "tensor", None)  # [B, L, K, H] of a prefill


def make_mesh(config: TransformerConfig, tensor: int, devices: Sequence[jax.Device]) -> Mesh:
    """The first `tensor` devices. Raises ValueError when there are fewer, and as `check` does."""
    if tensor > len(devices):
        raise ValueError(
            f"generation.tensor={tensor} splits a server over that many devices, and this process has {len(devices)}; "
            f"set it to at most {len(devices)}"
        )
    check(config, tensor)
    return sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": tensor}, devices[:tensor])


def check(config: TransformerConfig, tensor: int) -> None:
    """Raises ValueError when `tensor` devices cannot split this model into equal parts."""
    sizes = {
        "attention heads": config.heads,
        "key/value heads": config.kv_heads,
        "feed-forward numbers": config.d_ff,
        "rows of the vocabulary": config.vocab_rows,
    }
    for what, size in sizes.items():
        if size % tensor:
            common = math.gcd(config.heads, config.kv_heads, config.d_ff)
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ValueError(
                f"generation.tensor={tensor} must divide the model's {size} {what}, as every device holds an equal "
                f"part of them; heads and feed-forward of this model can be split by {fitting}"
            )


def weights(config: TransformerConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    return sharding.param_shardings(param_shapes(config), mesh)


def rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, ROWS)


def cache(mesh: Mesh, layout: CacheLayout) -> NamedSharding:
    return NamedSharding(mesh, layout.spec())


def cache_dtype(config: TransformerConfig, dtype: str, platform: str) -> str:
    """What keys and values are kept in: numbers of `dtype`, on a CPU in the bytes of float32.

    To write one token into a bfloat16 cache, XLA's CPU backend makes float32 of the whole of it and bfloat16 again. Not
    so where batch-invariant products are to give the trainer's bits, whose keys are bfloat16.
    """
    return "float32" if platform == "cpu" and config.kernels != "batch_invariant" else dtype


def gather_logits(logits_SV: Array, mesh: Mesh) -> Array:
    """Logits [S, V] that are split by vocabulary, on every device, so that all draw the same tokens from them.

    Said in two steps: asked only for whole logits, the partitioner gathers the weights of the head instead.
    """
    split_SV = jax.lax.with_sharding_constraint(logits_SV, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    return jax.lax.with_sharding_constraint(split_SV, everywhere(mesh))


def everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, sharding.REPLICATED)
