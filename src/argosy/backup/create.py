"""Creation of backups while gateways run."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from argosy.backup.backup_manifest import (
    BackupError,
    BackupManifest,
    BackupPart,
    Cipher,
    PartKind,
)
from argosy.backup.backup_target import BackupTarget
from argosy.blob_store import BlobNotFoundError, BlobStore
from argosy.model_store import open_model_store
from argosy.store import NEWEST_REVISION, Store, open_store, sqlite_url
from argosy.version import VERSION

STORE_FILE = "argosy.db"
FILE_LIST = "files.json"


def create_backup(
    store: Store,
    target: BackupTarget,
    *,
    series_folder: Path,
    blobs: BlobStore | None = None,
    cipher: Cipher | None = None,
) -> tuple[str, BackupManifest]:
    """Write a backup of a store with the newest tables, its files, series in a folder, and the versions of models.

    The store is copied as of one moment, and the contents of all files in that copy follow, which are kept meanwhile.
    Contents that the newest backup has are not read. Without `cipher` the keys in the table `secrets` are left out.

    Args:
        store: The store.
        target: Where the backup is written.
        series_folder: Folder of the series of gateways.
        blobs: Contents of files; None if the store has no files.
        cipher: Cipher for its secrets.

    Returns:
        The id and the manifest of the backup.

    Raises:
        BackupError: The target cannot be used, or series or contents of files cannot be read.
        BlobStoreError: The place of the contents cannot be used.
        StoreError: The store cannot be read.
        ModelStoreError: The model store is damaged.
    """
    created_at, started_at = time.time(), time.monotonic()
    known, known_files = _find_known(target)
    parts: list[BackupPart] = []

    def add_part(kind: PartKind, path: Path) -> None:
        sha256, size_bytes = target.put(path, known)
        parts.append(BackupPart(kind=kind, name=path.name, sha256=sha256, size_bytes=size_bytes))

    with _scratch_folder(target) as scratch, store.files.keeping_blobs():
        path = scratch / STORE_FILE
        with contextlib.closing(open_store(sqlite_url(path))) as copy:
            copy.migrate()
            rows = store.copy_to(copy, with_secrets=False)
            audit, (totals,) = copy.audit_log.verify(), copy.ledger.report()
            head = copy.load_snapshot().audit_head.hex()
            num_files, contents = _copy_contents(copy, blobs, target, known_files)
        if audit.broken is not None:
            raise BackupError(
                f"Entry {audit.broken} of the audit log is {audit.problem}, so the store was not backed up. Keep the"
                " backups that exist, and run `argosy audit verify`."
            )
        add_part("store", path)
        if contents:
            (scratch / FILE_LIST).write_bytes(msgspec.json.encode(contents, order="sorted"))
            add_part("files", scratch / FILE_LIST)
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
            files=num_files,
            file_bytes=sum(contents.values()),
            parts=parts,
            models=open_model_store().list_versions(),
        )
        return target.write_manifest(manifest, contents), manifest


def _find_known(target: BackupTarget) -> tuple[set[str], dict[str, int]]:
    """Return the SHA-256 of the parts of all backups, and the contents of files of the newest one with their sizes."""
    manifests = [
        each for each in target.read_manifests().values() if isinstance(each, BackupManifest)
    ]
    known = {part.sha256 for manifest in manifests for part in manifest.parts}
    try:
        return known, target.read_file_list(manifests[-1]) if manifests else {}
    except BackupError:  # a damaged list is written again
        return known - {part.sha256 for part in manifests[-1].parts if part.kind == "files"}, {}


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


def _copy_contents(
    copy: Store, blobs: BlobStore | None, target: BackupTarget, known: dict[str, int]
) -> tuple[int, dict[str, int]]:
    """Write the contents of the files in a copy of the store that are not known.

    Returns:
        The number of files, and the size of each content in bytes by its SHA-256.
    """
    count, contents = 0, dict[str, int]()
    for key, sha256, size_bytes in copy.files.iter_contents():
        count += 1
        if sha256 in contents:
            continue
        contents[sha256] = size_bytes
        if sha256 in known:
            continue
        if blobs is None:
            raise BackupError(
                "The store has files of clients. Give --blobs, with the folder or URL of store.blobs."
            )
        part = BackupPart(kind="file", name=key, sha256=sha256, size_bytes=size_bytes)
        try:
            target.put_file(part, blobs.open(key))
        except BlobNotFoundError as error:
            raise BackupError(
                f"The content of the file {key} is missing. Give --blobs if store.blobs is set. Otherwise put it back"
                " from another backup, or delete the file."
            ) from error
    return count, contents


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
