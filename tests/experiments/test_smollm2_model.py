"""GGUF to Hugging Face: a tiny file that the `gguf` package wrote, and (slow) the real model against transformers."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_jax.models import huggingface
from areal_jax.tokenizer import Tokenizer
from experiments import smollm2_model

gguf = pytest.importorskip("gguf", reason="pip install gguf")

D, FF, LAYERS, HEADS, KV_HEADS = 16, 24, 2, 4, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "th", "the"]
MERGES = ["t h", "th e"]


def permuted(rows, heads):
    """What llama.cpp's converter does to query and key rows: the halves of a head become neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), D), "output_norm": (D,)}
    for i in range(LAYERS):
        kv = KV_HEADS * D // HEADS
        shapes |= {f"blk.{i}.attn_norm": (D,), f"blk.{i}.ffn_norm": (D,), f"blk.{i}.attn_output": (D, D)}
        shapes |= {f"blk.{i}.attn_q": (D, D), f"blk.{i}.attn_k": (kv, D), f"blk.{i}.attn_v": (kv, D)}
        shapes |= {f"blk.{i}.ffn_gate": (FF, D), f"blk.{i}.ffn_up": (FF, D), f"blk.{i}.ffn_down": (D, FF)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tensors):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FF)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([smollm2_model.CONTROL] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name, tensor in tensors.items():
        kind = name.split(".")[-1]
        writer.add_tensor(f"{name}.weight", permuted(tensor, heads[kind]) if kind in heads else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    smollm2_model.convert(file, out := file.parent / "model")
    return out


def test_rows_go_back_to_halves():
    # One head of size 4: neighbours (0, 1), (2, 3) there are first and second half, (0, 2), (1, 3), here.
    assert smollm2_model.unpermuted(np.arange(4)[:, None], 1)[:, 0].tolist() == [0, 2, 1, 3]
    rows = np.random.default_rng(0).normal(size=(24, 5))
    np.testing.assert_array_equal(smollm2_model.unpermuted(permuted(rows, 3), 3), rows)


def test_weights_come_back_under_their_names(directory, tensors):
    got = load_file(directory / "model.safetensors")
    assert len(got) == len(tensors)
    np.testing.assert_array_equal(got["model.embed_tokens.weight"], tensors["token_embd"])
    for ours, theirs in smollm2_model.LAYER_NAMES.items():
        np.testing.assert_array_equal(got[f"model.layers.1.{theirs}.weight"], tensors[f"blk.1.{ours}"], err_msg=ours)


def test_the_weights_may_be_read_by_whoever_may_read_the_config(directory):
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_directory_is_a_model_with_its_tokenizer(directory):
    config = huggingface.load_config(directory)
    assert (config.layers, config.heads, config.kv_heads, config.tied_embeddings) == (LAYERS, HEADS, KV_HEADS, True)
    assert config.norm_eps == 1e-5 and config.rope_theta == 100000.0
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.encode("<|im_start|>the 12") == [1, *map(TOKENS.index, ["the", "Ġ", "1", "2"])]
    assert json.loads((directory / "tokenizer_config.json").read_text())["chat_template"].startswith("{{ messages")
