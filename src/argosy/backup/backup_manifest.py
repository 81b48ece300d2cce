"""Manifest of a backup: what the set has, with the SHA-256 of each part, and what must be true after a restore."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from argosy.model_store import ModelVersion

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

Cipher: TypeAlias = "Fernet"
MIN_KEY_BYTES = 32
ID_DIGITS = 16
"""Digits of the manifest's SHA-256 in the id of a backup."""
BACKUP_ID = re.compile(rf"\d{{8}}T\d{{9}}Z-[0-9a-f]{{{ID_DIGITS}}}")


class BackupError(ValueError):
    """A backup cannot be made or used. The message says what to change."""


PartKind = Literal["store", "secrets", "series", "files", "file"]
"""Kinds of parts. `files` is the list of the contents of clients' files, and each `file` is in that list only."""


class BackupPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a backup, stored by its content."""

    kind: PartKind
    name: str
    """Name of the file, or what it is."""
    sha256: str
    """SHA-256 in hex."""
    size_bytes: int

    @property
    def title(self) -> str:
        """Name of the part for messages, with the file that has it in the target."""
        return f"{self.kind} {self.name} ({content_path(self.sha256)})"


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a backup has."""

    format: Literal[1] = 1
    version: str
    """Version of Argosy that made it. Older ones may not be able to restore it."""
    revision: str
    """Revision of the store's tables."""
    created_at: float
    """Time of the state in it, in seconds since the epoch."""
    duration_s: float
    """How long it took to make."""
    rows: int
    """Rows of the store."""
    audit_entries: int
    audit_head: str
    """Hash of the last entry of the audit log in hex."""
    requests: int
    """Requests in the ledger."""
    nano_dollars: int
    """Their cost."""
    files: int = 0
    """Files of clients, with parts of uploads."""
    file_bytes: int = 0
    """Size of their contents, each counted once."""
    parts: list[BackupPart]
    models: list[ModelVersion]
    """Versions in the machine's model store. Their files are not in the backup."""

    @property
    def size_bytes(self) -> int:
        """Size of all parts, with contents of files."""
        return sum(part.size_bytes for part in self.parts) + self.file_bytes

    @property
    def file_list(self) -> BackupPart | None:
        """The list of contents of files; None in a backup without any."""
        return next((part for part in self.parts if part.kind == "files"), None)

    def encode(self) -> tuple[str, bytes]:
        """Return the id of the backup, which has a part of the manifest's SHA-256, and the manifest as JSON."""
        content = msgspec.json.format(msgspec.json.encode(self))
        return f"{_format_time(self.created_at)}-{_digest(content)}", content


def decode_manifest(backup_id: str, content: bytes) -> BackupManifest:
    """Decode a manifest.

    Raises:
        BackupError: It is not what was written, or a newer version of Argosy wrote it.
    """
    if _digest(content) != backup_id.rpartition("-")[2]:
        raise BackupError(
            f"The manifest {manifest_path(backup_id)} is damaged. Use another backup, and check the disk of the target."
        )
    try:
        return msgspec.json.decode(content, type=BackupManifest)
    except msgspec.MsgspecError as error:
        raise BackupError(
            f"The manifest {manifest_path(backup_id)} has an unknown format ({error}). Use the version of Argosy that"
            " made it, or a later one."
        ) from error


def manifest_path(backup_id: str) -> str:
    """Return the path of a manifest in its target."""
    return f"backups/{backup_id}.json"


def content_path(sha256: str) -> str:
    """Return the path of a part in its target, which all backups with the same content share."""
    return f"content/{sha256[:2]}/{sha256}"


def read_cipher(key_file: Path | None) -> Cipher | None:
    """Return the cipher for the secrets of a backup, by the key in a file, or None without a file.

    Raises:
        BackupError: The file cannot be read, or is too short to be random.
    """
    if key_file is None:
        return None
    from cryptography.fernet import Fernet
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    remedy = f"Make one with `openssl rand -base64 {MIN_KEY_BYTES} > FILE`, and keep it apart from the backups."
    try:
        content = key_file.read_bytes().strip()
    except OSError as error:
        raise BackupError(
            f"The key {key_file} cannot be read ({error.strerror}). {remedy}"
        ) from error
    if len(content) < MIN_KEY_BYTES:
        raise BackupError(f"The key {key_file} has less than {MIN_KEY_BYTES} bytes. {remedy}")
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"argosy backup").derive(content)
    return Fernet(base64.urlsafe_b64encode(derived))


def _format_time(created_at: float) -> str:
    """Return a time with milliseconds, so that ids sort from old to new."""
    return f"{datetime.fromtimestamp(created_at, UTC):%Y%m%dT%H%M%S%f}"[:-3] + "Z"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:ID_DIGITS]
