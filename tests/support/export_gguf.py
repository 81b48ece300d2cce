"""Writes the bundled model as GGUF; run by a Python that has the `gguf` package: MODEL_FOLDER GGUF_FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from benchmarks.peers.gguf_model import Values, add_sizes, tensors, write


def export(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    _tokenizer(writer, folder, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, values in tensors(folder / "model.safetensors"):
        count = heads.get(name.split(".")[-2])
        writer.add_tensor(name, values if count is None else _paired(values, count))
    write(writer)


def _tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {entry["content"]: entry for entry in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | {text: entry["id"] for text, entry in added.items()}
    vocabulary = sorted(ids.items(), key=lambda item: item[1])
    kinds = [
        gguf.TokenType.NORMAL
        if text not in added
        else gguf.TokenType.CONTROL
        if added[text]["special"]
        else gguf.TokenType.USER_DEFINED
        for text, _ in vocabulary
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


def _paired(values: Values, heads: int) -> Values:
    """Queries or keys as llama.cpp rotates them: neighbours, where the checkpoint rotates halves."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
