"""Blocks that are being computed right now: whoever needs the same ones can wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.scheduling.sequence import Sequence


class PendingBlocks:
    """The keys that running sequences will publish. Each is settled once: published, or given up."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._by_sequence: dict[Sequence, list[bytes]] = {}
        self._resolved: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, seq: Sequence, keys: list[bytes]) -> None:
        """The sequence is going to compute, or bring back, the blocks of these keys."""
        self._keys.update(keys)
        self._by_sequence.setdefault(seq, []).extend(keys)

    def resolve(self, key: bytes) -> None:
        """The block is there for all."""
        if key in self._keys:
            self._keys.remove(key)
            self._resolved.append(key)

    def remove_sequence(self, seq: Sequence) -> None:
        """The sequence stops running; what it had not published will not come from it."""
        for key in self._by_sequence.pop(seq, ()):
            self.resolve(key)

    def drain_resolved(self) -> list[bytes]:
        """The keys settled since the last call."""
        keys, self._resolved = self._resolved, []
        return keys
