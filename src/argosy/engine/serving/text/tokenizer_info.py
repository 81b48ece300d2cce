"""Description of a checkpoint's tokenizer, as vLLM's `/tokenizer_info` returns it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.engine.serving.text.checkpoint_files import read_json_object
from argosy.engine.serving.text.special_tokens import read_special_tokens

DEFAULT_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class of transformers for a tokenizer whose files name none."""


def read_tokenizer_info(path: Path, chat_template: str | None) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json, with special tokens as text and the chat template in use.

    Names of files are left out, since they exist only on this machine.

    Args:
        path: Directory of the checkpoint, or GGUF file.
        chat_template: Source of the chat template in use.
    """
    config = {} if path.is_file() else read_json_object(path / "tokenizer_config.json")
    settings = {
        name: value
        for name, value in config.items()
        if not name.endswith("_file") and name not in {"name_or_path", "chat_template"}
    }
    info = {"tokenizer_class": DEFAULT_TOKENIZER_CLASS} | settings | read_special_tokens(path)
    return info if chat_template is None else info | {"chat_template": chat_template}
