"""Disk cache of packed weights, which replicas map, so that they start fast and share the memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self

import structlog
import torch
from torch import Tensor

from argosy.engine.execution.kernels.pack_file import (
    DamagedPackFileError,
    PackFile,
    PackWriter,
    read_pack_file,
)
from argosy.folders import cache_folder

PackFunction = Callable[[Tensor], None]
"""Function that writes a packed weight into a uint8 tensor."""
PackedWeightProvider = Callable[[int, PackFunction], Tensor]
"""Function of (nbytes, pack) that returns a packed weight, from the cache or by calling `pack`."""

PACK_SUFFIX = ".packed"
PARTIAL_SUFFIX = ".partial"
"""Suffix of an incomplete file, which the process that writes it has locked."""
MAX_FREE_DISK_FRACTION = 0.5
"""Maximum fraction of the free disk space for a new file."""
LOCK_TIMEOUT_S = 60.0
"""Maximum time to wait for another process that packs the same checkpoint."""
LOCK_POLL_INTERVAL_S = 0.02

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def pack_in_memory(nbytes: int, pack: PackFunction) -> Tensor:
    """Pack a weight into memory of this process."""
    packed = torch.empty(nbytes, dtype=torch.uint8)
    pack(packed)
    return packed


class PackCache:
    """Packed weights of one checkpoint. Use it as a context manager, which saves new weights on a normal exit."""

    def __init__(
        self, stored: PackFile | None = None, pending_file: _PendingPackFile | None = None
    ) -> None:
        """Create a cache that reads a file, writes a file, or (with neither) packs in memory. See `open_pack_cache`."""
        self._stored = stored
        self._pending_file = pending_file
        self.mapped_bytes = 0
        """Bytes of mapped weights, which the system counts as available because they are page cache."""

    @property
    def path(self) -> Path | None:
        """File of the stored weights, if an earlier start has stored them."""
        return None if self._stored is None else self._stored.path

    @property
    def is_stored(self) -> bool:
        """Whether an earlier start has packed and stored the weights."""
        return self._stored is not None

    def __contains__(self, key: str) -> bool:
        """Return whether `get` finds `key` without packing."""
        return self._stored is not None and key in self._stored.index

    def get(self, key: str, nbytes: int, pack: PackFunction) -> Tensor:
        """Return the packed weight of `key` as a read-only uint8 tensor. Call it once per key.

        `pack` writes the `nbytes` bytes if the cache does not have them.
        """
        if self._stored is not None and key in self._stored.index:
            payload = self._stored.payload(key, nbytes)
        elif self._pending_file is not None:
            try:
                payload = self._pending_file.writer.add_payload(key, nbytes, pack)
            except OSError as error:
                self._disable(self._pending_file, error)
                return pack_in_memory(nbytes, pack)
        else:
            return pack_in_memory(nbytes, pack)
        self.mapped_bytes += nbytes
        return payload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pending_file, self._pending_file = self._pending_file, None
        if pending_file is None:
            return
        if kind is not None or not pending_file.writer.index:
            pending_file.abandon()
            return
        try:
            pending_file.finish()
        except OSError as error:
            self._disable(pending_file, error)

    def _disable(self, pending_file: _PendingPackFile, error: OSError) -> None:
        """Stop writing the file and remove it. Existing mappings of it stay valid."""
        self._pending_file = None
        pending_file.abandon()
        _log_disabled(error)


def open_pack_cache(
    identity: tuple[str, ...], *, required_bytes: int, limit_bytes: int
) -> PackCache:
    """Open the cache of one checkpoint, waiting while another process packs the same one.

    Does not fail. Without a usable disk, weights are packed in memory.

    Args:
        identity: Strings that identify checkpoint, dtype and packed layout.
        required_bytes: Approximate size of all packed weights.
        limit_bytes: Maximum size of all files together. The least recently used files are removed.
    """
    if limit_bytes <= 0:
        return PackCache()
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    try:
        path = pack_cache_folder() / f"{name}{PACK_SUFFIX}"
        with contextlib.suppress(FileNotFoundError, DamagedPackFileError):
            return PackCache(read_pack_file(path))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        pending_file = _PendingPackFile(path, limit_bytes)
    except OSError as error:
        _log_disabled(error)
        return PackCache()
    try:
        stored = pending_file.begin(required_bytes)
    except OSError as error:
        pending_file.abandon()
        _log_disabled(error)
        return PackCache()
    return PackCache(pending_file=pending_file) if stored is None else PackCache(stored)


def pack_cache_folder() -> Path:
    """Return the folder of the pack cache.

    Raises:
        FileNotFoundError: The user has no home directory.
    """
    return cache_folder() / "packed"


class _PendingPackFile:
    """File that this process writes under a temporary name and renames when it is complete."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Wait for the lock.

        Raises:
            OSError: The lock is not available in time.
        """
        self._path = path
        self._partial = path.with_suffix(PARTIAL_SUFFIX)
        self._limit_bytes = limit_bytes
        self._file = _lock_partial_file(self._partial)
        self.writer: PackWriter

    def begin(self, required_bytes: int) -> PackFile | None:
        """Prepare to write, or return the file that another process has completed meanwhile.

        Raises:
            OSError: `required_bytes` do not fit.
        """
        try:
            stored = read_pack_file(self._path)
        except FileNotFoundError:
            pass
        except DamagedPackFileError as error:
            log.warning("pack_cache_file_damaged", file=str(self._path), reason=str(error))
        else:
            self.abandon()
            return stored
        free_bytes = shutil.disk_usage(self._path.parent).free
        max_bytes = min(self._limit_bytes, int(free_bytes * MAX_FREE_DISK_FRACTION))
        self.writer = PackWriter(self._file, required_bytes, max_bytes)
        return None

    def finish(self) -> None:
        """Complete and rename the file, and evict older files beyond the limit."""
        self.writer.finish()
        self._partial.replace(self._path)
        self._release()
        _evict_old_files(self._path, self._limit_bytes)

    def abandon(self) -> None:
        """Remove the incomplete file."""
        if not self._file.closed:
            self._partial.unlink(missing_ok=True)
            self._release()

    def _release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # a mapping would keep the lock after close
        self._file.close()


def _lock_partial_file(partial: Path) -> BinaryIO:
    """Open or create the file at `partial`, and lock it.

    Raises:
        TimeoutError: Another process has the lock for `LOCK_TIMEOUT_S`.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                file.close()
                raise TimeoutError(f"another process has been packing for {LOCK_TIMEOUT_S:g} s")
            time.sleep(LOCK_POLL_INTERVAL_S)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # renamed or removed by the other process meanwhile


def _try_lock(file: BinaryIO) -> bool:
    """Try to lock a file, and return the success."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _evict_old_files(new_file: Path, limit_bytes: int) -> None:
    """Remove incomplete files of dead processes, and the least recently used files beyond the limit.

    Existing mappings of removed files stay valid.
    """
    for partial in new_file.parent.glob(f"*{PARTIAL_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), partial.open("rb") as file:
            if _try_lock(file):
                partial.unlink(missing_ok=True)
    files = []
    for path in new_file.parent.glob(f"*{PACK_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            state = path.stat()
            files.append((state.st_mtime_ns, state.st_size, path))
    excess = sum(size for _, size, _ in files) - limit_bytes
    for _, size, path in sorted(files):
        if excess > 0 and path != new_file:
            path.unlink(missing_ok=True)
            excess -= size
            log.info("pack_cache_file_evicted", file=str(path), bytes=size)


def _log_disabled(error: OSError) -> None:
    log.warning("pack_cache_disabled", reason=str(error))
