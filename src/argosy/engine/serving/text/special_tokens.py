"""Special tokens of a checkpoint, by the names that chat templates use."""

from __future__ import annotations

from pathlib import Path

from argosy.engine.serving.text.checkpoint_files import read_json_object
from argosy.engine.serving.text.gguf_text import read_gguf_special_tokens

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def read_special_tokens(path: Path) -> dict[str, str]:
    """Read the named special tokens (`bos_token`, `eos_token`, ...) of a checkpoint directory or GGUF file."""
    if path.is_file():
        return read_gguf_special_tokens(path)
    config = read_json_object(path / "special_tokens_map.json") | read_json_object(
        path / "tokenizer_config.json"
    )
    special_tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                special_tokens[name] = text
    return special_tokens
