"""Names of KV blocks for engines that tell of their blocks by tokens, and by hashes that mean something only to them.

Here a block's name covers the cache salt and all tokens up to its end. It is made twice: of what an engine tells that
it has stored, and of the tokens that an answer says its prompt had. The engine's own hash only says which block comes
before, and which one is gone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from argosy.protocol import BLOCK_NAME_BYTES

MAX_NAMED_BLOCKS = 1 << 20
"""Blocks of such an engine that can be followed: 16 million tokens in blocks of 16, some 200 MB."""

EngineBlockHash = int | bytes
"""An engine's own."""


def compute_block_names(cache_salt: str, token_ids: array[int], block_size: int) -> array[int]:
    """Of the whole blocks of a prompt; `ids` are its tokens, as an `array("I")`."""
    return _chain_names(_root_hash(cache_salt), token_ids, block_size)


def _root_hash(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=BLOCK_NAME_BYTES).digest()


def _chain_names(parent: bytes, ids: array[int], block_size: int) -> array[int]:
    packed, step, names = ids.tobytes(), ids.itemsize * block_size, bytearray()
    for start in range(0, len(packed) - step + 1, step):
        block = packed[start : start + step]
        parent = hashlib.blake2b(block, key=parent, digest_size=BLOCK_NAME_BYTES).digest()
        names += parent
    return array("Q", bytes(names))


class EngineBlockNames:
    """The blocks of one engine that can be named, by its own hashes."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._name_by_hash: dict[EngineBlockHash, int] = {}
        self._extra_copies: dict[EngineBlockHash, int] = {}
        """How many more than one there are: what was computed twice is kept twice."""

    def __len__(self) -> int:
        return len(self._name_by_hash)

    def add_blocks(
        self,
        hashes: Sequence[EngineBlockHash],
        parent: EngineBlockHash | None,
        token_ids: Sequence[int],
        cache_salt: str,
    ) -> array[int]:
        """The names of the blocks that it stored after `parent`, None: at the beginning of a prompt with this salt.

        None of them can be named where `parent` was stored before anybody followed. Raises ValueError or OverflowError
        when `ids` are not the tokens of so many blocks.
        """
        before = None if parent is None else self._name_by_hash.get(parent)
        if parent is not None and before is None:
            return array("Q")
        start = _root_hash(cache_salt) if before is None else array("Q", [before]).tobytes()
        names = _chain_names(start, array("I", token_ids), self.block_size)
        for block, name in zip(hashes, names, strict=True):
            if block in self._name_by_hash:
                self._extra_copies[block] = self._extra_copies.get(block, 0) + 1
            else:
                self._name_by_hash[block] = name
        return names

    def remove_blocks(self, hashes: Sequence[EngineBlockHash]) -> list[int]:
        """The names of those blocks that it has no copy of any more."""
        gone = []
        for block in hashes:
            more = self._extra_copies.pop(block, 0)
            if more > 1:
                self._extra_copies[block] = more - 1
            elif not more and block in self._name_by_hash:
                gone.append(self._name_by_hash.pop(block))
        return gone
