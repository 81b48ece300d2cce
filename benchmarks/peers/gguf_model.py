"""Conversion of a checkpoint to GGUF, with llama.cpp's names for sizes and tensors. Needs the `gguf` package."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the decoder's sizes from config.json."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def add_word_tokens(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add a vocabulary of one token per word, for prompts of token ids."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f" t{number}" for number in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(value=False)


def tensors(path: Path) -> Iterator[tuple[str, Values]]:
    """Yield the GGUF names and float32 values of the bfloat16 tensors in a safetensors file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            halves = np.frombuffer(data[begin:end], dtype=np.uint16).reshape(entry["shape"])
            yield _gguf_name(name), (halves.astype(np.uint32) << 16).view(np.float32)


def pair_neighbours(name: str, values: Values, config: Mapping[str, Any]) -> Values:
    """Order the rows of queries and keys as GGUF's `llama` rotates them: pairs (0, 1) and not (0, n/2)."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
        name.rpartition(".")[0].rpartition(".")[2]
    )
    if heads is None:
        return values
    halves = values.reshape(config[heads], 2, -1, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"
