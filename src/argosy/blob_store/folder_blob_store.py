"""Blobs in a folder, which several machines may share."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from argosy.blob_store.blob_store import (
    BLOCK_BYTES,
    BlobNotFoundError,
    BlobStoreError,
    BlobStoreFullError,
    DigestedStream,
)

MIN_FREE_BYTES = 64 * 1024 * 1024
"""Space that blobs leave to others on their disk, such as the store's database."""
_INCOMING = ".incoming"
"""Folder of blobs that are being written. No part of a key begins with a dot."""
_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}


class FolderBlobStore:
    """Blobs as files of a folder, which only this user may read.

    A blob is written under another name, flushed to the disk and then renamed. Its writer locks it meanwhile, so what
    a dead writer has left is recognised and deleted when the folder is opened.

    Args:
        folder: The folder. It is created with the first blob.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / _INCOMING
        with self._translate_errors():
            for file in self._incoming.glob("*"):
                _delete_if_abandoned(file)

    def put(self, key: str, stream: Iterable[bytes]) -> tuple[str, int]:
        digested = DigestedStream(stream)
        path, new = self._folder / key, self._incoming / uuid.uuid4().hex
        with self._translate_errors():
            file = self._create_locked(new)
        try:
            with file:
                for block in digested:
                    with self._translate_errors():
                        self._check_space(file)
                        file.write(block)
                with self._translate_errors():
                    file.flush()
                    os.fsync(file.fileno())
                    _make_folders(path.parent)
                    new.rename(path)
                    _sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        return digested.summary()

    def open(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self._translate_errors():
            file = (self._folder / key).open("rb")
            file.seek(start)
        return self._read(file, None if end is None else end - start)

    def delete(self, key: str) -> None:
        with self._translate_errors():
            (self._folder / key).unlink(missing_ok=True)

    @staticmethod
    def _create_locked(new: Path) -> BinaryIO:
        _make_folders(new.parent)
        while True:
            file = open(new, "wb", opener=_open_private)  # noqa: SIM115 - the caller closes it
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # it was not deleted before it was locked
                return file
            file.close()

    def _read(self, file: BinaryIO, left: int | None) -> Iterator[bytes]:
        with file:
            while left is None or left > 0:
                with self._translate_errors():
                    block = file.read(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES))
                if not block:
                    return
                left = None if left is None else left - len(block)
                yield block

    @staticmethod
    def _check_space(file: BinaryIO) -> None:
        found = os.fstatvfs(file.fileno())
        if found.f_bavail * found.f_frsize < MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            message = f"{error.filename} does not exist. Restore it from a backup."
            raise BlobNotFoundError(message) from error
        except OSError as error:
            reason = f"The files in {self._folder} cannot be used: {error.strerror}."
            if error.errno in _FULL_ERRORS:
                raise BlobStoreFullError(f"{reason} Free space on its disk.") from error
            raise BlobStoreError(f"{reason} Check its disk and its permissions.") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make_folders(folder: Path) -> None:
    """Create a folder with those above it, so that they survive a crash."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_if_abandoned(file: Path) -> None:
    with suppress(BlockingIOError, FileNotFoundError), file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
