"""Writes golden/<variant>/: a tiny random model in the Hugging Face format, and the logits that transformers gives it.

Run by hand where torch and transformers are installed: `python -m tests.models.make_golden`. Made with torch 2.13.0 and
transformers 5.24.0. Weights are large and nowhere zero, norms and biases too, so that nothing is left out unnoticed.
test_parity.py compares with these files, and makes others with the same functions where torch is installed.
"""

import pathlib

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parent / "golden"
LENGTH = 44  # tokens of a row, beyond the 32 positions that rope scaling starts from

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 128,
}
# Pairs of a head turn 1, 1/3, 1/10, 1/30 radian a position: the four lie on both sides of the bounds and between them.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def theta(value: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


# name -> (model_type, fields)
VARIANTS: dict[str, tuple[str, dict]] = {
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, **theta(1e6)}),
    "r1_distill_qwen": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1, **theta(1e4)}),
    "qwen3_tied": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True, **theta(1e6)}),
    "qwen3_untied": ("qwen3", {"head_dim": 8, "rms_norm_eps": 1e-3, **theta(100.0)}),
    "llama3_tied": (
        "llama",
        {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "r1_distill_llama": ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
    ),
    "smollm2": (
        "llama",
        {
            "hidden_size": 18,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            **theta(1e5),
        },
    ),
    "mistral": ("mistral", {"head_dim": 6, "sliding_window": None, "rms_norm_eps": 1e-5, **theta(1e6)}),
}


def make_model(variant: str, *, seed: int) -> transformers.PreTrainedModel:
    """A float32 model with random weights; those of norms lie around 1, where real ones do."""
    family, fields = VARIANTS[variant]
    config = transformers.AutoConfig.for_model(family, **SHAPE | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + 1.0 * ("norm" in name))
    return model


def write(directory: pathlib.Path, variant: str, *, seed: int, length: int) -> transformers.PreTrainedModel:
    """Writes the model, `length` tokens of two rows, and their logits."""
    model = make_model(variant, seed=seed)
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, length))
    with torch.no_grad():
        logits = model(tokens).logits
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez(directory / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
    return model


if __name__ == "__main__":
    for name in VARIANTS:
        write(GOLDEN / name, name, seed=0, length=LENGTH)
