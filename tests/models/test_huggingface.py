"""config.json to TransformerConfig and back, on the files of the models that people use, as their makers wrote them."""

import json
import pathlib

import pytest

from areal_jax.models.huggingface import FIXED, IGNORED, READ, config_dict, load_config
from areal_jax.models.transformer import TransformerConfig, param_count

LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

# What is on the hub, field by field, in the words of the transformers version that wrote it.
QWEN2P5_1P5B_INSTRUCT = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN2P5_7B = QWEN2P5_1P5B_INSTRUCT | {
    "eos_token_id": 151643, "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
    "max_window_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "sliding_window": 131072,
    "tie_word_embeddings": False, "transformers_version": "4.40.1", "use_mrope": False, "vocab_size": 152064,
}  # fmt: skip
R1_DISTILL_QWEN_1P5B = QWEN2P5_1P5B_INSTRUCT | {
    "eos_token_id": 151643, "max_position_embeddings": 131072, "rope_theta": 10000, "sliding_window": 4096,
    "tie_word_embeddings": False, "transformers_version": "4.44.0", "use_mrope": False,
}  # fmt: skip
QWEN3_0P6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA3P2_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
R1_DISTILL_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_SCALING | {"factor": 8.0}, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MISTRAL_7B_V0P3 = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
    "use_cache": True, "vocab_size": 32768,
}  # fmt: skip

# The config that it means, and the number of parameters that the model's page gives.
EXPECTED = {
    "qwen2.5-1.5b-instruct": (
        QWEN2P5_1P5B_INSTRUCT,
        TransformerConfig(
            151936, 1536, 28, 12, 2, 128, 8960, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied_embeddings=True,
            max_positions=32768, family="qwen2",
        ),
        1_543_714_304,
    ),
    "qwen2.5-7b": (
        QWEN2P5_7B,
        TransformerConfig(
            152064, 3584, 28, 28, 4, 128, 18944, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, max_positions=131072,
            family="qwen2",
        ),
        7_615_616_512,
    ),
    "r1-distill-qwen-1.5b": (
        R1_DISTILL_QWEN_1P5B,
        TransformerConfig(
            151936, 1536, 28, 12, 2, 128, 8960, rope_theta=1e4, norm_eps=1e-6, qkv_bias=True, max_positions=131072,
            family="qwen2",
        ),
        1_777_088_000,
    ),
    "qwen3-0.6b": (
        QWEN3_0P6B,
        TransformerConfig(
            151936, 1024, 28, 16, 8, 128, 3072, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_embeddings=True,
            max_positions=40960, family="qwen3",
        ),
        596_049_920,
    ),
    "llama-3.2-1b": (
        LLAMA3P2_1B,
        TransformerConfig(
            128256, 2048, 16, 32, 8, 64, 8192, rope_theta=5e5, norm_eps=1e-5, tied_embeddings=True,
            max_positions=131072, family="llama", rope_type="llama3", rope_factor=32.0, rope_low_freq_factor=1.0,
            rope_high_freq_factor=4.0, rope_original_positions=8192,
        ),
        1_235_814_400,
    ),
    "r1-distill-llama-8b": (
        R1_DISTILL_LLAMA_8B,
        TransformerConfig(
            128256, 4096, 32, 32, 8, 128, 14336, rope_theta=5e5, norm_eps=1e-5, max_positions=131072, family="llama",
            rope_type="llama3", rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
            rope_original_positions=8192,
        ),
        8_030_261_248,
    ),
    "smollm2-135m": (
        SMOLLM2_135M,
        TransformerConfig(
            49152, 576, 30, 9, 3, 64, 1536, rope_theta=1e5, norm_eps=1e-5, tied_embeddings=True, max_positions=8192,
            family="llama",
        ),
        134_515_008,
    ),
    "mistral-7b-v0.3": (
        MISTRAL_7B_V0P3,
        TransformerConfig(
            32768, 4096, 32, 32, 8, 128, 14336, rope_theta=1e6, norm_eps=1e-5, max_positions=32768, family="mistral",
        ),
        7_248_023_552,
    ),
}  # fmt: skip
RAW = {raw["model_type"]: raw for raw in (QWEN2P5_7B, QWEN3_0P6B, R1_DISTILL_LLAMA_8B, MISTRAL_7B_V0P3)}


def written(directory: pathlib.Path, raw: dict) -> pathlib.Path:
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize("model", EXPECTED)
def test_a_model_of_the_hub_is_what_its_makers_say(model, tmp_path):
    raw, expected, parameters = EXPECTED[model]
    config = load_config(written(tmp_path, raw))
    assert config == expected
    assert param_count(config) == parameters


@pytest.mark.parametrize("model", EXPECTED)
def test_a_config_survives_being_written_and_read(model, tmp_path):
    """Also by those who know one spelling of rotary positions: transformers 4 the one, transformers 5 the other."""
    config = EXPECTED[model][1]
    raw = config_dict(config, "bfloat16")
    old, new = {"rope_theta", "rope_scaling"}, {"rope_parameters"}
    assert old | new <= raw.keys()
    for unknown in (set(), old, new):
        known = {field: value for field, value in raw.items() if field not in unknown}
        assert load_config(written(tmp_path, known)) == config


