"""Writes golden/<family>/: a tiny random model in the Hugging Face format, and the logits that transformers gives it.

Run by hand where torch and transformers are installed: `python tests/models/make_golden.py`. Made with torch 2.13.0 and
transformers 5.24.0. Weights are large and nowhere zero, norms and biases too, so that nothing is left out unnoticed.
"""

import pathlib

import numpy as np
import torch
import transformers

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True, "head_dim": 4}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"rope_theta": 1e6}),
}


def main() -> None:
    for family, (config_class, model_class, fields) in FAMILIES.items():
        torch.manual_seed(0)
        model = model_class(config_class(**SHAPE | fields)).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.2 * (parameter.ndim == 1))
            tokens = torch.randint(0, SHAPE["vocab_size"], (2, 24))
            logits = model(tokens).logits
        directory = pathlib.Path(__file__).parent / "golden" / family
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        np.savez(directory / "logits.npz", tokens=tokens.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()
