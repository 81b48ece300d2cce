"""Check of a backup: every part is brought into a scratch folder and examined there."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from argosy.backup.backup_manifest import BackupError, BackupManifest, BackupPart, Cipher
from argosy.backup.backup_target import BackupTarget
from argosy.store import Store, StoreError, open_existing_store, sqlite_url

_SECRETS = dict[str, tuple[bytes, float]]


@dataclass(frozen=True, slots=True)
class CheckedBackup:
    """A backup in a scratch folder, with what is wrong with it."""

    backup_id: str
    manifest: BackupManifest
    store_url: str
    """URL of the restored copy of the store."""
    series: list[Path]
    secrets: dict[str, tuple[bytes, float]] | None
    """Keys that all gateways share; None if the backup has none, or no cipher was given."""
    problems: list[str] = field(default_factory=list)
    """Sentences that name the damaged part; empty if the backup can be restored."""


def check_backup(
    target: BackupTarget, backup_id: str, scratch: Path, cipher: Cipher | None = None
) -> CheckedBackup:
    """Copy the parts of a backup into an empty folder, and compare them with its manifest.

    Every byte is compared by SHA-256. Then the pages of each database, the audit chain and the ledger's sums are
    checked. All damage is reported, not only the first.

    Raises:
        BackupError: The manifest is damaged, or the cipher is not that of the backup.
    """
    manifest = target.read_manifest(backup_id)
    problems: list[str] = []
    files: dict[BackupPart, Path] = {}
    for number, part in enumerate(manifest.parts):
        if part.kind == "files":  # is read by `_check_files`
            continue
        folder = scratch / str(number)
        folder.mkdir()
        problem = target.fetch(part, folder / part.name)
        if problem:
            problems.append(problem)
        else:
            files[part] = folder / part.name
    store_url, series = "", list[Path]()
    secrets: dict[str, tuple[bytes, float]] | None = None
    for part, path in files.items():
        if part.kind == "store":
            store_url = sqlite_url(path)
            problems += _check_store(part, store_url, manifest)
        elif part.kind == "series":
            series.append(path)
            problems += _check_series(part, path)
        elif cipher is not None:
            secrets = _decrypt(cipher, path.read_bytes())
    problems += _check_files(target, manifest, store_url)
    return CheckedBackup(backup_id, manifest, store_url, series, secrets, problems)


def _check_store(part: BackupPart, url: str, manifest: BackupManifest) -> list[str]:
    try:
        with contextlib.closing(open_existing_store(url)) as store:
            damage = store.find_damage()
            if damage:
                return [f"{part.title} is damaged: {damage}."]
            store.migrate()
            return [f"{part.title}: {problem}" for problem in find_differences(store, manifest)]
    except StoreError as error:
        return [f"{part.title} cannot be opened: {error}"]


def find_differences(store: Store, manifest: BackupManifest) -> list[str]:
    """Return sentences about how a restored store differs from the one that was backed up."""
    audit, (totals,) = store.audit_log.verify(), store.ledger.report()
    problems = []
    if audit.broken is not None:
        problems.append(f"Entry {audit.broken} of the audit log is {audit.problem}.")
    compared = {
        "entries of the audit log": (audit.entries, manifest.audit_entries),
        "hash of the audit log": (store.load_snapshot().audit_head.hex(), manifest.audit_head),
        "requests in the ledger": (totals.requests, manifest.requests),
        "nano-dollars in the ledger": (totals.nano_dollars, manifest.nano_dollars),
    }
    problems += [
        f"The {name}: {found}, not {expected}."
        for name, (found, expected) in compared.items()
        if found != expected
    ]
    return problems


def _check_files(target: BackupTarget, manifest: BackupManifest, store_url: str) -> list[str]:
    """Compare the contents of files with their list, and the list with the files in the restored store if it opens."""
    if manifest.file_list is None:  # a version that left out contents may have made the backup
        return []
    try:
        contents = target.read_file_list(manifest)
    except BackupError as error:
        return [str(error)]
    problems, names = [], dict[str, str]()
    if store_url:
        try:
            with contextlib.closing(open_existing_store(store_url)) as store:
                names = {each.sha256: each.key for each in store.files.iter_contents()}
            if names.keys() != contents.keys():
                problems.append("The files of the store are not those of the backup's list.")
        except StoreError:
            pass  # `_check_store` has named it
    for sha256, size_bytes in contents.items():
        name = names.get(sha256, "of a client")
        part = BackupPart(kind="file", name=name, sha256=sha256, size_bytes=size_bytes)
        problems += filter(None, [target.fetch(part, Path(os.devnull))])
    return problems


def _check_series(part: BackupPart, path: Path) -> list[str]:
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (damage,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        damage = str(error)
    return [] if damage == "ok" else [f"{part.title} is damaged: {damage}."]


def _decrypt(cipher: Cipher, content: bytes) -> dict[str, tuple[bytes, float]]:
    from cryptography.fernet import InvalidToken

    try:
        return msgspec.json.decode(cipher.decrypt(content), type=_SECRETS)
    except InvalidToken as error:
        raise BackupError(
            "The secrets of the backup were encrypted with another key. Give the key that `create` used, or none."
        ) from error