@pytest.mark.parametrize("model", EXPECTED)
def test_transformers_computes_with_the_config_that_we_write(model, tmp_path):
    """What transformers reads in our config.json is what it reads in the maker's."""
    transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")
    raw, config, _ = EXPECTED[model]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    theirs = transformers.AutoConfig.from_pretrained(written(tmp_path / "theirs", raw)).to_dict()
    ours = transformers.AutoConfig.from_pretrained(
        written(tmp_path / "ours", config_dict(config, "bfloat16"))
    ).to_dict()
    fields = (set(READ) | set(FIXED)) & theirs.keys() & ours.keys() - {"head_dim"}
    assert fields > {"rope_parameters", "hidden_size", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings"}
    assert {field: ours[field] for field in fields} == {field: theirs[field] for field in fields}
    assert ours["head_dim"] == (theirs.get("head_dim") or config.head_size)


def test_the_vocabulary_is_padded_to_a_multiple_and_written_as_it_was(tmp_path):
    written(tmp_path, LLAMA3P2_1B | {"vocab_size": 97})
    config = load_config(tmp_path, vocab_multiple=8)
    assert (config.vocab_size, config.padded_vocab, config.vocab_rows) == (97, 104, 104)
    assert load_config(tmp_path, vocab_multiple=97) == load_config(tmp_path)
    assert config_dict(config, "float32")["vocab_size"] == 97


def test_a_config_made_by_hand_is_written_as_the_family_that_has_its_biases_and_norms():
    shape = {"vocab_size": 8, "d_model": 4, "layers": 1, "heads": 1, "kv_heads": 1, "head_size": 4, "d_ff": 8}
    flags = [{}, {"qkv_bias": True}, {"qk_norm": True}, {"family": "mistral"}]
    families = [config_dict(TransformerConfig(**shape, **given), "float32")["model_type"] for given in flags]
    assert families == ["llama", "qwen2", "qwen3", "mistral"]
    with pytest.raises(ValueError, match=r"no Hugging Face family among \['qwen2'\] has qkv_bias=False"):
        config_dict(TransformerConfig(**shape, family="qwen2"), "float32")


def test_both_spellings_of_rope_scaling_mean_the_same(tmp_path):
    old = load_config(written(tmp_path, LLAMA3P2_1B))
    new = {field: value for field, value in LLAMA3P2_1B.items() if not field.startswith("rope")}
    new["rope_parameters"] = LLAMA3_SCALING | {"rope_theta": 500000.0}
    assert load_config(written(tmp_path, new)) == old
    linear = LLAMA3P2_1B | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    found = load_config(written(tmp_path, linear))
    assert (found.rope_type, found.rope_factor, found.rope_theta) == ("linear", 2.0, 5e5)


def test_a_window_that_no_sequence_fills_changes_nothing(tmp_path):
    full = load_config(written(tmp_path, MISTRAL_7B_V0P3))
    assert load_config(written(tmp_path, MISTRAL_7B_V0P3 | {"sliding_window": 32768})) == full


def test_no_field_is_in_two_tables():
    assert not set(READ) & set(FIXED) and not set(READ) & IGNORED and not set(FIXED) & IGNORED


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
REFUSED = [
    (
        "llama",
        {"model_type": "mamba"},
        "model_type='mamba' is not supported; supported are llama, mistral, qwen2, qwen3",
    ),
    ("llama", {"model_type": "mixtral"}, "model_type='mixtral' is not supported"),
    ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "must be a Qwen2ForCausalLM"),
    ("llama", {"architectures": ["LlamaModel"]}, r"architectures=\['LlamaModel'\] is not supported"),
    (
        "qwen2",
        {"rope_scaling": YARN},
        r"rope_type='yarn' .* supported are default, linear, llama3\. .* remove rope_scal",
    ),
    ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_type='longrope'"),
    ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "rope_type='mrope'"),
    ("llama", {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "is not supported"),
    ("llama", {"rope_scaling": LLAMA3_SCALING | {"beta_fast": 32}}, r"has \['beta_fast'\] besides"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"lacks \['high_freq_factor', 'low_freq_f"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "contradict one another"),
    ("llama", {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "contradict one another"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported: every layer sees the whole seq"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types=\['sliding_attention'\]"),
    ("mistral", {"sliding_window": 4096}, "sliding_window=4096 .* set max_position_embeddings to 4096"),
    ("llama", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: the feed-forward is SwiGLU"),
    ("llama", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved=True is not supported"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp=2 is not supported: .* set it to 1"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*take the model that is not"),
    ("mistral", {"num_local_experts": 8}, "num_local_experts=8 is not supported: models are dense"),
    ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map=.*is not run"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22 is not supported: nobody here knows the field"),
    ("llama", {"hidden_size": 0}, "hidden_size=0 must be a positive whole number"),
    ("llama", {"num_key_value_heads": 5}, "num_attention_heads=32 must be a multiple of num_key_value_heads=5"),
    ("llama", {"rms_norm_eps": None}, "lacks rms_norm_eps"),
]


@pytest.mark.parametrize(("family", "edit", "message"), REFUSED)
def test_what_the_model_cannot_express_is_refused_by_name(family, edit, message, tmp_path):
    load_config(written(tmp_path, RAW[family]))
    with pytest.raises(ValueError, match=message):
        load_config(written(tmp_path, RAW[family] | edit))


@pytest.mark.parametrize(
    ("family", "field"),
    [("mistral", "sliding_window"), ("qwen2", "num_key_value_heads"), ("qwen3", "head_dim"), ("llama", "vocab_size")],
)
def test_a_field_that_transformers_would_fill_with_a_number_of_its_own_must_be_there(family, field, tmp_path):
    raw = {name: value for name, value in RAW[family].items() if name != field}
    with pytest.raises(ValueError, match=f"lacks {field}"):
        load_config(written(tmp_path, raw))


def test_a_missing_model_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json there; give a directory in the Hugging Face format"):
        load_config(tmp_path / "nowhere")


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "shape.json").write_text("# a shape")
    with pytest.raises(ValueError, match=r"shape\.json is no config\.json of a model: Expecting value"):
        load_config(tmp_path / "shape.json")
