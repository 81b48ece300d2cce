"""Adapters of `argosy serve --lora-modules`, which are stored and registered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.adapter_files import write_adapter
from tests.support.adapter_folders import adapter_source
from typer.testing import CliRunner

from argosy.cli.adapters import register_modules
from argosy.cli.app import app
from argosy.models import BUNDLED_MODEL


def test_modules_are_registered_and_a_new_version_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "models"))
    store, folder = f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "sql"
    for seed in (1, 2):
        source = adapter_source(write_adapter(folder, BUNDLED_MODEL, ["q_proj"], seed=seed))
        register_modules([f"sql={folder}"], "chat", store=store)
        printed = CliRunner().invoke(app, ["adapters", "list", "--json", "--store", store]).stdout
        (registered,) = json.loads(printed)
        assert (registered["name"], registered["base_model"]) == ("sql", "chat")
        assert registered["digest"] == source.digest
    with pytest.raises(ValueError, match="NAME=PATH"):
        register_modules(["sql"], "chat", store=store)


@pytest.mark.parametrize(
    ("bias", "has_pickle", "problem"),
    [
        ("all", False, "bias is 'all'"),
        ("none", True, "there is no file adapter_model.safetensors"),
    ],
)
def test_files_that_no_replica_can_load_are_not_registered(
    bias: str,
    has_pickle: bool,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "models"))
    store = f"sqlite:///{tmp_path / 'store.db'}"
    folder = write_adapter(tmp_path / "bad", BUNDLED_MODEL, ["q_proj"], bias=bias)
    if has_pickle:
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    arguments = ["adapters", "add", "bad", str(folder), "--base", "chat", "--store", store]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, problem in " ".join(result.output.split())) == (2, True)
    printed = CliRunner().invoke(app, ["adapters", "list", "--json", "--store", store]).stdout
    assert json.loads(printed) == []
    assert not (tmp_path / "models").exists()
