"""Models in and out of the Hugging Face format: `config.json` and `*.safetensors`.

In: a directory. Out: `TransformerConfig` and params on the host, or the reverse. What the transformer cannot express is
refused by name, never ignored.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16", which safetensors needs)
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from areal_jax.models.transformer import TransformerConfig, param_shapes

# model_type -> what its config.json does not spell out
FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def load_model(path: str | pathlib.Path) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    """The model of a directory. Raises FileNotFoundError or ValueError that name what is missing or unsupported."""
    directory = pathlib.Path(path)
    config = load_config(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"model.path={directory}: no *.safetensors file there; it needs the weights beside config.json"
        )
    shapes = param_shapes(config)
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        with safe_open(file, "np") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})
    params = {}
    for name, theirs, transpose in _names(config):
        if theirs not in tensors:
            raise ValueError(f"model.path={directory}: the weights lack {theirs}, which config.json implies")
        tensor = tensors.pop(theirs)
        params[name] = (tensor.T if transpose else tensor).reshape(shapes[name].shape)
    left = sorted(set(tensors) - ({"lm_head.weight"} if config.tied_embeddings else set()))
    if left:
        raise ValueError(
            f"model.path={directory}: the weights hold tensors that this model has no place for: {left[:5]}"
        )
    return config, params


def save_model(path: str | pathlib.Path, config: TransformerConfig, params: Mapping[str, Any]) -> None:
    """Writes `config.json` and `model.safetensors`; `load_model` gives back the same bits."""
    directory = pathlib.Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    shapes = param_shapes(config)
    tensors = {}
    for name, theirs, transpose in _names(config):
        array = np.asarray(params[name])
        assert array.shape == shapes[name].shape, (name, array.shape, shapes[name].shape)
        tensors[theirs] = np.ascontiguousarray(
            _matrix(array, name).T if transpose else array.reshape(-1) if "bias" in name else array
        )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(
        json.dumps(_config_dict(config, next(iter(tensors.values())).dtype), indent=2) + "\n"
    )


def load_config(directory: pathlib.Path) -> TransformerConfig:
    """The transformer that a `config.json` describes."""
    file = directory / "config.json"
    if not file.exists():
        raise FileNotFoundError(
            f"model.path={directory}: no config.json there; give a directory in the Hugging Face format (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    raw = json.loads(file.read_text())
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type={family!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        "rope type": (rope_type, rope_type not in ("default", None)),
        "hidden_act": (raw.get("hidden_act"), raw.get("hidden_act", "silu") != "silu"),
        "use_sliding_window": (True, bool(raw.get("use_sliding_window"))),
        "mlp_bias": (True, bool(raw.get("mlp_bias"))),
        "attention_bias": (True, bool(raw.get("attention_bias"))),
    }
    for field, (value, is_refused) in refused.items():
        if is_refused:
            raise ValueError(f"{file}: {field}={value!r} is not supported; the model would compute something else")
    heads = raw["num_attention_heads"]
    return TransformerConfig(
        vocab_size=raw["vocab_size"],
        d_model=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
        d_ff=raw["intermediate_size"],
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        norm_eps=raw["rms_norm_eps"],
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_positions=raw["max_position_embeddings"],
        **FAMILIES[family],
    )


def _config_dict(config: TransformerConfig, dtype: Any) -> dict[str, Any]:
    """What `load_config` reads, in the words of both transformers 4 and 5."""
    family = next(
        (f for f, flags in FAMILIES.items() if all(getattr(config, name) == value for name, value in flags.items())),
        None,
    )
    if family is None:
        raise ValueError(f"no Hugging Face family has qkv_bias={config.qkv_bias} and qk_norm={config.qk_norm}")
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        "torch_dtype": str(dtype),
    }


def _names(config: TransformerConfig) -> Iterator[tuple[str, str, bool]]:
    """(our name, Hugging Face's name, whether theirs is transposed): torch's Linear is [out, in]."""
    yield "embedding", "model.embed_tokens.weight", False
    yield "norm.scale", "model.norm.weight", False
    if not config.tied_embeddings:
        yield "head.kernel", "lm_head.weight", True
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", False
        yield f"{ours}.feed_forward_norm.scale", f"{theirs}.post_attention_layernorm.weight", False
        for word, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            yield f"{ours}.attention.{word}.kernel", f"{theirs}.self_attn.{letter}_proj.weight", True
            if config.qkv_bias and word != "out":
                yield f"{ours}.attention.{word}.bias", f"{theirs}.self_attn.{letter}_proj.bias", False
            if config.qk_norm and word in ("query", "key"):
                yield f"{ours}.attention.{word}_norm.scale", f"{theirs}.self_attn.{letter}_norm.weight", False
        for word in ("gate", "up", "down"):
            yield f"{ours}.feed_forward.{word}.kernel", f"{theirs}.mlp.{word}_proj.weight", True


def _matrix(array: np.ndarray, name: str) -> np.ndarray:
    """A kernel as [in, out]: head axes are joined with each other, never with the model axis."""
    if array.ndim == 2:
        return array
    return array.reshape(-1, array.shape[-1]) if name.endswith("out.kernel") else array.reshape(array.shape[0], -1)
