"""Models in the Hugging Face format: `config.json`, and the names of the tensors in its files.

In: a directory. Out: the `TransformerConfig` that its config.json describes, or the reverse. What the transformer
cannot express is refused by name, never ignored, and so is a field of config.json that nobody here has looked at.
Called by `safetensors_files`, which moves the weights themselves, and by whoever only needs the shape. Waits for
nobody.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from areal_jax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A `model_type`: its class in transformers, what its config.json leaves out, and what it must not leave out."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    required: tuple[str, ...] = ()  # fields whose default in transformers is a number of one particular model


FAMILIES = {
    "llama": Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False),
    "mistral": Family(
        "MistralForCausalLM", qkv_bias=False, qk_norm=False, required=("num_key_value_heads", "sliding_window")
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, required=("num_key_value_heads",)),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, required=("num_key_value_heads", "head_dim")),
}

# Every field of a config.json is in exactly one of the following three tables, or it is refused.
READ = (
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
)
# field -> (the values that this transformer computes, the rule)
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the feed-forward is SwiGLU, with silu"),
    "attention_bias": ((False, None), "there are no biases but Qwen2's on query, key and value"),
    "mlp_bias": ((False, None), "the feed-forward has no biases"),
    "use_sliding_window": ((False, None), "every layer sees the whole sequence"),
    "partial_rotary_factor": ((1, None), "rotary positions turn the whole head"),
    "rope_interleaved": ((False, None), "rotary positions turn the two halves of a head, not neighbours"),
    "use_mrope": ((False, None), "positions are those of text, one number a token"),
    "pretraining_tp": ((1, None), "projections are not split; set it to 1, which computes the same up to rounding"),
    "quantization_config": ((None,), "weights are float32, bfloat16 or float16; take the model that is not quantised"),
    "num_local_experts": ((None, 0), "models are dense, without experts"),
    "num_experts": ((None, 0), "models are dense, without experts"),
    "attn_logit_softcapping": ((None,), "attention scores are not capped"),
    "final_logit_softcapping": ((None,), "logits are not capped"),
    "is_encoder_decoder": ((False, None), "models are decoders alone"),
    "add_cross_attention": ((False, None), "models are decoders alone"),
    "pruned_heads": (({}, None), "every layer has all heads"),
    "auto_map": ((None,), "code of a model's own is not run"),
}
# Fields that say nothing about what the model computes from its tokens.
IGNORED = frozenset(
    (
        # where it comes from, and how transformers holds it
        "_name_or_path", "_attn_implementation_autoset", "attn_implementation", "dtype", "torch_dtype",
        "transformers_version", "transformers.js_config", "is_llama_config", "use_cache", "use_bfloat16", "torchscript",
        "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
        "tf_legacy_loss", "unsloth_fixed", "unsloth_version",
        # how it was trained; nothing is dropped out here: the policy sampled is the policy trained
        "initializer_range", "attention_dropout",
        # tokens that begin and end a text: the tokenizer's files and generation_config.json have them
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class",
        "prefix",
        # heads for other tasks
        "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "is_decoder",
        "cross_attention_hidden_size", "tie_encoder_decoder",
        # which layers would have a sliding window, if use_sliding_window, which is refused, were true
        "max_window_layers",
    )
)  # fmt: skip

# rope_type -> {its field: ours}
ROPE_TYPES: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_positions",
    },
}
ROPE_THETA = 10000.0  # of all four families in transformers, where config.json does not say


def load_config(directory: pathlib.Path, *, vocab_multiple: int = 1) -> TransformerConfig:
    """The transformer that a `config.json` describes, its vocabulary's rows rounded up to a multiple.

    `directory` may also be the file itself, under any name.

    Raises FileNotFoundError where there is none, and ValueError that names the field, its value and the rule for what
    this transformer does not compute and for fields that it does not know.
    """
    file = directory if directory.is_file() else directory / "config.json"
    if not file.exists():
        raise FileNotFoundError(
            f"model.path={directory}: no config.json there; give a directory in the Hugging Face format (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no config.json of a model: {error}") from error
    family = _check_family(file, raw)
    _check_fields(file, raw)
    _check_layers(file, raw)
    heads, rows = _size(file, raw, "num_attention_heads"), _size(file, raw, "vocab_size")
    padded = -(-rows // vocab_multiple) * vocab_multiple
    config = TransformerConfig(
        vocab_size=rows,
        d_model=_size(file, raw, "hidden_size"),
        layers=_size(file, raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(file, raw, "num_key_value_heads") if raw.get("num_key_value_heads") is not None else heads,
        head_size=_head_size(file, raw, heads),
        d_ff=_size(file, raw, "intermediate_size"),
        norm_eps=_positive(file, "rms_norm_eps", _given(file, raw, "rms_norm_eps")),
        qkv_bias=FAMILIES[family].qkv_bias,
        qk_norm=FAMILIES[family].qk_norm,
        tied_embeddings=_switch(file, raw, "tie_word_embeddings"),
        max_positions=_size(file, raw, "max_position_embeddings"),
        family=family,
        padded_vocab=padded if padded != rows else 0,
        **_rope(file, raw),
    )
    if config.heads % config.kv_heads or config.head_size % 2:
        raise ValueError(
            f"{file}: num_attention_heads={heads} must be a multiple of num_key_value_heads={config.kv_heads}, and "
            f"head_dim={config.head_size} even"
        )
    return config


def _check_family(file: pathlib.Path, raw: Mapping[str, Any]) -> str:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type={family!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    expected = FAMILIES[family].architecture
    if raw.get("architectures") not in (None, [], [expected]):
        raise ValueError(
            f"{file}: architectures={raw['architectures']!r} is not supported; a model_type={family!r} must be a "
            f"{expected}, a language model with an LM head"
        )
    for field in FAMILIES[family].required:
        if field not in raw:
            raise ValueError(
                f"{file} lacks {field}, for which transformers would take the number of one particular {family} model; "
                "write it into config.json"
            )
    return str(family)


def _check_fields(file: pathlib.Path, raw: Mapping[str, Any]) -> None:
    for field, value in raw.items():
        if field in FIXED:
            allowed, rule = FIXED[field]
            if value not in allowed:
                raise ValueError(f"{file}: {field}={value!r} is not supported: {rule}")
        elif field not in READ and field not in IGNORED:
            raise ValueError(
                f"{file}: {field}={value!r} is not supported: nobody here knows the field. Remove it from "
                "config.json if it changes nothing in what the model computes; if it does, choose another model"
            )


def _check_layers(file: pathlib.Path, raw: Mapping[str, Any]) -> None:
    """Every layer sees the whole sequence: no window, or one that no sequence fills."""
    wrong = set(raw.get("layer_types") or ()) - {"full_attention"}
    if wrong:
        raise ValueError(f"{file}: layer_types={sorted(wrong)} is not supported: every layer sees the whole sequence")
    if raw["model_type"] in ("qwen2", "qwen3"):
        return  # their window is the business of use_sliding_window
    window, positions = raw.get("sliding_window"), _size(file, raw, "max_position_embeddings")
    if window is not None and window < positions:
        raise ValueError(
            f"{file}: sliding_window={window} is not supported below max_position_embeddings={positions}: every layer "
            f"sees the whole sequence. For sequences of at most {window} tokens that is the same: set "
            f"max_position_embeddings to {window}"
        )


def _rope(file: pathlib.Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of the rotary positions, from either spelling: `rope_parameters`, or `rope_theta` + `rope_scaling`."""
    spellings = [raw[field] for field in ("rope_parameters", "rope_scaling") if raw.get(field)] or [{}]
    theta = spellings[0].get("rope_theta", ROPE_THETA) if raw.get("rope_theta") is None else raw["rope_theta"]
    _positive(file, "rope_theta", theta)
    found = [_rope_fields(file, spelling, theta) for spelling in spellings]
    if any(fields != found[0] for fields in found) or float(theta) != found[0]["rope_theta"]:
        raise ValueError(
            f"{file}: rope_theta={raw.get('rope_theta')}, rope_scaling={raw.get('rope_scaling')} and "
            f"rope_parameters={raw.get('rope_parameters')} contradict one another; keep those that are right"
        )
    return found[0]


