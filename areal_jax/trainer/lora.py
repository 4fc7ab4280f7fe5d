"""What of a model trains: all of it, all but frozen parameters, or low-rank adapters on some of its kernels.

In: `model.lora` and `model.freeze` of the config, and the names of the model's params. Out: `Trainable`, which says
what the train state holds, which part of it has gradient, moments and updates, and how the model is made of it. Called
by the state, the programs (step.py), the readers of checkpoints and the plan; waits for nobody.

LoRA (arXiv 2106.09685): beside a kernel W of the state, which stays as it is, are A ("...lora_a": the axes that the
projection contracts, then the rank) and B ("...lora_b": the rank, then its output axes). Heads keep axes of their own.
The model computes with W + s A B, s = alpha / rank. A begins uniform in +-1/sqrt(n), n the product of the axes that are
contracted (PEFT's initialisation), B with 0: version 0 is the base model.

Forward, the kernels are merged once per program, in float32, and rounded afterwards. Trainer and generation servers so
compute with the same numbers: x W + s (x A) B in bfloat16 is another policy than the one that sampled. Backward, the
product's gradient goes to A and B by s x^T (dy B^T) and s (x A)^T dy, so that dW, which autodiff would make of the
merged kernel, never exists. FLOPs of a kernel [m, n] and T tokens, forward + backward, and bytes beside W:

    the kernel trains, or autodiff of W + s A B   2 T m n + 4 T m n                              dW, 4 m n
    x W + s (x A) B                               2 T m n + 2 T m n + 6 T r (m + n)              none
    here                                          2 T m n + 2 T m n + 4 T r (m + n) + 2 r m n    W + s A B, b m n

with r the rank and b bytes of `trainer.dtype`. In bfloat16 the merged kernel takes the place of the rounded W.
"""

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from areal_jax import config as config_lib
from areal_jax.config import ModelConfig
from areal_jax.models.products import product, product_in_float32
from areal_jax.models.transformer import AnyArray, Params, Projection, Transformer, TransformerConfig, param_shapes

Leaf = TypeVar("Leaf")


