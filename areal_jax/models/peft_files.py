"""A LoRA adapter in the format of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

In: the factors A and B of each adapted kernel by their names in the train state. Out: a directory from which
`PeftModel.from_pretrained(base, DIR)` and servers that take adapters add alpha / rank * B A to the base model. Called
by `areal_jax.export --adapter`. Waits for the disk.

Theirs, as torch has it, are the transposes: lora_A [rank, in] and lora_B [out, rank], heads joined.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.models.safetensors_files import Layout, layouts, write_file
from areal_jax.models.transformer import TransformerConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor: where PEFT's own classes hold the model


def write_adapter(
    directory: pathlib.Path,
    config: TransformerConfig,
    params: Mapping[str, Any],
    kernels: Sequence[str],
    *,
    alpha: float,
    base: str,
    dtype: str,
) -> None:
    """Writes both files. `params` has "...lora_a" and "...lora_b" beside each of `kernels`, all of the same rank.

    `base` is the name or path of the model that the adapter is for, as PEFT notes it.
    """
    found = [each for layout in layouts(config) if layout.name in kernels for each in factor_layouts(layout, params)]
    write_file(directory / WEIGHTS, config, params, found, {each.name: np.dtype(dtype) for each in found})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": found[0].shape[-1],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": target_modules(config, kernels),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def factor_layouts(kernel: Layout, params: Mapping[str, Any]) -> tuple[Layout, Layout]:
    """Those of A and of B, for that of their kernel."""
    ours, theirs = kernel.name.removesuffix("kernel"), PREFIX + kernel.theirs.removesuffix("weight")

    def of(our_word: str, their_word: str) -> Layout:
        name = f"{ours}{our_word}"
        return Layout(name, f"{theirs}{their_word}.weight", kernel.transposed, params[name].shape)

    return of("lora_a", "lora_A"), of("lora_b", "lora_B")


def target_modules(config: TransformerConfig, kernels: Sequence[str]) -> list[str]:
    """PEFT's names of the adapted modules: the last word where all layers have them, else each by its whole name."""
    modules = {layout.name: layout.theirs.removesuffix(".weight") for layout in layouts(config)}
    adapted = [modules[name] for name in kernels]
    words = sorted({module.rsplit(".", 1)[-1] for module in adapted})
    return words if len(adapted) == len(words) * config.layers else sorted(adapted)
