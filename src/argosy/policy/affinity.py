"""Which replica probably has how much of a prompt cached: a hash chain over blocks, least recent forgotten.

Keys are chained, so the key of a block stands for everything before it. The salt comes from the authenticated
tenant's domain, the model and its revision, so nothing is ever found across them. Memory is bounded by each
replica's capacity in blocks, which is that of its real KV cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 64
"""Tokens of a block, when the prompt is known as tokens."""
BLOCK_BYTES = 256
"""Bytes of a block when it is known as text: about as many tokens."""


def chain(salt: bytes, prompt: bytes, block: int) -> list[bytes]:
    """One 16-byte key for each whole block of `block` bytes, each covering all before it."""
    keys, parent = [], hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block + 1, block):
        parent = hashlib.blake2b(prompt[start : start + block], key=parent, digest_size=16).digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """Approximate, for engines that do not tell what they evict."""

    def __init__(self, capacity: int = 8192) -> None:
        self._default = capacity
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        self._capacity: dict[str, int] = {}

    def resize(self, replica: str, blocks: int) -> None:
        """Its KV cache holds so many blocks."""
        self._capacity[replica] = blocks
        self._trim(replica)

    def forget(self, replica: str) -> None:
        """It is gone, or has lost its cache."""
        self._held.pop(replica, None)
        self._capacity.pop(replica, None)

    def sent(self, replica: str, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks went there."""
        held = self._held.setdefault(replica, OrderedDict())
        for key in reversed(keys):  # the beginning is the most recent: ends are evicted first
            held[key] = None
            held.move_to_end(key)
        self._trim(replica)

    def dropped(self, replica: str, keys: Iterable[bytes]) -> None:
        """It told that it has evicted these."""
        held = self._held.get(replica, OrderedDict())
        for key in keys:
            held.pop(key, None)

    def hits(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Replica -> how many blocks from the prompt's beginning it holds; those without any are left out."""
        found = {}
        for replica, held in self._held.items():
            count = 0
            for key in keys:
                if key not in held:
                    break
                count += 1
            if count:
                found[replica] = count
        return found

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    def _trim(self, replica: str) -> None:
        held = self._held.get(replica, OrderedDict())
        while len(held) > self._capacity.get(replica, self._default):
            held.popitem(last=False)
