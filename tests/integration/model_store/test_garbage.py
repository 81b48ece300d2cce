"""Garbage of the model store: nothing that a fleet declares or a replica has loaded."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.small_models import (
    stored_path,
    write_small_model,
)
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import dump_fleet, load_fleet, pool_digests
from argosy.model_store import ModelStore, ModelVersion, Stage, hold_model, pull_model
from argosy.store import FleetStore, open_store


def _pull(store: ModelStore, folder: Path, stage: Stage) -> ModelVersion:
    version = pull_model(
        store, str(write_small_model(folder, weights=folder.name.encode())), name="m"
    )
    return store.promote(version, stage)[0]


def _collect(*options: str) -> str:
    result = CliRunner().invoke(app, ["models", "gc", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_only_unused_models_are_removed(store: ModelStore, tmp_path: Path) -> None:
    retired = _pull(store, tmp_path / "retired", "retired")
    held = _pull(store, tmp_path / "held", "retired")
    stable = _pull(store, tmp_path / "stable", "stable")
    given_up, recent = store.partial / "old", store.partial / "new"
    for file in (given_up, recent):
        file.write_bytes(bytes(5))
    os.utime(given_up, (0, 0))
    path = stored_path(store, held.digest)
    with hold_model(path):
        before = sorted(tmp_path.rglob("*"))
        output = _collect("--dry-run")
        assert f"would remove m {retired.digest} (30 B)" in output
        assert f"keeps {held.digest}: a replica has loaded it" in output
        assert "would remove 1 files and 1 interrupted downloads, 12 B" in output
        assert sorted(tmp_path.rglob("*")) == before
        assert f"removed m {retired.digest}" in _collect()
    assert [each.digest for each in store.list_versions()] == [held.digest, stable.digest]
    assert not store.model_folder(retired.digest).exists()
    assert not given_up.exists()
    assert recent.exists()
    assert CliRunner().invoke(app, ["models", "verify"]).exit_code == 0
    assert f"removed m {held.digest}" in _collect()
    assert "removed 0 files" in _collect()


@pytest.mark.parametrize("known_revisions", [1, 200])
def test_models_of_fleets_are_kept(
    store: ModelStore, tmp_path: Path, known_revisions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.deployment.records.revisions.MAX_KNOWN_REVISIONS", known_revisions)
    current = _pull(store, tmp_path / "current", "stable")
    running = _pull(store, tmp_path / "running", "retired")
    former = _pull(store, tmp_path / "former", "retired")
    with closing(open_store(f"sqlite:///{tmp_path}/fleets.db")) as database:
        database.migrate()
        for version in (former, running, current):
            _apply(database.fleets, tmp_path, version.digest)
        lease = database.fleets.acquire_lease("me", database.fleets.read_lease("f"))
        assert lease is not None
        record = {"name": "p-2-0", "pool": "p", "generation": 2, "ordinal": 0, "launcher": "local"}
        database.fleets.save_records(lease, {"replica/p-2-0": json.dumps(record).encode()})
    store.promote(current, "retired")
    output = _collect("--store", f"sqlite:///{tmp_path}/fleets.db")
    assert f"removed m {former.digest}" in output
    for version in (current, running):
        assert f"keeps {version.digest}: a fleet declares it" in output
        assert store.model_path(version.digest) is not None


def _apply(fleets: FleetStore, folder: Path, digest: str) -> None:
    file = folder / "f.yaml"
    file.write_text(
        f"models: [{{name: m, source: {digest[:19]}}}]\npools: [{{name: p, model: m}}]\n"
    )
    config = load_fleet([file])
    assert config.models[0].source == config.models[0].digest == digest
    fleets.apply("f", dump_fleet(config, "json").encode(), pool_digests(config), author="me")


def test_garbage_is_not_collected_during_a_download(store: ModelStore, tmp_path: Path) -> None:
    with store.writing():
        result = CliRunner().invoke(app, ["models", "gc"])
    assert result.exit_code == 1
    assert "Collect garbage later" in result.output


def test_unknown_declaration_stops_the_collection(store: ModelStore, tmp_path: Path) -> None:
    version = _pull(store, tmp_path / "m", "retired")
    with closing(open_store(f"sqlite:///{tmp_path}/fleets.db")) as database:
        database.migrate()
        database.fleets.apply("f", b'{"models": 1}', {}, author="me")
    options = ["models", "gc", "--store", f"sqlite:///{tmp_path}/fleets.db"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1
    assert "Nothing was removed" in result.output
    assert store.model_path(version.digest) is not None
