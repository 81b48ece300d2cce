"""Creation of backups while gateways run."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from argosy.backup.backup_manifest import BackupError, BackupManifest, BackupPart, Cipher
from argosy.backup.backup_target import BackupTarget
from argosy.model_store import open_model_store
from argosy.store import NEWEST_REVISION, Store, open_store, sqlite_url
from argosy.version import VERSION

STORE_FILE = "argosy.db"


def create_backup(
    store: Store, target: BackupTarget, *, series_folder: Path, cipher: Cipher | None = None
) -> tuple[str, BackupManifest]:
    """Write a backup of a store with the newest tables, of the series in a folder, and of the versions of models.

    The store is copied as of one moment. Without `cipher` the keys in its table `secrets` are left out.

    Returns:
        The id and the manifest of the backup.

    Raises:
        BackupError: The target cannot be used, or the series cannot be read.
        StoreError: The store cannot be read.
        ModelStoreError: The model store is damaged.
    """
    created_at, started_at = time.time(), time.monotonic()
    known = {
        part.sha256
        for manifest in target.read_manifests().values()
        if isinstance(manifest, BackupManifest)
        for part in manifest.parts
    }
    parts: list[BackupPart] = []

    def add_part(kind: Literal["store", "secrets", "series"], path: Path) -> None:
        sha256, size_bytes = target.put(path, known)
        parts.append(BackupPart(kind=kind, name=path.name, sha256=sha256, size_bytes=size_bytes))

    with _scratch_folder(target) as scratch:
        path = scratch / STORE_FILE
        with contextlib.closing(open_store(sqlite_url(path))) as copy:
            copy.migrate()
            rows = store.copy_to(copy, with_secrets=False)
            audit, (totals,) = copy.audit_log.verify(), copy.ledger.report()
            head = copy.load_snapshot().audit_head.hex()
        if audit.broken is not None:
            raise BackupError(
                f"Entry {audit.broken} of the audit log is {audit.problem}, so the store was not backed up. Keep the"
                " backups that exist, and run `argosy audit verify`."
            )
        add_part("store", path)
        if cipher is not None:
            secrets = scratch / "secrets"
            secrets.write_bytes(cipher.encrypt(msgspec.json.encode(store.secrets.read_all())))
            add_part("secrets", secrets)
        for file in sorted(series_folder.glob("*.sqlite")):
            _copy_sqlite_file(file, scratch / file.name)
            add_part("series", scratch / file.name)
        manifest = BackupManifest(
            version=VERSION,
            revision=NEWEST_REVISION,
            created_at=created_at,
            duration_s=time.monotonic() - started_at,
            rows=rows,
            audit_entries=audit.entries,
            audit_head=head,
            requests=totals.requests,
            nano_dollars=totals.nano_dollars,
            parts=parts,
            models=open_model_store().list_versions(),
        )
        return target.write_manifest(manifest), manifest


def delete_old_backups(target: BackupTarget, keep: int) -> list[str]:
    """Delete all but the newest `keep` backups. Returns the ids of the deleted ones."""
    old = target.list_ids()[:-keep]
    target.delete(old)
    return old


@contextlib.contextmanager
def _scratch_folder(target: BackupTarget) -> Iterator[Path]:
    folder = target.make_scratch_folder()
    with TemporaryDirectory(prefix=".new-", dir=folder) as scratch:
        yield Path(scratch)


def _copy_sqlite_file(source: Path, copy: Path) -> None:
    """Copy an SQLite file as of one moment, also while its owner writes to it."""
    try:
        with (
            contextlib.closing(
                sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
            ) as read,
            contextlib.closing(sqlite3.connect(copy)) as written,
        ):
            read.backup(written)
    except sqlite3.Error as error:
        raise BackupError(
            f"The series {source} cannot be read: {error}. Move the file away."
        ) from error
