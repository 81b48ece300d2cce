"""Restore of backups into an empty installation."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from argosy.backup.backup_manifest import BackupError, BackupManifest, BackupPart, Cipher
from argosy.backup.backup_target import BackupTarget
from argosy.backup.check import CheckedBackup, check_backup, find_differences
from argosy.blob_store import BlobStore
from argosy.model_store import ModelVersion, open_model_store
from argosy.store import (
    BLOB_PLACE_KEY,
    StoreError,
    open_existing_store,
    open_store,
    sqlite_path,
)

_SQLITE_SUFFIXES = ("", "-wal", "-shm")


@dataclass(frozen=True, slots=True)
class RestoredBackup:
    """Result of a restore."""

    backup_id: str
    manifest: BackupManifest
    rows: int
    moved: list[str]
    """Files that were there before, under their new names."""
    has_secrets: bool
    missing_models: list[ModelVersion]
    """Versions that were in the model store, and are not on this machine."""
    duration_s: float


def restore_backup(
    target: BackupTarget,
    backup_id: str,
    store_url: str,
    *,
    series_folder: Path,
    blobs: BlobStore | None = None,
    cipher: Cipher | None = None,
    replaces: bool = False,
) -> RestoredBackup:
    """Restore a backup into an empty store, after every byte of it was checked. Nothing is changed before.

    Contents of files are written before the store, so that a restore that dies leaves no file without its content.

    Args:
        target: Where the backup is.
        backup_id: Its id.
        store_url: URL of the store, which must be new or empty.
        series_folder: Folder of the series of gateways.
        blobs: Place for the contents of its files; None for a backup without files.
        cipher: Cipher for its secrets.
        replaces: Whether files of an SQLite store and of series that exist are moved aside. Databases of a server
            must be empty nevertheless.

    Raises:
        BackupError: The backup is damaged, or there is something that it would replace.
        BlobStoreError: The contents of files cannot be written.
        StoreError: The store cannot be written.
    """
    started_at = time.monotonic()
    manifest, store_file = target.read_manifest(backup_id), sqlite_path(store_url)
    in_the_way = _find_existing(manifest, store_url, series_folder)
    if in_the_way and not replaces:
        raise BackupError(
            f"{in_the_way[0]} exists. Stop its gateways, and move it away, or give --replace, which renames it."
        )
    if manifest.files and blobs is None:
        raise BackupError(
            f"The backup has {manifest.files:,} files of clients. Give --blobs, with the folder or URL of store.blobs."
        )
    scratch_parent = None if store_file is None else store_file.absolute().parent
    if scratch_parent is not None:
        scratch_parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".restore-", dir=scratch_parent) as scratch:
        checked = check_backup(target, backup_id, Path(scratch), cipher)
        if checked.problems:
            raise BackupError(
                f"{' '.join(checked.problems)} Nothing was restored. Use another backup."
            )
        moved, rows = _write_store(target, checked, store_url, blobs, in_the_way)
        series_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in checked.series:
            shutil.copy2(file, series_folder / file.name)
    models = open_model_store()
    return RestoredBackup(
        backup_id=backup_id,
        manifest=manifest,
        rows=rows,
        moved=moved,
        has_secrets=checked.secrets is not None,
        missing_models=[
            each for each in manifest.models if models.read_manifest(each.digest) is None
        ],
        duration_s=time.monotonic() - started_at,
    )


def _write_store(
    target: BackupTarget,
    checked: CheckedBackup,
    store_url: str,
    blobs: BlobStore | None,
    in_the_way: list[Path],
) -> tuple[list[str], int]:
    """Write the contents of files and then the store. Returns the new names of what was there, and the rows."""
    with contextlib.closing(open_existing_store(checked.store_url)) as source:
        if checked.manifest.file_list is not None and blobs is not None:
            for key, sha256, size_bytes in source.files.iter_contents():
                part = BackupPart(kind="file", name=key, sha256=sha256, size_bytes=size_bytes)
                blobs.put(key, target.open_file(part))
        moved = [str(new) for file in in_the_way for new in _move_aside(file)]
        with contextlib.closing(open_store(store_url)) as store:
            store.migrate()
            rows = source.copy_to(store)
            keys = checked.secrets or {}
            store.secrets.add_all(
                {name: key for name, key in keys.items() if name != BLOB_PLACE_KEY}
            )
            differences = find_differences(store, checked.manifest)
    if differences:
        raise BackupError(f"The restored store differs from the backup: {' '.join(differences)}")
    return moved, rows


def _find_existing(manifest: BackupManifest, store_url: str, series_folder: Path) -> list[Path]:
    """Return the files that a restore would replace. Raises BackupError if a database of a server is not empty."""
    files = [series_folder / part.name for part in manifest.parts if part.kind == "series"]
    existing = [file for file in files if file.exists()]
    store_file = sqlite_path(store_url)
    if _has_rows(store_url, store_file):
        if store_file is None:
            raise BackupError(
                "The database is not empty. Create a new one, and give its URL. A restore empties no database of a"
                " server."
            )
        existing.append(store_file)
    return existing


def _has_rows(store_url: str, store_file: Path | None) -> bool:
    """Return whether a store has something to lose, or cannot be read. Raises BackupError while gateways use it."""
    if store_file is not None and not store_file.exists():
        return False
    try:
        with contextlib.closing(open_store(store_url)) as store:
            store.migrate()
            running, is_empty = store.gateways.list_running(), store.is_empty()
    except StoreError:
        if store_file is None:
            raise
        return True
    if running:
        raise BackupError(
            f"The gateway at {running[0].url} uses the store. Stop all gateways and controllers first."
        )
    return not is_empty


def _move_aside(file: Path) -> list[Path]:
    """Rename an SQLite file, with its log if it has one. Returns the new names."""
    moved = []
    suffix = time.strftime("replaced-%Y%m%dT%H%M%SZ", time.gmtime())
    for ending in _SQLITE_SUFFIXES:
        old = file.with_name(f"{file.name}{ending}")
        if old.exists():
            # The log keeps its ending, so that SQLite finds it with the file.
            moved.append(old.rename(file.with_name(f"{file.name}.{suffix}{ending}")))
    return moved
