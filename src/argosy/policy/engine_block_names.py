"""Names of KV blocks for engines that tell of their blocks by tokens, and by hashes that mean something only to them.

Here a block's name covers the cache salt and all tokens up to its end. It is made twice: of what an engine tells that
it has stored, and of the tokens that an answer says its prompt had. The engine's own hash only says which block comes
before, and which one is gone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from argosy.protocol import NAME_BYTES

MOST_TOLD = 1 << 20
"""Blocks of such an engine that can be followed: 16 million tokens in blocks of 16, some 200 MB."""

Hash = int | bytes
"""An engine's own."""


def block_names(salt: str, ids: array[int], block_size: int) -> array[int]:
    """Of the whole blocks of a prompt; `ids` are its tokens, as an `array("I")`."""
    return _names(_root(salt), ids, block_size)


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=NAME_BYTES).digest()


def _names(parent: bytes, ids: array[int], block_size: int) -> array[int]:
    packed, step, names = ids.tobytes(), ids.itemsize * block_size, bytearray()
    for start in range(0, len(packed) - step + 1, step):
        block = packed[start : start + step]
        parent = hashlib.blake2b(block, key=parent, digest_size=NAME_BYTES).digest()
        names += parent
    return array("Q", bytes(names))


class EngineBlocks:
    """The blocks of one engine that can be named, by its own hashes."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._names: dict[Hash, int] = {}
        self._copies: dict[Hash, int] = {}
        """How many more than one there are: what was computed twice is kept twice."""

    def __len__(self) -> int:
        return len(self._names)

    def stored(
        self, hashes: Sequence[Hash], parent: Hash | None, ids: Sequence[int], salt: str
    ) -> array[int]:
        """The names of the blocks that it stored after `parent`, None: at the beginning of a prompt with this salt.

        None of them can be named where `parent` was stored before anybody followed. Raises ValueError or OverflowError
        when `ids` are not the tokens of so many blocks.
        """
        before = None if parent is None else self._names.get(parent)
        if parent is not None and before is None:
            return array("Q")
        start = _root(salt) if before is None else array("Q", [before]).tobytes()
        names = _names(start, array("I", ids), self.block_size)
        for block, name in zip(hashes, names, strict=True):
            if block in self._names:
                self._copies[block] = self._copies.get(block, 0) + 1
            else:
                self._names[block] = name
        return names

    def removed(self, hashes: Sequence[Hash]) -> list[int]:
        """The names of those blocks that it has no copy of any more."""
        gone = []
        for block in hashes:
            more = self._copies.pop(block, 0)
            if more > 1:
                self._copies[block] = more - 1
            elif not more and block in self._names:
                gone.append(self._names.pop(block))
        return gone
