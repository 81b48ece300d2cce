"""The small models that ship with Argosy, as folders in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

BUNDLED_MODEL: Path = _HERE / "argosy-mini"
"""The chat model that `argosy serve` runs when no other is named."""

DRAFT_MODEL: Path = _HERE / "argosy-mini-draft"
"""A smaller model with the same tokenizer, for speculative decoding."""

__all__ = ["BUNDLED_MODEL", "DRAFT_MODEL"]
