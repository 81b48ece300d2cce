"""Paths of the small models that ship with Argosy, as folders in Hugging Face layout.

`argosy-mini` is a chat model for trying out Argosy and for tests. `argosy-mini-draft` is a smaller model with the same
tokenizer, which drafts for it. The scripts in the repository's `models` folder train and evaluate both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_HERE = Path(__file__).resolve().parent

BUNDLED_MODEL: Path = _HERE / "argosy-mini"
"""Chat model that `argosy serve` runs by default."""

DRAFT_MODEL: Path = _HERE / "argosy-mini-draft"
"""Smaller model with the same tokenizer, for speculative decoding (`--draft-model argosy-mini-draft`)."""

BUNDLED_MODELS: Mapping[str, Path] = MappingProxyType(
    {path.name: path for path in (BUNDLED_MODEL, DRAFT_MODEL)}
)
"""Path of each bundled model by its name."""

__all__ = ["BUNDLED_MODEL", "BUNDLED_MODELS", "DRAFT_MODEL"]
