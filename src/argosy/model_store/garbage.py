"""Removal of models that nothing uses: retired versions, files without a model, and downloads that were given up."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.model_store.file_lock import try_lock
from argosy.model_store.manifest import DIGEST_PREFIX, MANIFEST_FILE
from argosy.model_store.model_store import ModelStore, ModelVersion

PARTIAL_AGE_S = 7 * 86_400
"""Age from which the rest of an interrupted download is garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Files and versions that were removed from a store, or would be."""

    versions: tuple[ModelVersion, ...]
    """Retired versions."""
    models: tuple[str, ...]
    """Digests of models without a version."""
    blobs: int
    """Number of files that belong to no model."""
    partial_files: int
    """Number of interrupted downloads."""
    size: int
    """Bytes that the files and downloads take."""
    used: dict[str, str]
    """Why retired versions are kept, by digest."""


def collect_garbage(
    store: ModelStore,
    *,
    used_digests: Collection[str] = (),
    used_sources: Collection[str] = (),
    is_dry_run: bool = False,
) -> Garbage:
    """Remove what nothing uses. Candidates and stable versions stay, and so does what a running replica has loaded.

    Args:
        store: The store.
        used_digests: Digests of models that fleets use.
        used_sources: URLs from which the replicas of fleets load models.
        is_dry_run: Only find out what would be removed.

    Raises:
        ModelStoreError: A download is running, or the store cannot be read or changed.
    """
    with store.collecting(), ExitStack() as locks:
        versions = store.list_versions()
        kept_digests = {version.digest for version in versions if version.stage != "retired"}
        used: dict[str, str] = {}
        for version in versions:
            if version.digest in kept_digests:
                continue
            if version.digest in used_digests or version.source in used_sources:
                used[version.digest] = "a fleet declares it"
            elif not _lock_model(store, version.digest, locks):
                used[version.digest] = "a replica has loaded it"
        removed = tuple(
            version
            for version in versions
            if version.stage == "retired" and version.digest not in used
        )
        kept_digests |= used.keys()
        models = [
            digest
            for digest in _stored_digests(store)
            if digest not in kept_digests
            and digest not in used_digests
            and (
                any(version.digest == digest for version in removed)
                or _lock_model(store, digest, locks)
            )
        ]
        blobs = _unused_blobs(store, set(models))
        partial = [file for file in _list(store.partial) if _age_s(file) > PARTIAL_AGE_S]
        garbage = Garbage(
            versions=removed,
            models=tuple(sorted(set(models) - {version.digest for version in removed})),
            blobs=len(blobs),
            partial_files=len(partial),
            size=sum(file.stat().st_size for file in (*blobs, *partial) if file.is_file()),
            used=used,
        )
        if not is_dry_run:
            _remove(store, removed, models, blobs, partial)
        return garbage


def _remove(
    store: ModelStore,
    versions: Collection[ModelVersion],
    digests: Collection[str],
    blobs: Collection[Path],
    partial: Collection[Path],
) -> None:
    """Remove files in an order that leaves a valid store at each moment."""
    for version in versions:
        store.remove_version(version)
    for digest in digests:
        folder = store.model_folder(digest)
        (folder / MANIFEST_FILE).unlink(missing_ok=True)  # from here on no replica finds it
        shutil.rmtree(folder, ignore_errors=True)
        (store.manifests / folder.name).unlink(missing_ok=True)
    for file in (*blobs, *partial):
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    for record in _list(store.fetched):
        if not store.blob(record.read_text()[:64] or "-").is_file():
            record.unlink(missing_ok=True)


def _lock_model(store: ModelStore, digest: str, locks: ExitStack) -> bool:
    """Lock a model until `locks` closes, unless a replica has loaded it. Return whether it is locked."""
    with suppress(FileNotFoundError):
        manifest = locks.enter_context((store.model_folder(digest) / MANIFEST_FILE).open("rb"))
        return try_lock(manifest.fileno(), fcntl.LOCK_EX)
    return True


def _stored_digests(store: ModelStore) -> list[str]:
    names = {file.name for folder in (store.models, store.manifests) for file in _list(folder)}
    return sorted(DIGEST_PREFIX + name for name in names if not name.startswith("."))


def _unused_blobs(store: ModelStore, removed: Collection[str]) -> list[Path]:
    used = set()
    for digest in _stored_digests(store):
        manifest = None if digest in removed else store.read_manifest(digest)
        used |= set() if manifest is None else {file.sha256 for file in manifest.files}
    return [file for file in _list(store.blobs) if file.name not in used]


def _list(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _age_s(file: Path) -> float:
    return time.time() - file.lstat().st_mtime
