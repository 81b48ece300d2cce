"""Stores with tables."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

from argosy.store import Store, open_store

SQLITE = "sqlite:///"


@functools.cache
def _migrated_file() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "argosy.db"
        store = open_store(f"{SQLITE}{path}")
        store.migrate()
        store.close()
        return path.read_bytes()


def write_migrated_file(path: Path) -> str:
    """Write an SQLite file with tables and without accounts, as a copy, which is faster. Returns its URL."""
    path.write_bytes(_migrated_file())
    return f"{SQLITE}{path}"


def open_migrated_store(url: str) -> Store:
    """Open a store and create its tables."""
    path = Path(url.removeprefix(SQLITE))
    if url.startswith(SQLITE) and not path.exists():
        write_migrated_file(path)
    store = open_store(url)
    store.migrate()
    return store
