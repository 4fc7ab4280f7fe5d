"""Attention kernels that JAX brings, by backend, each with the rule of what it takes.

    backend   prefilled rows                packed rows                        decode
    CPU       plain                         plain                              plain
    CUDA      cuDNN flash attention         Pallas `mha` with segment ids      Pallas `gqa`, slots with lengths
    TPU       splash attention              splash attention, segment ids      plain

cuDNN is asked through `jax.nn.dot_product_attention`, which has no segment ids, and whose mask would be an array of
L * L numbers per row: so packed rows go through Pallas. JAX's decode kernels for the TPU want a paged cache, and the
cache of a slot is one piece.

In: a choice of the config and a mesh. Out: `attention.Kernels` for programs on that mesh. Called by the trainer's
programs and the generation engine. Kernels are imported when they are used: on a CPU nobody pays for Triton.

No kernel is given float32: accelerators multiply it at reduced precision inside kernels, where
`jax_default_matmul_precision` does not reach.

Shapes: B rows, L tokens, S slots, C cached tokens, N query heads, K key/value heads, H head size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from areal_jax.models import batch_invariant
from areal_jax.models.attention import Kernel, Kernels
from areal_jax.models.kv_cache import HEADS_FIRST
from areal_jax.models.tiled_attention import Tile

LARGE_TILE = Tile(512, 512)  # of the plain form: an accelerator would spend small ones on starting programs
TILE = 128  # tokens: Pallas' `mha` and `gqa` step by it, and it is the width of a TPU register
SPLASH_BLOCKS = (512, 256, 128)  # the largest that divides the row is taken
DECODE_SPLITS = (16, 8, 4, 2, 1)  # parts of a cache that are read side by side; likewise
HOPPER = 9.0  # CUDA compute capability from which on cuDNN takes heads of 256


def kernels_for(choice: str, mesh: Mesh) -> Kernels:
    """The kernels for programs on `mesh`: "auto" = those of its backend, "plain" = none, or "batch_invariant"."""
    if choice == "batch_invariant":
        return batch_invariant.kernels_for(mesh)
    device = mesh.devices.flat[0]
    if device.platform not in ("gpu", "tpu"):
        return Kernels(mesh=mesh)
    if choice == "plain":
        return Kernels(mesh=mesh, tile=LARGE_TILE)
    if device.platform == "tpu":
        return tpu_kernels(mesh)
    if "cuda" not in device.client.platform_version:  # ROCm has no cuDNN, and nobody has tried Triton's kernels there
        return Kernels(mesh=mesh, tile=LARGE_TILE)
    return gpu_kernels(mesh, longest_head=256 if float(device.compute_capability) >= HOPPER else 128)


def gpu_kernels(mesh: Mesh, *, longest_head: int) -> Kernels:
    refusal = functools.partial(_cudnn_refusal, longest_head=longest_head)
    return Kernels(
        causal=Kernel("cuDNN flash attention", refusal, cudnn_causal),
        packed=Kernel("Pallas mha", _triton_packed_refusal, triton_packed),
        decode=Kernel("Pallas gqa", _triton_decode_refusal, triton_decode),
        cache=HEADS_FIRST,
        mesh=mesh,
        tile=LARGE_TILE,
    )


def tpu_kernels(mesh: Mesh) -> Kernels:
    return Kernels(
        causal=Kernel("splash attention", _splash_refusal, splash_causal),
        packed=Kernel("splash attention", _splash_refusal, splash_packed),
        mesh=mesh,
        tile=LARGE_TILE,
    )


# CUDA.


def cudnn_causal(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array) -> Array:
    """`attention.causal_attention` by cuDNN."""
    return jax.nn.dot_product_attention(query_BLNH, key_BLKH, value_BLKH, is_causal=True, implementation="cudnn")


def triton_packed(
    query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, segment_ids_BL: Array, *, interpret: bool = False
) -> Array:
    """`attention.packed_attention` by Pallas' Triton kernel, which knows no groups: keys and values are repeated."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    N, H = query_BLNH.shape[2:]
    key_BLNH, value_BLNH = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (key_BLKH, value_BLKH))
    return mha(query_BLNH, key_BLNH, value_BLNH, segment_ids_BL, sm_scale=H**-0.5, causal=True, interpret=interpret)


