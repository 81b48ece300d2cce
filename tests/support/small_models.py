"""A directory with the files of a model, too small to compute anything."""

from __future__ import annotations

from pathlib import Path

from argosy.model_store import Manifest, ModelStore

SMALL_MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"a": 1}',
    "model.safetensors": bytes(1000),
}


def write_small_model(folder: Path, *, weights: bytes | None = None) -> Path:
    """Write the files, with a model card that does not belong to the model, and return the folder."""
    folder.mkdir(parents=True)
    for name, content in SMALL_MODEL.items():
        (folder / name).write_bytes(content)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    card = "---\nlicense: apache-2.0\nbase_model: [owner/base]\n---\n# Model\n"
    (folder / "README.md").write_text(card)
    return folder


def stored_path(store: ModelStore, digest: str) -> Path:
    """Return the path of a model that is in a store."""
    path = store.model_path(digest)
    assert path is not None
    return path


def stored_manifest(store: ModelStore, digest: str) -> Manifest:
    """Return the manifest of a model that is in a store."""
    manifest = store.read_manifest(digest)
    assert manifest is not None
    return manifest
