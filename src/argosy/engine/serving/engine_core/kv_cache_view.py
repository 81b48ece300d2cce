"""Set of KV blocks in the core's prefix cache, and the changes that each reader has not received yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from argosy.engine.serving.core_messages import KvChange
from argosy.protocol import unpack_block_names


@dataclass(frozen=True, slots=True)
class KvUpdate:
    """Changes for one reader, as block names."""

    is_snapshot: bool
    """Whether `stored` is the complete set."""
    stored: set[int]
    removed: set[int]


class KvCacheView:
    """Block names in the prefix cache of the current core. Not thread-safe: use it from one event loop."""

    def __init__(self) -> None:
        self.block_names: set[int] = set()
        self._readers: set[KvUpdateReader] = set()

    def apply_change(self, change: KvChange) -> None:
        """Apply the core's report of its last steps."""
        stored = set(unpack_block_names(change.stored_names)) - self.block_names
        removed = self.block_names.intersection(unpack_block_names(change.removed_names))
        self.block_names |= stored
        self.block_names -= removed
        for reader in self._readers:
            reader.record_change(stored, removed)

    def reset(self) -> None:
        """Clear the view after the core process has exited."""
        self.block_names = set()
        for reader in self._readers:
            reader.request_snapshot()

    def close(self) -> None:
        """Close all readers."""
        for reader in self._readers:
            reader.close()

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[KvUpdateReader]:
        """Return a context manager with a new reader. Its first update is a snapshot."""
        reader = KvUpdateReader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)


class KvUpdateReader:
    """Changes that one reader has not received yet.

    Only the net difference is kept, so memory stays bounded however slowly the reader reads.
    """

    def __init__(self, view: KvCacheView) -> None:
        self.is_closed = False
        """Whether no more updates follow."""
        self._view = view
        self._needs_snapshot = False
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._has_update = asyncio.Event()
        self.request_snapshot()

    def record_change(self, stored: set[int], removed: set[int]) -> None:
        """Add blocks that were stored and removed to the pending update."""
        if not self._needs_snapshot:
            self._stored |= stored
            self._stored -= removed
            self._removed |= removed
            self._removed -= stored
            if len(self._removed) > len(self._view.block_names):  # a snapshot is smaller
                self.request_snapshot()
        self._has_update.set()

    def request_snapshot(self) -> None:
        """Replace the pending update by a snapshot of the whole cache."""
        self._needs_snapshot, self._stored, self._removed = True, set(), set()
        self._has_update.set()

    def close(self) -> None:
        """End the reader. `next_update` returns None from then on."""
        self.is_closed = True
        self._has_update.set()

    async def next_update(self, timeout_s: float) -> KvUpdate | None:
        """Return the pending update. Returns None after `timeout_s` without changes, or if the reader is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_update.wait()
        if self.is_closed or not self._has_update.is_set():
            return None
        self._has_update.clear()
        stored = set(self._view.block_names) if self._needs_snapshot else self._stored
        update = KvUpdate(self._needs_snapshot, stored, self._removed)
        self._needs_snapshot, self._stored, self._removed = False, set(), set()
        return update