def triton_decode(
    query_SNH: Array, key_SKCH: Array, value_SKCH: Array, lengths_S: Array, *, interpret: bool = False
) -> Array:
    """`attention.decode_attention` over the first `lengths` tokens of each slot, by Pallas' Triton kernel.

    It is given tokens first, and turns that round to what it reads: heads first, as the cache lies. So nothing moves.
    """
    from jax.experimental.pallas.ops.gpu.decode_attention import gqa

    C = key_SKCH.shape[2]
    splits = _decode_splits(C)
    return gqa(
        query_SNH,
        jnp.swapaxes(key_SKCH, 1, 2),
        jnp.swapaxes(value_SKCH, 1, 2),
        kv_seq_len=lengths_S,
        block_k=min(TILE, C // splits),
        k_splits=splits,
        interpret=interpret,
    )


def _cudnn_refusal(query_BLNH: Array, key_BLKH: Array, *, longest_head: int) -> str:
    """`check_is_flash_attention` of jax._src.cudnn, without a bias."""
    H = query_BLNH.shape[-1]
    if H % 8 or H > longest_head:
        return f"its heads are multiples of 8 up to {longest_head} on this GPU, and the model's have {H}"
    return _type_refusal(query_BLNH, key_BLKH)


def _triton_packed_refusal(query_BLNH: Array, key_BLKH: Array) -> str:
    L, H = query_BLNH.shape[1], query_BLNH.shape[3]
    if not _tiles(L) or L < 32:
        return f"its rows are multiples of {TILE} tokens, or 32 or 64, and this one has {L}"
    if H < 16:
        return f"its heads have 16 numbers or more, and the model's have {H}"
    return _type_refusal(query_BLNH, key_BLKH)


def _triton_decode_refusal(query_SNH: Array, key_SKCH: Array) -> str:
    C, H = key_SKCH.shape[2], query_SNH.shape[-1]
    if not _tiles(C):
        return f"its caches are multiples of {TILE} tokens, or 16, 32 or 64, and generation.length_buckets end at {C}"
    if not _is_power(H) or H < 16:
        return f"its heads have a power of two from 16 on as size, and the model's have {H}"
    return _type_refusal(query_SNH, key_SKCH)


def _decode_splits(length: int) -> int:
    """Into how many parts a cache is split that go side by side, each a whole number of tiles."""
    return next(n for n in DECODE_SPLITS if length % n == 0 and length // n >= 16 and _tiles(length // n))


def _tiles(length: int) -> bool:
    return length % TILE == 0 or (16 <= length < TILE and _is_power(length))


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _type_refusal(query: Array, key: Array) -> str:
    if query.dtype != key.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes 16-bit numbers only, and queries are {query.dtype}, keys {key.dtype}"
    return ""


# TPU.


def splash_packed(
    query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, segment_ids_BL: Array, *, interpret: bool = False
) -> Array:
    """`attention.packed_attention` by splash attention."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    kernel = _splash(query_BLNH.shape[2], query_BLNH.shape[1], interpret)

    def of_row(query_NLH: Array, key_KLH: Array, value_KLH: Array, segment_ids_L: Array) -> Array:
        return kernel(query_NLH, key_KLH, value_KLH, SegmentIds(segment_ids_L, segment_ids_L))

    scaled_BLNH = query_BLNH * query_BLNH.shape[-1] ** -0.5
    query_BNLH, key_BKLH, value_BKLH = (jnp.swapaxes(x, 1, 2) for x in (scaled_BLNH, key_BLKH, value_BLKH))
    return jnp.swapaxes(jax.vmap(of_row)(query_BNLH, key_BKLH, value_BKLH, segment_ids_BL), 1, 2)


def splash_causal(query_BLNH: Array, key_BLKH: Array, value_BLKH: Array, *, interpret: bool = False) -> Array:
    """`attention.causal_attention` by splash attention."""
    one_segment_BL = jnp.ones(query_BLNH.shape[:2], jnp.int32)
    return splash_packed(query_BLNH, key_BLKH, value_BLKH, one_segment_BL, interpret=interpret)


def _splash_refusal(query_BLNH: Array, key_BLKH: Array) -> str:
    L, H = query_BLNH.shape[1], query_BLNH.shape[3]
    if L % TILE:
        return f"its rows are multiples of {TILE} tokens, and this one has {L}"
    if H % 64:
        return f"its heads are multiples of 64, and the model's have {H}"
    return _type_refusal(query_BLNH, key_BLKH)


def _splash(heads: int, length: int, interpret: bool) -> Any:
    """The kernel for causal rows of one length; its tables of which blocks to visit are made on the host."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)
    return splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
