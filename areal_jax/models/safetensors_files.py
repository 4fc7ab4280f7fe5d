"""Weights in and out of `*.safetensors` files in the Hugging Face layout, one tensor at a time.

In: a model directory and, for each parameter, the shape, dtype and sharding it shall have. Out: the parameters in their
places; or the reverse, files from parameters. Called by the trainer and the generation servers when they start, and by
`areal_jax.export`. Waits for the disk.

Reading maps a file, and every device gets its own slice of a tensor, transposed and converted while it is copied: the
host holds the slices of one tensor beside what is in its place already, and no device more than its part. The largest
tensors come first, while there is least beside them. Everything is checked by name before anything is read.

Ours and theirs: torch's Linear is [out, in] and its heads are joined, our kernels are [in, out] with an axis of heads.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open

from areal_jax.models.huggingface import config_dict, load_config, tensor_names
from areal_jax.models.transformer import TransformerConfig, param_shapes, strip_rows

DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10**9  # most bytes of tensors in a file, as transformers has it
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_ROWS = 64  # transposed at a time, so that both sides stay in the processor's cache: several times faster

# Tensors that are no parameters of the model, and why they may be left unread.
HARMLESS = {r"rotary_emb\.inv_freq$": "the frequencies of rotary positions, which follow from config.json"}

Bounds = tuple[tuple[int, int], ...]  # (start, stop) along each axis


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies on the disk."""

    file: pathlib.Path
    offset: int  # bytes from the beginning of the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name for it

    def map(self) -> np.ndarray:
        """The whole tensor, mapped: only what is looked at is read. Its pages go with the last reference."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parameter in our shape and in theirs."""

    name: str
    theirs: str
    transposed: bool
    shape: tuple[int, ...]  # ours, without the rows that padding adds

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Our axes that are one axis of theirs: a head's number and its size."""
        if len(self.shape) == 3:
            return ((0, 1), (2,)) if self.name.endswith(("out.kernel", "out.lora_a")) else ((0,), (1, 2))
        if len(self.shape) == 2 and self.name.endswith("bias"):
            return ((0, 1),)
        return tuple((axis,) for axis in range(len(self.shape)))

    @property
    def their_shape(self) -> tuple[int, ...]:
        joined = self.joined(self.shape)
        return joined[::-1] if self.transposed else joined

    def joined(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Our shape, or that of a slice, with the axes of heads joined."""
        return tuple(math.prod(shape[i] for i in group) for group in self.groups)

    def joined_bounds(self, bounds: Bounds) -> Bounds:
        """The same slice with the axes of heads joined; the size of a head must be whole in it."""
        inner = {group[0]: math.prod(self.shape[i] for i in group[1:]) for group in self.groups}
        assert all(bounds[i] == (0, self.shape[i]) for group in self.groups for i in group[1:]), (self, bounds)
        return tuple((bounds[first][0] * size, bounds[first][1] * size) for first, size in inner.items())


def layouts(config: TransformerConfig) -> list[Layout]:
    """All parameters of a model, the largest first."""
    shapes = param_shapes(dataclasses.replace(config, padded_vocab=0))
    found = [Layout(name, theirs, turned, shapes[name].shape) for name, theirs, turned in tensor_names(config)]
    return sorted(found, key=lambda layout: -math.prod(layout.shape))


# Reading.


def read_params(
    directory: pathlib.Path, config: TransformerConfig, places: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    """The parameters of a directory, each born in the shape, dtype and sharding that `places` has for it.

    They belong to the caller, who may donate them. Rows that `config.padded_vocab` adds are 0. Raises FileNotFoundError
    or ValueError, before anything is read, for what `find_tensors` refuses.
    """
    tensors = find_tensors(directory, config)
    return {layout.name: _read(tensors[layout.theirs], layout, places[layout.name]) for layout in layouts(config)}


def load_model(path: str | pathlib.Path) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    """A model whole on the host, in the dtypes of its files: for tests and experiments. Raises as `read_params`."""
    directory = pathlib.Path(path)
    config = load_config(directory)
    tensors = find_tensors(directory, config)
    params = {}
    for layout in layouts(config):
        tensor = tensors[layout.theirs]
        params[layout.name] = _read_slice(tensor, layout, tuple((0, n) for n in layout.shape), DTYPES[tensor.dtype])
    return config, params


def _read(tensor: Tensor, layout: Layout, place: jax.ShapeDtypeStruct) -> Array:
    read = functools.cache(lambda bounds: _read_slice(tensor, layout, bounds, place.dtype))  # once for all its replicas

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "a device of this process"
        return read(tuple(axis.indices(size)[:2] for axis, size in zip(index, place.shape, strict=True)))

    return jax.make_array_from_callback(place.shape, place.sharding, part)


def _read_slice(tensor: Tensor, layout: Layout, bounds: Bounds, dtype: Any) -> np.ndarray:
    """A slice of a parameter in our shape, 0 where `bounds` reach beyond what the file has."""
    out = np.zeros([stop - start for start, stop in bounds], dtype)
    held = tuple((min(start, n), min(stop, n)) for (start, stop), n in zip(bounds, layout.shape, strict=True))
    joined = layout.joined_bounds(held)
    ours = out.reshape(layout.joined(out.shape))[tuple(slice(stop - start) for start, stop in joined)]
    theirs = tuple(slice(*limits) for limits in joined)
    _turn(layout, tensor.map()[theirs[::-1] if layout.transposed else theirs], ours)
    return out


def _turn(layout: Layout, source: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` with a slice in our form from one in theirs, or the reverse, converting the dtype on the way."""
    if not layout.transposed:
        out[...] = source
        return
    for row in range(0, len(source), BLOCK_ROWS):
        out[:, row : row + BLOCK_ROWS] = source[row : row + BLOCK_ROWS].astype(out.dtype).T


# What is there.


def find_tensors(directory: pathlib.Path, config: TransformerConfig) -> dict[str, Tensor]:
    """The tensors of a directory by their own names, fit for `config`.

    Raises FileNotFoundError for files that are not there, ValueError for a file that is torn, a tensor that is there
    twice, is missing, has no place in the model, or has another shape or dtype than can be read.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise ValueError(
                    f"model.path={directory}: {name} is in {tensors[name].file.name} and in {file.name}; one of them "
                    "is left over from another model: remove it"
                )
            tensors[name] = tensor
    wanted = {layout.theirs: layout.their_shape for layout in layouts(config)}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(
            f"model.path={directory}: the weights lack {', '.join(missing[:5])}{_and_more(missing)}, which config.json "
            "implies; the files are incomplete or those of another model"
        )
    for name, shape in wanted.items():
        _check_tensor(name, tensors[name], shape)
    _check_rest(directory, config, tensors.keys() - wanted.keys(), tensors)
    return {name: tensors[name] for name in wanted}


def stored_dtype(directory: pathlib.Path) -> str:
    """The dtype of a directory's embedding, "float32", "bfloat16" or "float16"."""
    for file in weight_files(directory):
        tensor = _read_header(file).get("model.embed_tokens.weight")
        if tensor is not None:
            return np.dtype(DTYPES[tensor.dtype]).name
    raise ValueError(f"model.path={directory}: the weights lack model.embed_tokens.weight")


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """`model.safetensors`, or the files that the index names, or (where there is neither) all `*.safetensors`.

    The order is that of transformers: other files may lie beside them, such as Mistral's consolidated.safetensors.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.exists():
        return [single]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if absent := [name for name in names if not (directory / name).exists()]:
            raise FileNotFoundError(
                f"model.path={directory}: {INDEX} names {len(names)} files, of which {', '.join(absent[:5])}"
                f"{_and_more(absent)} are not there; download them again"
            )
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        raise FileNotFoundError(
            f"model.path={directory}: no *.safetensors file there; it needs the weights beside config.json (there are: "
            f"{', '.join(there[:10]) or 'no files'}). Weights in another format become such files by transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
        )
    return files


def _read_header(file: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a file; the safetensors library judges whether header and length agree."""
    try:
        with safe_open(file, "np"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{file}: no whole safetensors file ({error}); it has {file.stat().st_size} bytes. Download it again; one "
            "of some hundred bytes may be a Git LFS pointer, which `git lfs pull` replaces"
        ) from error
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return {
        name: Tensor(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


def _check_rest(
    directory: pathlib.Path, config: TransformerConfig, rest: Collection[str], tensors: Mapping[str, Tensor]
) -> None:
    """Refuses tensors that are no parameters of the model, but for those known to be harmless."""
    left = sorted(name for name in rest if not any(re.search(pattern, name) for pattern in HARMLESS))
    if config.tied_embeddings and "lm_head.weight" in left:
        left.remove("lm_head.weight")
        _check_tied(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    if left:
        raise ValueError(
            f"model.path={directory}: the weights hold tensors that this model has no place for: "
            f"{', '.join(left[:5])}{_and_more(left)}; without them it would compute something else"
        )


def _check_tied(head: Tensor, embedding: Tensor) -> None:
    """An LM head that is stored although it is tied must be the embedding, or one of the two would be lost."""
    if (head.shape, head.dtype) == (embedding.shape, embedding.dtype):
        head_VD, embedding_VD = head.map(), embedding.map()
        rows = range(0, len(head_VD), 4096)
        if all(np.array_equal(head_VD[r : r + 4096], embedding_VD[r : r + 4096]) for r in rows):
            return
    raise ValueError(
        f"{head.file}: lm_head.weight is not the same as model.embed_tokens.weight, although config.json says "
        'tie_word_embeddings; set "tie_word_embeddings": false there if the head is one of its own'
    )


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{tensor.file}: {name} has shape {tensor.shape}, and config.json implies {shape}; the two belong to "
            "different models"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{tensor.file}: {name} has dtype {tensor.dtype}; only {', '.join(DTYPES)} can be read: quantised weights "
            "must be dequantised first"
        )


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


# Writing.


def save_model(path: str | pathlib.Path, config: TransformerConfig, params: Mapping[str, Any]) -> None:
    """Writes a directory that appears whole or not at all; `load_model` gives back the same bits.

    Raises FileExistsError when there is one that is not empty.
    """
    with new_directory(pathlib.Path(path)) as directory:
        write_params(directory, config, params)


@contextlib.contextmanager
def new_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory to fill, which gets its name `path` when the block ends without an error, and is removed otherwise.

    Raises FileExistsError when `path` exists and is not empty.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not empty; choose another directory, or remove that one")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_params(
    directory: pathlib.Path,
    config: TransformerConfig,
    params: Mapping[str, Any],
    *,
    dtype: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> list[pathlib.Path]:
    """Writes `config.json` and the weights into a directory; returns the files of weights.

    `params` is asked for one parameter at a time, so that it may read or fetch them when asked: the host holds one.
    `dtype` is "float32", "bfloat16" or, empty, what each parameter has. More than `shard_bytes` bytes go to several
    files with an index. Rows that `config.padded_vocab` adds are not written.
    """
    found = layouts(config)
    dtypes = {layout.name: np.dtype(dtype or params[layout.name].dtype) for layout in found}
    shards = _shards(found, dtypes, shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, config, params, shard, dtypes)
    if len(shards) > 1:
        of_tensor = {layout.theirs: name for name, shard in zip(names, shards, strict=True) for layout in shard}
        total = sum(_bytes(layout, dtypes) for shard in shards for layout in shard)
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": of_tensor})
    _write_json(directory / "config.json", config_dict(config, dtypes["embedding"]))
    return [directory / name for name in names]


def _bytes(layout: Layout, dtypes: Mapping[str, np.dtype]) -> int:
    return math.prod(layout.shape) * dtypes[layout.name].itemsize


def _shards(found: Sequence[Layout], dtypes: Mapping[str, np.dtype], limit: int) -> list[list[Layout]]:
    """The parameters in order, a new file whenever the next one would exceed `limit` bytes."""
    shards: list[list[Layout]] = []
    room = 0
    for layout in found:
        size = _bytes(layout, dtypes)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(layout)
        room -= size
    return shards


def write_file(
    file: pathlib.Path,
    config: TransformerConfig,
    params: Mapping[str, Any],
    shard: Sequence[Layout],
    dtypes: Mapping[str, np.dtype],
) -> None:
    """Writes the safetensors format: length of the header, header in JSON padded to 8 bytes, the tensors in a row."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for layout in shard:
        begin, end = end, end + _bytes(layout, dtypes)
        dtype = DTYPE_NAMES[dtypes[layout.name]]
        header[layout.theirs] = {"dtype": dtype, "shape": layout.their_shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for layout in shard:
            array = strip_rows(layout.name, np.asarray(params[layout.name]), config)
            assert array.shape == layout.shape, (layout, array.shape)
            theirs = np.empty(layout.their_shape, dtypes[layout.name])
            _turn(layout, array.reshape(layout.joined(layout.shape)), theirs)
            handle.write(theirs.reshape(-1).view(np.uint8).data)


def _write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