def _rope_fields(file: pathlib.Path, rope: Mapping[str, Any], theta: float) -> dict[str, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES or rope.get("type", kind) != kind:
        raise ValueError(
            f"{file}: rope_type={kind!r} in {dict(rope)} is not supported; supported are {', '.join(ROPE_TYPES)}. "
            "Where the scaling only serves sequences longer than yours, remove rope_scaling from config.json"
        )
    names = ROPE_TYPES[kind]
    missing = sorted(names.keys() - rope.keys())
    unknown = sorted(rope.keys() - names.keys() - {"rope_type", "type", "rope_theta"})
    if unknown == ["partial_rotary_factor"] and rope["partial_rotary_factor"] == 1:
        unknown = []
    if missing or unknown:
        raise ValueError(
            f"{file}: rotary positions of rope_type={kind!r} have the fields {sorted(names)}, and {dict(rope)} lacks "
            f"{missing} and has {unknown} besides"
        )
    for field in names:
        _positive(file, f"{field} of rope_type={kind!r}", rope[field])
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ValueError(f"{file}: low_freq_factor must be less than high_freq_factor in {dict(rope)}")
    return {"rope_theta": float(rope.get("rope_theta", theta)), "rope_type": kind} | {
        ours: rope[theirs] for theirs, ours in names.items()
    }


def _given(file: pathlib.Path, raw: Mapping[str, Any], field: str) -> Any:
    if raw.get(field) is None:
        raise ValueError(f"{file} lacks {field}, without which the model has no shape; write it into config.json")
    return raw[field]


def _head_size(file: pathlib.Path, raw: Mapping[str, Any], heads: int) -> int:
    """`head_dim`, or the model's width divided among the heads."""
    if raw.get("head_dim") is not None:
        return _size(file, raw, "head_dim")
    width = _size(file, raw, "hidden_size")
    if width % heads:
        raise ValueError(f"{file}: hidden_size={width} is no multiple of num_attention_heads={heads}; give head_dim")
    return width // heads


def _positive(file: pathlib.Path, field: str, value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{file}: {field}={value!r} must be a positive number")
    return value


def _switch(file: pathlib.Path, raw: Mapping[str, Any], field: str) -> bool:
    value = raw.get(field, False)
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {field}={value!r} must be true or false")
    return value


def _size(file: pathlib.Path, raw: Mapping[str, Any], field: str) -> int:
    value = _given(file, raw, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file}: {field}={value!r} must be a positive whole number")
    return value


def config_dict(config: TransformerConfig, dtype: Any) -> dict[str, Any]:
    """What `load_config` reads, in the words of both transformers 4 and 5; the vocabulary without padding."""
    family = _family_of(config)
    names = ROPE_TYPES[config.rope_type]
    scaling = {"rope_type": config.rope_type} | {theirs: getattr(config, ours) for theirs, ours in names.items()}
    return {
        "architectures": [FAMILIES[family].architecture],
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
        "rope_scaling": scaling if names else None,
        "rope_parameters": {"rope_theta": config.rope_theta} | scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        "torch_dtype": str(dtype),
    } | ({"sliding_window": None} if "sliding_window" in FAMILIES[family].required else {})


def _family_of(config: TransformerConfig) -> str:
    """The family that the config names, or the first one with its biases and norms."""
    names = [config.family] if config.family else list(FAMILIES)
    for name in names:
        if (FAMILIES[name].qkv_bias, FAMILIES[name].qk_norm) == (config.qkv_bias, config.qk_norm):
            return name
    raise ValueError(
        f"no Hugging Face family among {names} has qkv_bias={config.qkv_bias} and qk_norm={config.qk_norm}"
    )


def tensor_names(config: TransformerConfig) -> Iterator[tuple[str, str, bool]]:
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
