"""The default organisation and project of the commands on accounts, and what is said where there is none."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.integration.test_cli_accounts import refused, run, runner, told

from argosy.cli.app import app


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not exist yet, and that the commands find."""
    monkeypatch.setenv("ARGOSY_STORE", f"sqlite:///{tmp_path}/argosy.db")


def test_a_key_without_the_default_organisation_needs_a_project() -> None:
    run("tenants", "organisations", "create", "zeta")
    run("tenants", "create", "shop", "-o", "zeta")
    assert "--project" in refused("keys", "create", "ops", "--role", "admin")
    assert "--organisation" in refused("tenants", "create", "web")
    key = told("keys", "create", "ops", "--role", "admin", "-p", "shop", "--scope", "gateway")
    assert key["scope"] == "gateway"


def test_who_begins_a_store_is_told_where(tmp_path: Path) -> None:
    """The server may have another: a key that is made for it here opens nothing there."""
    first, second = (runner.invoke(app, ["keys", "create"]) for _ in range(2))
    assert f"Created a new store in {tmp_path}/argosy.db" in " ".join(first.stderr.split())
    assert "--store" in first.stderr
    assert "new store" not in second.stderr
    backup = f"sqlite:///{tmp_path}/backup.db"
    assert "new store" not in runner.invoke(app, ["store", "copy", backup]).stderr


def test_the_command_that_a_new_project_is_shown_means_that_project() -> None:
    for owner in ("zeta", "eta"):
        run("tenants", "organisations", "create", owner)
        said = run("tenants", "create", "shop", "-o", owner)
        project = told("tenants", "list")[-1]["id"]
        shown = shlex.split(said.partition("Make a key: argosy ")[2])
        assert told(*shown)["project"] == project
