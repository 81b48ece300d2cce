"""Packed weights kept on disk: made once, then mapped, so that replicas start fast and share their memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import structlog
import torch

from argosy.engine.execution.pack_file import (
    DamagedPackFileError,
    PackFile,
    PackWriter,
    read_pack_file,
)
from argosy.folders import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    PackFunction = Callable[[Tensor], None]
    """Fills a uint8 tensor with what a weight packs to."""
    PackedWeightProvider = Callable[[int, PackFunction], Tensor]
    """`keep(nbytes, pack)`: what `pack` fills in, now or when this checkpoint was first loaded."""

PACK_SUFFIX = ".packed"
PARTIAL_SUFFIX = ".partial"
"""A file that is being packed, locked by the process that does it."""
MAX_FREE_DISK_FRACTION = 0.5
"""Most of the free disk that a new file may take."""
LOCK_TIMEOUT_S = 60.0
"""How long to wait for another process that packs the same checkpoint."""
LOCK_POLL_INTERVAL_S = 0.02

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def pack_in_memory(nbytes: int, pack: PackFunction) -> Tensor:
    """Packed now, in memory of this process."""
    packed = torch.empty(nbytes, dtype=torch.uint8)
    pack(packed)
    return packed


class PackCache:
    """The packed weights of one checkpoint. Use it as a context: what was packed is kept when that ends well."""

    def __init__(
        self, stored: PackFile | None = None, pending_file: _PendingPackFile | None = None
    ) -> None:
        """From a file, into a file, or (neither) in memory; see `open_packs`."""
        self._stored = stored
        self._pending_file = pending_file
        self.mapped_bytes = 0
        """Bytes in use that the system counts as available, as they lie in its page cache."""

    def __contains__(self, key: str) -> bool:
        """Whether `get` will have no need to pack."""
        return self._stored is not None and key in self._stored.index

    def get(self, key: str, nbytes: int, pack: PackFunction) -> Tensor:
        """What `pack` fills `nbytes` with, as uint8 that nobody may write to; each key is got once."""
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
        growing, self._pending_file = self._pending_file, None
        if growing is None:
            return
        if kind is not None or not growing.writer.index:
            growing.abandon()
            return
        try:
            growing.finish()
        except OSError as error:
            self._disable(growing, error)

    def _disable(self, growing: _PendingPackFile, error: OSError) -> None:
        """Go on without a file; what was mapped from it stays valid."""
        self._pending_file = None
        growing.abandon()
        _log_disabled(error)


def open_pack_cache(
    identity: tuple[str, ...], *, required_bytes: int, limit_bytes: int
) -> PackCache:
    """The packs of what `identity` tells apart: checkpoint, dtype, and whatever the layout depends on.

    need_bytes: about what they take. limit_bytes: for all files together; those used longest ago give way.
    Waits while another process packs the same. Never fails: without a usable disk it packs in memory.
    """
    if limit_bytes <= 0:
        return PackCache()
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    try:
        path = pack_cache_folder() / f"{name}{PACK_SUFFIX}"
        with contextlib.suppress(FileNotFoundError, DamagedPackFileError):
            return PackCache(read_pack_file(path))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        growing = _PendingPackFile(path, limit_bytes)
    except OSError as error:
        _log_disabled(error)
        return PackCache()
    try:
        made_meanwhile = growing.begin(required_bytes)
    except OSError as error:
        growing.abandon()
        _log_disabled(error)
        return PackCache()
    return PackCache(pending_file=growing) if made_meanwhile is None else PackCache(made_meanwhile)


def pack_cache_folder() -> Path:
    """Where packed weights are kept. Raises FileNotFoundError for a user without a home."""
    return cache_folder() / "packed"


class _PendingPackFile:
    """A file that is ours to make: it grows under another name, and is renamed when it is whole."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Waits for the lock. Raises OSError when it cannot be had."""
        self._path = path
        self._partial = path.with_suffix(PARTIAL_SUFFIX)
        self._limit_bytes = limit_bytes
        self._file = _lock_partial_file(self._partial)
        self.writer: PackWriter

    def begin(self, required_bytes: int) -> PackFile | None:
        """Ready to add; or what another process has made meanwhile. Raises OSError without room for that much."""
        try:
            made = read_pack_file(self._path)
        except FileNotFoundError:
            pass
        except DamagedPackFileError as error:
            log.warning("pack_cache_file_damaged", file=str(self._path), reason=str(error))
        else:
            self.abandon()
            return made
        free_bytes = shutil.disk_usage(self._path.parent).free
        room_bytes = min(self._limit_bytes, int(free_bytes * MAX_FREE_DISK_FRACTION))
        self.writer = PackWriter(self._file, required_bytes, room_bytes)
        return None

    def finish(self) -> None:
        """Make the file known; then older ones give way."""
        self.writer.finish()
        self._partial.replace(self._path)
        self._release()
        _evict_old_files(self._path, self._limit_bytes)

    def abandon(self) -> None:
        """Leave nothing on disk."""
        if not self._file.closed:
            self._partial.unlink(missing_ok=True)
            self._release()

    def _release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # a mapping of the file would keep the lock
        self._file.close()


def _lock_partial_file(partial: Path) -> BinaryIO:
    """The file at `partial`, made when there is none, locked. Raises TimeoutError when another process keeps it."""
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
        file.close()  # it was renamed or removed while we waited


def _try_lock(file: BinaryIO) -> bool:
    """Try to lock it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _evict_old_files(new_file: Path, limit_bytes: int) -> None:
    """Remove files until all together fit, those used longest ago first, and what dead processes left.

    Whoever has a removed file mapped keeps it.
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