@dataclasses.dataclass(frozen=True)
class Trainable:
    """Which params train: those of the state that are not `frozen`."""

    frozen: frozenset[str] = frozenset()  # params of the model
    adapted: tuple[str, ...] = ()  # kernels with an adapter
    rank: int = 0
    scale: float = 1.0  # alpha / rank

    def shapes(self, model: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """The params of the state, for those of the model."""
        adapters = {}
        for kernel in self.adapted:
            shape, inputs = model[kernel].shape, _contracted(kernel)
            a, b = factors(kernel)
            adapters[a] = jax.ShapeDtypeStruct((*shape[:inputs], self.rank), model[kernel].dtype)
            adapters[b] = jax.ShapeDtypeStruct((self.rank, *shape[inputs:]), model[kernel].dtype)
        return {**model, **adapters}

    def trained(self, params: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Those of the state's params, or of anything by their names, that train."""
        return {name: leaf for name, leaf in params.items() if name not in self.frozen}

    def of_model(self, params: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Those of the state's params that are the model's own, without adapters."""
        adapters = {name for kernel in self.adapted for name in factors(kernel)}
        return {name: leaf for name, leaf in params.items() if name not in adapters}

    def _initial_adapters(self, places: Mapping[str, jax.ShapeDtypeStruct], key: Array) -> Params:
        adapters = {}
        for i, kernel in enumerate(self.adapted):
            a, b = factors(kernel)
            bound = math.prod(places[a].shape[:-1]) ** -0.5
            own = jax.random.fold_in(key, i)
            adapters[a] = jax.random.uniform(own, places[a].shape, places[a].dtype, -bound, bound)
            adapters[b] = jnp.zeros(places[b].shape, places[b].dtype)
        return adapters

    def with_adapters(
        self, params: Mapping[str, Array], places: Mapping[str, jax.ShapeDtypeStruct], seed: int
    ) -> dict[str, Array]:
        """The state's params of version 0 for those of the model; adapters, born in place, change nothing yet."""
        if not self.adapted:
            return dict(params)
        shardings = {name: places[name].sharding for kernel in self.adapted for name in factors(kernel)}
        init = jax.jit(lambda key: self._initial_adapters(places, key), out_shardings=shardings)
        return {**params, **init(jax.random.key(seed))}

    def merged(self, params: Mapping[str, Array]) -> Params:
        """The model's params for those of the state, in a program."""
        model = self.of_model(params)
        return model | {kernel: self.merge(model[kernel], *_pair(kernel, params)) for kernel in self.adapted}

    def merge(self, kernel: AnyArray, a: AnyArray, b: AnyArray) -> AnyArray:
        """W + s A B, on the host or inside a program."""
        if isinstance(kernel, np.ndarray):
            return kernel + np.tensordot(self.scale * a, b, 1)
        return kernel + jnp.tensordot(self.scale * a, b, 1, precision="highest")

    def with_low_rank_gradients(self, model: Transformer, params: Mapping[str, Array]) -> Transformer:
        """The model of `merged` params, changed in place so that its gradient goes to the adapters in `params`."""
        for kernel in self.adapted:
            *path, word, _ = kernel.split(".")
            parent: Any = functools.reduce(_part, path, model)
            setattr(parent, word, Adapted(getattr(parent, word), *_pair(kernel, params), self.scale))
        return model


EVERYTHING = Trainable()


def trainable(model_config: TransformerConfig, section: ModelConfig) -> Trainable:
    """What trains of a model under the config's `model` section.

    Raises ValueError for a pattern of `model.freeze` that is no regular expression or matches no parameter, and when
    nothing is left to train.
    """
    names = list(param_shapes(model_config))
    frozen, lora = matching(section.freeze, names), section.lora
    if not lora.rank:
        if frozen == set(names):
            raise ValueError(
                f"config.model.freeze={section.freeze} matches all {len(names)} parameters, so that nothing would "
                "train; leave a pattern out"
            )
        return Trainable(frozen=frozenset(frozen))
    kernels = [name for name in names if name.removesuffix(".kernel").split(".")[-1] in lora.targets]
    adapted = tuple(name for name in kernels if name not in frozen)
    if not adapted:
        raise ValueError(
            f"config.model.freeze={section.freeze} matches all {len(kernels)} kernels of config.model.lora.targets="
            f"{lora.targets}, so that nothing would train; leave a pattern out, or choose other targets"
        )
    return Trainable(frozenset(names), adapted, lora.rank, lora.alpha / lora.rank)


def matching(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names that a pattern matches whole. Raises ValueError for one that cannot, with the names nearest to it."""
    found: set[str] = set()
    for pattern in patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"config.model.freeze: {pattern!r} is no regular expression: {error}; parameters are "
                f"{', '.join(_nearest(pattern, names))}"
            ) from error
        of_pattern = {name for name in names if expression.fullmatch(name)}
        if not of_pattern:
            near = [name for name in names if expression.search(name)][:3]
            hint = f" ({'.*' + pattern + '.*'!r} would match {', '.join(near)})" if near else ""
            raise ValueError(
                f"config.model.freeze: {pattern!r} matches none of the {len(names)} parameters; it must match a whole "
                f"name, and near it are {', '.join(near or _nearest(pattern, names))}{hint}"
            )
        found |= of_pattern
    return found


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)


def facts(section: ModelConfig) -> dict[str, Any]:
    """What a checkpoint must say of it to be read: nothing where all of the model trains."""
    saved, used = dataclasses.asdict(section), {"lora": section.lora.rank, "freeze": section.freeze}
    return {name: saved[name] for name in used if used[name]}


def of_facts(model_config: TransformerConfig, saved: Mapping[str, Any]) -> Trainable:
    """What `facts`, among others in `saved`, say."""
    section = {name: saved[name] for name in ("lora", "freeze") if name in saved}
    return trainable(model_config, config_lib.build({"model": section}).model)


def factors(kernel: str) -> tuple[str, str]:
    """The names of A and B of a kernel."""
    stem = kernel.removesuffix("kernel")
    return f"{stem}lora_a", f"{stem}lora_b"


def _pair(kernel: str, params: Mapping[str, Leaf]) -> tuple[Leaf, Leaf]:
    a, b = factors(kernel)
    return params[a], params[b]


def _contracted(kernel: str) -> int:
    """How many of a kernel's axes its projection contracts: heads and head size where heads are mixed, else one."""
    return 2 if kernel.endswith("out.kernel") else 1


def _part(module: Any, name: str) -> Any:
    return module[int(name)] if name.isdigit() else getattr(module, name)


class Adapted(nnx.Module):
    """A projection whose kernel is merged already, and whose gradient goes to A and B."""

    def __init__(self, projection: Projection, a: Array, b: Array, scale: float):
        self.projection = projection
        self.a, self.b = nnx.Param(a), nnx.Param(b)
        self.scale = scale

    def __call__(self, x: Array) -> Array:
        out = _project(self.scale, x, self.projection.kernel[...], self.a[...], self.b[...])
        bias = self.projection.bias
        return out if bias is None else out + bias[...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(scale: float, x: Array, kernel: Array, a: Array, b: Array) -> Array:
    """x K for K = W + s A B, as a function of x, A and B; `x` has axes of tokens before those that K contracts."""
    del scale, b
    return product(x, kernel, a.ndim - 1)


def _project_forward(scale: float, x: Array, kernel: Array, a: Array, b: Array) -> tuple[Array, Any]:
    return _project(scale, x, kernel, a, b), (x, kernel, a, b)


def _project_backward(scale: float, saved: Any, out: Array) -> tuple[Array, None, Array, Array]:
    """dx = dy K^T, dA = s x^T (dy B^T), dB = s (x A)^T dy; `out` is dy. K gets none: what trains of it is A and B."""
    x, kernel, a, b = saved
    inputs, outputs = a.ndim - 1, b.ndim - 1
    tokens = x.ndim - inputs
    dx = product(out, _turned(kernel, inputs), outputs)
    down = product(x, a.astype(x.dtype), inputs)  # x A, [tokens, rank]
    up = product(out, _turned(b.astype(x.dtype), 1), outputs)  # dy B^T, [tokens, rank]
    da = scale * product_in_float32(_turned(x, tokens), up, tokens)
    db = scale * product_in_float32(_turned(down, tokens), out, tokens)
    return dx, None, da.astype(a.dtype), db.astype(b.dtype)


def _turned(array: Array, first: int) -> Array:
    """The array with its `first` axes behind the others: the transpose of a matrix that has several axes on a side."""
    return jnp.transpose(array, (*range(first, array.ndim), *range(first)))


_project.defvjp(_project_forward, _project_backward)
