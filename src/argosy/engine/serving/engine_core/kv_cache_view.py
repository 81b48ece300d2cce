"""Which KV blocks the core's requests would find, and what of it each reader has not been told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from argosy.engine.serving.core_messages import KvChange
from argosy.protocol import unpack_names


@dataclass(frozen=True, slots=True)
class KvNews:
    """What a reader has to be told, as names."""

    whole: bool
    """`stored` is all that there is."""
    stored: set[int]
    removed: set[int]


class KvLedger:
    """One core's blocks after another's. Belongs to one event loop."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self._readers: set[KvReader] = set()

    def change(self, change: KvChange) -> None:
        """The core tells of its last steps."""
        stored = set(unpack_names(change.stored)) - self.held
        removed = self.held.intersection(unpack_names(change.removed))
        self.held |= stored
        self.held -= removed
        for reader in self._readers:
            reader.note(stored, removed)

    def reset(self) -> None:
        """The core is gone, and its blocks with it."""
        self.held = set()
        for reader in self._readers:
            reader.start_over()

    def close(self) -> None:
        """Let all readers go."""
        for reader in self._readers:
            reader.end()

    @contextlib.contextmanager
    def read(self) -> Iterator[KvReader]:
        """A reader for as long as it lasts; it is told everything first."""
        reader = KvReader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)


class KvReader:
    """What one reader has not been told: the difference, however long it takes to read."""

    def __init__(self, ledger: KvLedger) -> None:
        self.over = False
        """Nothing more is to be told."""
        self._ledger = ledger
        self._whole = False
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._wake = asyncio.Event()
        self.start_over()

    def note(self, stored: set[int], removed: set[int]) -> None:
        """These came and went."""
        if not self._whole:
            self._stored |= stored
            self._stored -= removed
            self._removed |= removed
            self._removed -= stored
            if len(self._removed) > len(self._ledger.held):  # all that there is takes less
                self.start_over()
        self._wake.set()

    def start_over(self) -> None:
        """What was told before no longer counts."""
        self._whole, self._stored, self._removed = True, set(), set()
        self._wake.set()

    def end(self) -> None:
        """Let it go."""
        self.over = True
        self._wake.set()

    async def news(self, wait_s: float) -> KvNews | None:
        """What it has not been told; None when there was nothing for `wait_s`, or it is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        if self.over or not self._wake.is_set():
            return None
        self._wake.clear()
        stored = set(self._ledger.held) if self._whole else self._stored
        news = KvNews(self._whole, stored, self._removed)
        self._whole, self._stored, self._removed = False, set(), set()
        return news
