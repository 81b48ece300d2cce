"""Where files are kept: also for a user whom the system does not know, as in a container that is run as any number."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from argosy import native
from argosy.folders import cache_folder, state_folder
from argosy.store import StoreError, default_store_url, usage_log_folder


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, in an empty folder."""

    def unknown(_: int) -> pwd.struct_passwd:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def test_what_is_told_comes_before_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert cache_folder() == Path("/var/cache/argosy")
    assert state_folder() == Path("/home/ann/.local/state/argosy")


@pytest.mark.usefixtures("nobody")
def test_a_user_without_a_home_is_told_what_to_set() -> None:
    with pytest.raises(StoreError, match="set HOME or XDG_STATE_HOME, or name a database"):
        default_store_url()
    with pytest.raises(StoreError, match="set HOME or XDG_STATE_HOME"):
        usage_log_folder("postgresql://host/db")
    assert usage_log_folder("sqlite:////data/a.db") == Path("/data/a.db.usage")


@pytest.mark.usefixtures("nobody")
def test_what_can_be_made_again_needs_no_home(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "nothing.cpp").touch()
    built = native.build_library(tmp_path / "sources", ("-fPIC",))
    assert built.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["sources"]


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_the_usage_of_two_databases_does_not_mix(one: str, other: str) -> None:
    assert usage_log_folder(one) != usage_log_folder(other)


@pytest.mark.parametrize("name", ["PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE", "PGDATABASE"])
def test_nor_does_it_where_the_environment_says_which(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        folders.append(usage_log_folder("postgresql://"))
    assert folders[0] != folders[1]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_one_database_keeps_its_usage_however_it_is_written(scheme: str) -> None:
    assert usage_log_folder(f"{scheme}://ann:secret@host/db") == usage_log_folder(
        "postgresql://host/db"
    )
