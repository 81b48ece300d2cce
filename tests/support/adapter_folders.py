"""Folders of LoRA adapters whose weights are any bytes, for engines that do not compute with them."""

from __future__ import annotations

import json
from pathlib import Path

from argosy.engine import AdapterSource
from argosy.model_store import compute_manifest, list_model_files


def write_adapter(folder: Path, content: str, size_bytes: int = 10, template: str = "") -> Path:
    """Write an adapter that equal arguments make equal, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "note": content}))
    (folder / "adapter_model.safetensors").write_bytes(bytes(size_bytes))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def adapter_source(folder: Path) -> AdapterSource:
    """Return the source of an adapter."""
    manifest = compute_manifest(list_model_files(folder))
    weights = folder / "adapter_model.safetensors"
    return AdapterSource(manifest.digest, str(folder), weights.stat().st_size)
