"""Names of KV blocks for engines that publish their blocks as tokens and engine-specific hashes.

A block's name is a hash over the cache salt and all tokens up to the end of the block. Argosy computes names from two
sources, namely the blocks that an engine reports as stored and the prompt tokens that a response reports. The engine's
own hashes only identify a block's parent and the blocks that are removed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from argosy.protocol import BLOCK_NAME_BYTES

MAX_NAMED_BLOCKS = 1 << 20
"""Largest number of blocks tracked per engine, which is 16 million tokens in blocks of 16, in some 200 MB."""

EngineBlockHash = int | bytes
"""Block hash as computed by an engine."""


def compute_block_names(cache_salt: str, token_ids: array[int], block_size: int) -> array[int]:
    """Return the names of the whole blocks of a prompt; `token_ids` is an `array("I")`."""
    return _chain_names(_root_hash(cache_salt), token_ids, block_size)


def _root_hash(cache_salt: str) -> bytes:
    return hashlib.blake2b(cache_salt.encode(), digest_size=BLOCK_NAME_BYTES).digest()


def _chain_names(parent: bytes, token_ids: array[int], block_size: int) -> array[int]:
    packed, block_bytes, names = token_ids.tobytes(), token_ids.itemsize * block_size, bytearray()
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        block = packed[start : start + block_bytes]
        parent = hashlib.blake2b(block, key=parent, digest_size=BLOCK_NAME_BYTES).digest()
        names += parent
    return array("Q", bytes(names))


class EngineBlockNames:
    """Map from one engine's block hashes to block names."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._name_by_hash: dict[EngineBlockHash, int] = {}
        self._extra_copies: dict[EngineBlockHash, int] = {}
        """Copies beyond the first, because an engine that computes a block twice keeps it twice."""

    def __len__(self) -> int:
        return len(self._name_by_hash)

    def add_blocks(
        self,
        hashes: Sequence[EngineBlockHash],
        parent: EngineBlockHash | None,
        token_ids: Sequence[int],
        cache_salt: str,
    ) -> array[int]:
        """Add stored blocks and return their names.

        The blocks follow `parent`, or begin a prompt with `cache_salt` if `parent` is None. Nothing is added and no
        name is returned if `parent` is unknown because it was stored before the subscription began.

        Raises:
            ValueError: `token_ids` do not fill as many blocks as there are `hashes`.
            OverflowError: A token id is out of range.
        """
        parent_name = None if parent is None else self._name_by_hash.get(parent)
        if parent is not None and parent_name is None:
            return array("Q")
        start = (
            _root_hash(cache_salt) if parent_name is None else array("Q", [parent_name]).tobytes()
        )
        names = _chain_names(start, array("I", token_ids), self.block_size)
        for block_hash, name in zip(hashes, names, strict=True):
            if block_hash in self._name_by_hash:
                self._extra_copies[block_hash] = self._extra_copies.get(block_hash, 0) + 1
            else:
                self._name_by_hash[block_hash] = name
        return names

    def remove_blocks(self, hashes: Sequence[EngineBlockHash]) -> list[int]:
        """Remove one copy of each block and return the names of the blocks without a remaining copy."""
        removed = []
        for block_hash in hashes:
            extra_copies = self._extra_copies.pop(block_hash, 0)
            if extra_copies > 1:
                self._extra_copies[block_hash] = extra_copies - 1
            elif not extra_copies and block_hash in self._name_by_hash:
                removed.append(self._name_by_hash.pop(block_hash))
        return removed
