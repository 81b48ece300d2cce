"""Index of KV blocks that are being computed, so that sequences with the same prefix can wait for them."""

from __future__ import annotations

from argosy.engine.scheduling.sequence import Sequence


class PendingBlocks:
    """Keys that running sequences will publish. Each key is resolved once, when it is published or abandoned."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._by_sequence: dict[Sequence, list[bytes]] = {}
        self._resolved: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, seq: Sequence, keys: list[bytes]) -> None:
        """Add the keys of blocks that the sequence will compute or restore."""
        self._keys.update(keys)
        self._by_sequence.setdefault(seq, []).extend(keys)

    def resolve(self, key: bytes) -> None:
        """Record that the block is published or abandoned."""
        if key in self._keys:
            self._keys.remove(key)
            self._resolved.append(key)

    def remove_sequence(self, seq: Sequence) -> None:
        """Resolve the unpublished keys of a sequence that stops running."""
        for key in self._by_sequence.pop(seq, ()):
            self.resolve(key)

    def drain_resolved(self) -> list[bytes]:
        """Return the keys resolved since the last call."""
        keys, self._resolved = self._resolved, []
        return keys
