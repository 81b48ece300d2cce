"""Files of LoRA adapters: the digest and the size of those in a folder."""

from __future__ import annotations

from pathlib import Path

from argosy.engine.engine_request import AdapterSource
from argosy.model_store import compute_manifest, list_model_files, open_model_store

ADAPTER_FILE = "adapter_config.json"


def read_adapter_source(folder: Path, digest: str = "") -> AdapterSource:
    """Return the source of the adapter in a folder.

    Args:
        folder: Folder with the files.
        digest: Digest of a stored adapter, whose files are then not read. The engine verifies them when it loads them.

    Raises:
        ValueError: The folder holds no adapter.
        OSError: A file cannot be read.
    """
    if not (folder / ADAPTER_FILE).is_file():
        raise ValueError(f"{folder} has no {ADAPTER_FILE}; give the folder of an adapter")
    manifest = open_model_store().read_manifest(digest) if digest else None
    if manifest is None:
        manifest = compute_manifest(list_model_files(folder))
    weights = sum(file.size for file in manifest.files if file.path.endswith(".safetensors"))
    return AdapterSource(manifest.digest, str(folder), weights)
