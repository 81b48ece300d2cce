"""A model store of the test's own, and small models for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.model_store import ModelStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """Store that commands use too. Caches and state are the test's own."""
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return ModelStore(tmp_path / "store")
