"""Where backups are: a folder, or an object store by its URL. Parts are files that are named by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from argosy.backup.backup_manifest import (
    BACKUP_ID,
    BackupError,
    BackupManifest,
    BackupPart,
    content_path,
    decode_manifest,
    manifest_path,
)
from argosy.blob_store import BlobStoreError
from argosy.model_store import find_file_system

CHUNK_BYTES = 1 << 20
UNUSED_CONTENT_S = 86_400.0
"""Age from which parts that no manifest names are deleted. Younger ones may belong to a backup that is being made."""


class BackupTarget:
    """Folder or object store with backups. Every call blocks. Methods raise BackupError, which says what to change.

    A backup exists once its manifest does, which is written last. Several machines may use a target at the same time.

    Args:
        url: A path, or a URL that fsspec or obstore opens, such as `s3://bucket/prefix`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with self._explain_errors():
            self._files, root = find_file_system(url)
        self._root = root.rstrip("/")
        self._folder = Path(root) if "file" in self._files.protocol else None

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except (BackupError, BlobStoreError):
            raise
        except Exception as error:  # each file system has its own
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise BackupError(
                f"The backups in {self.url.partition('?')[0]} cannot be used: {reason}. Check the address, its"
                " permissions and its free space."
            ) from error

    def make_scratch_folder(self) -> Path | None:
        """Return a folder with room for a backup; None for that of the system, without a folder of its own."""
        if self._folder is None:
            return None
        with self._explain_errors():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / "content").mkdir(mode=0o700, exist_ok=True)
        return self._folder / "content"

    def list_ids(self) -> list[str]:
        """Return the ids of all backups, from old to new."""
        with self._explain_errors():
            self._files.invalidate_cache()
            names = [Path(path).stem for path in self._files.find(f"{self._root}/backups")]
        return sorted(name for name in names if BACKUP_ID.fullmatch(name))

    def find_id(self, reference: str | None) -> str:
        """Return the id of the backup that begins so, or of the newest one for None."""
        ids = self.list_ids()
        found = [each for each in ids if each.startswith(reference)] if reference else ids[-1:]
        if len(found) != 1:
            problem = f"{'several backups' if found else 'no backup'} {reference or ''}".strip()
            raise BackupError(f"{self.url} has {problem}. `argosy backup list` shows their ids.")
        return found[0]

    def read_manifest(self, backup_id: str) -> BackupManifest:
        """Read the manifest of a backup, which must be what was written."""
        with self._explain_errors():
            return decode_manifest(
                backup_id, self._files.cat_file(f"{self._root}/{manifest_path(backup_id)}")
            )

    def write_manifest(self, manifest: BackupManifest, contents: Collection[str]) -> str:
        """Write the manifest of a backup whose parts and contents of files are complete. Returns the backup's id."""
        used = {part.sha256 for part in manifest.parts}.union(contents)
        if used - self._list_content().keys():
            raise BackupError(
                "Another process deleted parts of the backup while it was made. Make it again."
            )
        backup_id, content = manifest.encode()
        with self._explain_errors(), self._open_to_write(manifest_path(backup_id)) as file:
            file.write(content)
        return backup_id

    def put(self, path: Path, known: Collection[str]) -> tuple[str, int]:
        """Write a file by its content, unless its SHA-256 is among the `known`. Returns SHA-256 and size in bytes."""
        with path.open("rb") as source:
            sha256 = hashlib.file_digest(source, "sha256").hexdigest()
            size_bytes = source.tell()
            if sha256 not in known:
                source.seek(0)
                with self._explain_errors(), self._open_to_write(content_path(sha256)) as file:
                    while chunk := source.read(CHUNK_BYTES):
                        file.write(chunk)
        return sha256, size_bytes

    def put_file(self, part: BackupPart, blocks: Iterable[bytes]) -> None:
        """Write the content of a client's file, which must be what the part says."""
        digest, path = hashlib.sha256(), content_path(part.sha256)
        with self._explain_errors(), self._open_to_write(path) as file:
            for block in blocks:
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != part.sha256:
            with self._explain_errors():
                self._files.rm_file(f"{self._root}/{path}")
            raise BackupError(
                f"The content of the file {part.name} is damaged. Put it back from another backup, or delete the file,"
                " and make the backup again."
            )

    def open_file(self, part: BackupPart) -> Iterator[bytes]:
        """Yield the content of a client's file in blocks. Raises BackupError at its end if it is not what was put."""
        digest = hashlib.sha256()
        path = f"{self._root}/{content_path(part.sha256)}"
        try:
            with self._explain_errors(), self._files.open(path, "rb") as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    yield chunk
        except BackupError as error:
            raise BackupError(f"{part.title} cannot be read. {error}") from error
        if digest.hexdigest() != part.sha256:
            raise BackupError(f"{part.title} is damaged. Use another backup.")

    def read_file_list(self, manifest: BackupManifest) -> dict[str, int]:
        """Return the sizes in bytes of the contents of clients' files in a backup, by their SHA-256."""
        part = manifest.file_list
        if part is None:
            return {}
        try:
            return msgspec.json.decode(b"".join(self.open_file(part)), type=dict[str, int])
        except msgspec.MsgspecError as error:
            raise BackupError(f"{part.title} is damaged: {error}. Use another backup.") from error

    @contextmanager
    def _open_to_write(self, path: str) -> Iterator[BinaryIO]:
        """Open a file that appears as a whole: in a folder by a rename, elsewhere by the end of the upload."""
        if self._folder is None:
            with self._files.open(f"{self._root}/{path}", "wb") as file:
                yield file
            return
        final = self._folder / path
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = final.with_name(f".{final.name}-{os.getpid()}")
        try:
            new.touch(0o600)
            with new.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            new.replace(final)
        finally:
            new.unlink(missing_ok=True)

    def fetch(self, part: BackupPart, path: Path) -> str:
        """Copy a part into a file. Returns what is wrong with it; empty if every byte is as it was."""
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with (
                self._files.open(f"{self._root}/{content_path(part.sha256)}", "rb") as source,
                path.open("wb") as copy,
            ):
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size_bytes += len(chunk)
                    copy.write(chunk)
        except FileNotFoundError:
            return f"{part.title} is missing."
        except Exception as error:  # noqa: BLE001 - each file system has its own
            return f"{part.title} cannot be copied to {path.parent}: {error}."
        if digest.hexdigest() == part.sha256:
            return ""
        damage = "is damaged" if size_bytes == part.size_bytes else f"has {size_bytes} bytes"
        return f"{part.title} {damage}: it is not the {part.size_bytes} bytes that were written."

    def read_manifests(self) -> dict[str, BackupManifest | BackupError]:
        """Return the manifests of all backups by id, from old to new, or what is wrong with one."""
        found: dict[str, BackupManifest | BackupError] = {}
        for backup_id in self.list_ids():
            try:
                found[backup_id] = self.read_manifest(backup_id)
            except BackupError as error:
                found[backup_id] = error
        return found

    def delete(self, backup_ids: Collection[str]) -> None:
        """Delete backups, and parts that no other backup has. Fails if the manifest of another one is damaged."""
        with self._explain_errors():
            for backup_id in backup_ids:
                self._files.rm_file(f"{self._root}/{manifest_path(backup_id)}")
        used = set[str]()
        for manifest in self.read_manifests().values():
            if isinstance(manifest, BackupError):
                raise manifest
            used |= {part.sha256 for part in manifest.parts} | self.read_file_list(manifest).keys()
        before = time.time() - UNUSED_CONTENT_S
        with self._explain_errors():
            for name, path in self._list_content().items():
                if name not in used and self._files.modified(path).timestamp() < before:
                    self._files.rm_file(path)

    def _list_content(self) -> dict[str, str]:
        """Return the paths of all stored parts by their names."""
        with self._explain_errors():
            self._files.invalidate_cache()
            return {Path(path).name: path for path in self._files.find(f"{self._root}/content")}
