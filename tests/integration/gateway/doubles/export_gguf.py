"""Writes the bundled model as GGUF; run by a Python that has the `gguf` package: MODEL_FOLDER GGUF_FILE."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

LAYER = {
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


def export(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _tokenizer(writer, folder, config)
    for name, values in _tensors(folder / "model.safetensors", config):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {added["id"] for added in tokenizer["added_tokens"]}
    kinds = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in vocabulary
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("starcoder")  # digits one by one, then GPT-2's pattern
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(value=True)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _tensors(path: Path, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        halves = np.frombuffer(data[begin:end], dtype=np.uint16).reshape(entry["shape"])
        values = (halves.astype(np.uint32) << 16).view(np.float32)
        projection = name.split(".")[-2]
        if projection in heads:  # llama.cpp rotates neighbours, the checkpoint halves
            count = heads[projection]
            split = values.reshape(count, 2, values.shape[0] // count // 2, -1)
            values = np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
        yield _rename(name), values


def _rename(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{LAYER[inner]}.{kind}"


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
