"""Folders of state, caches and the usage log, also for a user whom the system does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.folders import cache_folder, data_folder, state_folder
from argosy.store import StoreError, default_store_url, usage_log_folder
from tests.support.home_folders import remove_home


def test_environment_variables_precede_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert cache_folder() == Path("/var/cache/argosy")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert state_folder() == Path("/home/ann/.local/state/argosy")
    assert data_folder() == Path("/data/argosy")


def test_error_without_home_names_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_home(monkeypatch, tmp_path)
    with pytest.raises(StoreError, match="set HOME or XDG_STATE_HOME, or give the URL"):
        default_store_url()
    with pytest.raises(StoreError, match="set HOME or XDG_STATE_HOME"):
        usage_log_folder("postgresql://host/db")
    assert usage_log_folder("sqlite:////data/a.db") == Path("/data/a.db.usage")


@pytest.mark.parametrize(
    ("first_url", "second_url"),
    [
        ("postgresql:///db?host=/run/a", "postgresql:///db?host=/run/b"),
        ("postgresql://host/db?port=1", "postgresql://host/db?port=2"),
        ("postgresql://host/a", "postgresql://host/b"),
        ("postgresql://ann@host", "postgresql://bob@host"),
        ("postgresql://host?dbname=a", "postgresql://host?dbname=b"),
        ("postgresql:///db?service=a", "postgresql:///db?service=b"),
        ("postgresql:///db?hostaddr=127.0.0.1", "postgresql:///db?hostaddr=127.0.0.2"),
        (
            "postgresql://host/db?options=-csearch_path%3Da",
            "postgresql://host/db?options=-csearch_path%3Db",
        ),
        ("sqlite:////data/a#1.db", "sqlite:////data/a#2.db"),
    ],
)
def test_different_databases_have_different_usage_folders(first_url: str, second_url: str) -> None:
    assert usage_log_folder(first_url) != usage_log_folder(second_url)


@pytest.mark.parametrize("name", ["PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE", "PGDATABASE"])
def test_environment_of_postgres_selects_the_usage_folder(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        folders.append(usage_log_folder("postgresql://"))
    assert folders[0] != folders[1]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_usage_folder_does_not_depend_on_scheme_and_password(scheme: str) -> None:
    assert usage_log_folder(f"{scheme}://ann:secret@host/db") == usage_log_folder(
        "postgresql://host/db"
    )
