"""SHA-256 of files, computed in parallel and remembered while a file does not change."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from argosy.folders import cache_folder, replace_file

CHUNK_BYTES = 4 << 20
MAX_HASH_THREADS = 8
PROGRESS_INTERVAL_S = 0.2
MIN_AGE_S = 1.0
"""A file that changed this recently is not remembered, because a further change might leave its times as they are."""

ByteCallback = Callable[[int], None]
"""Called with the number of bytes that have been read since the last call. It may be called from several threads."""


def ignore_bytes(count: int) -> None:
    """Report nothing. A `ByteCallback`."""


class VerifiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """State of a file when its SHA-256 was computed."""

    identity: tuple[int, int, int, int, int]
    """Device, inode, size, and times of the last changes of content and of state, in ns."""
    sha256: str


class FileHashes:
    """Computes the SHA-256 of files, and remembers it by the inode, size and times of each.

    A file that is changed through the file system gets another change time and is read again. Bits that flip on the
    medium change no time: `is_trusting=False` reads every file. Without a folder that can be written nothing is
    remembered.

    Args:
        folder: Folder of what is remembered; by default in the cache folder of the user.
        is_trusting: Whether what is remembered is used.
    """

    def __init__(self, folder: Path | None = None, *, is_trusting: bool = True) -> None:
        self._folder = folder
        self._is_trusting = is_trusting
        if folder is None:
            with contextlib.suppress(FileNotFoundError):
                self._folder = cache_folder() / "verified-files"

    def sha256(self, file: Path, on_bytes: ByteCallback = ignore_bytes) -> str:
        """Return the SHA-256 of a file, in hexadecimal.

        Raises:
            OSError: The file cannot be read.
        """
        state = file.stat()
        known = self._find(state) if self._is_trusting else None
        if known is not None:
            on_bytes(state.st_size)
            return known
        started_at = time.time()
        digest = hash_file(file, on_bytes)
        if state.st_ctime < started_at - MIN_AGE_S and _identity(file.stat()) == _identity(state):
            self._remember(state, digest)
        return digest

    def sha256_of_all(
        self, files: Iterable[Path], on_progress: ByteCallback = ignore_bytes
    ) -> Iterator[tuple[Path, str]]:
        """Yield files with their SHA-256, in the given order. Several are read at the same time.

        Args:
            files: The files.
            on_progress: Called with the number of bytes that have been read so far, in the thread of the caller.

        Raises:
            OSError: A file cannot be read.
        """
        counts: deque[int] = deque()
        threads = min(MAX_HASH_THREADS, len(os.sched_getaffinity(0)))
        listed = list(files)
        with ThreadPoolExecutor(threads, "hash") as pool:
            results = [pool.submit(self.sha256, file, counts.append) for file in listed]
            try:
                for file, result in zip(listed, results, strict=True):
                    while not wait([result], PROGRESS_INTERVAL_S).done:
                        on_progress(sum(tuple(counts)))
                    yield file, result.result()
                on_progress(sum(counts))
            finally:
                pool.shutdown(cancel_futures=True)

    def forget(self, file: Path) -> None:
        """Forget what is remembered of a file."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._file_of(file.stat()).unlink(missing_ok=True)

    def _find(self, state: os.stat_result) -> str | None:
        if self._folder is None:
            return None
        try:
            known = msgspec.json.decode(self._file_of(state).read_bytes(), type=VerifiedFile)
        except (OSError, msgspec.MsgspecError):
            return None
        return known.sha256 if known.identity == _identity(state) else None

    def _remember(self, state: os.stat_result, digest: str) -> None:
        if self._folder is None:
            return
        verified = VerifiedFile(identity=_identity(state), sha256=digest)
        with contextlib.suppress(OSError):  # it will be computed again
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._file_of(state), msgspec.json.encode(verified))

    def _file_of(self, state: os.stat_result) -> Path:
        assert self._folder is not None  # noqa: S101 - the callers have checked it
        return self._folder / f"{state.st_dev:x}-{state.st_ino:x}.json"


def hash_file(file: Path, on_bytes: ByteCallback = ignore_bytes) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    digest, buffer = hashlib.sha256(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            on_bytes(count)
    return digest.hexdigest()


def _identity(state: os.stat_result) -> tuple[int, int, int, int, int]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
