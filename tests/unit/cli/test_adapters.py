"""Adapters of `argosy serve --lora-modules`, which are stored and registered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.adapter_folders import adapter_source, write_adapter
from typer.testing import CliRunner

from argosy.cli.adapters import register_modules
from argosy.cli.app import app


def test_modules_are_registered_and_a_new_version_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "models"))
    store, folder = f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "sql"
    for content in ("first", "second"):
        source = adapter_source(write_adapter(folder, content))
        register_modules([f"sql={folder}"], "chat", store=store)
        printed = CliRunner().invoke(app, ["adapters", "list", "--json", "--store", store]).stdout
        (registered,) = json.loads(printed)
        assert (registered["name"], registered["base_model"]) == ("sql", "chat")
        assert registered["digest"] == source.digest
    with pytest.raises(ValueError, match="NAME=PATH"):
        register_modules(["sql"], "chat", store=store)
