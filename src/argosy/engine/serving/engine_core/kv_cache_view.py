"""Which KV blocks the core's requests would find, and what of it each reader has not been told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from argosy.engine.serving.core_messages import KvChange
from argosy.protocol import unpack_block_names


@dataclass(frozen=True, slots=True)
class KvUpdate:
    """What a reader has to be told, as names."""

    is_snapshot: bool
    """`stored` is all that there is."""
    stored: set[int]
    removed: set[int]


class KvCacheView:
    """One core's blocks after another's. Belongs to one event loop."""

    def __init__(self) -> None:
        self.block_names: set[int] = set()
        self._readers: set[KvUpdateReader] = set()

    def apply_change(self, change: KvChange) -> None:
        """The core tells of its last steps."""
        stored = set(unpack_block_names(change.stored_names)) - self.block_names
        removed = self.block_names.intersection(unpack_block_names(change.removed_names))
        self.block_names |= stored
        self.block_names -= removed
        for reader in self._readers:
            reader.record_change(stored, removed)

    def reset(self) -> None:
        """The core is gone, and its blocks with it."""
        self.block_names = set()
        for reader in self._readers:
            reader.request_snapshot()

    def close(self) -> None:
        """Let all readers go."""
        for reader in self._readers:
            reader.close()

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[KvUpdateReader]:
        """A reader for as long as it lasts; it is told everything first."""
        reader = KvUpdateReader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)


class KvUpdateReader:
    """What one reader has not been told: the difference, however long it takes to read."""

    def __init__(self, view: KvCacheView) -> None:
        self.is_closed = False
        """Nothing more is to be told."""
        self._view = view
        self._needs_snapshot = False
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._has_update = asyncio.Event()
        self.request_snapshot()

    def record_change(self, stored: set[int], removed: set[int]) -> None:
        """These came and went."""
        if not self._needs_snapshot:
            self._stored |= stored
            self._stored -= removed
            self._removed |= removed
            self._removed -= stored
            if len(self._removed) > len(self._view.block_names):  # all that there is takes less
                self.request_snapshot()
        self._has_update.set()

    def request_snapshot(self) -> None:
        """What was told before no longer counts."""
        self._needs_snapshot, self._stored, self._removed = True, set(), set()
        self._has_update.set()

    def close(self) -> None:
        """Let it go."""
        self.is_closed = True
        self._has_update.set()

    async def next_update(self, timeout_s: float) -> KvUpdate | None:
        """What it has not been told; None when there was nothing for `wait_s`, or it is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_update.wait()
        if self.is_closed or not self._has_update.is_set():
            return None
        self._has_update.clear()
        stored = set(self._view.block_names) if self._needs_snapshot else self._stored
        news = KvUpdate(self._needs_snapshot, stored, self._removed)
        self._needs_snapshot, self._stored, self._removed = False, set(), set()
        return news
