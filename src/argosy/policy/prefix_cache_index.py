"""How much of a prompt a replica probably has cached: a hash chain over blocks, the least recent forgotten.

Keys are chained, so the key of a block stands for everything before it. The salt comes from the authenticated
tenant's domain, the model and its revision, so nothing is ever found across them. Memory is bounded by the
replica's capacity in blocks, which is that of its real KV cache. Engines evict when they please and few tell, so
what an answer says of its cached tokens corrects what was believed.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

BLOCK_TOKENS = 64
"""Tokens of a block, when the prompt is known as tokens."""
BLOCK_BYTES = 256
"""Bytes of a block when it is known as text: about as many tokens."""
CAPACITY = 8192
"""Blocks of a replica that has not told the size of its cache."""
MOST = 1 << 17
"""Blocks that are remembered of any replica: 8 million tokens, some 25 MB."""


def chain(salt: bytes, prompt: bytes, block: int) -> list[bytes]:
    """One 16-byte key for each whole block of `block` bytes, each covering all before it."""
    keys, parent = [], hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block + 1, block):
        parent = hashlib.blake2b(prompt[start : start + block], key=parent, digest_size=16).digest()
        keys.append(parent)
    return keys


class Answered(NamedTuple):
    """What a replica has told of a prompt that it was sent."""

    keys: Sequence[bytes]
    """Of the prompt's whole blocks."""
    found: Sequence[int]
    """What `find` gave for them when it was sent."""
    blocks: float
    """The prompt's length."""
    tokens: int
    cached_tokens: int
    names: array[int]
    """Of the token blocks that the prompt became; empty where that is not told."""


class Read(NamedTuple):
    """A prompt that a replica was sent, and the tokens that it says it became."""

    keys: Sequence[bytes]
    """Of the prompt's whole blocks."""
    blocks: float
    """The prompt's length."""
    salt: str
    """The cache salt that the replica was sent with it; empty: none."""
    ids: array[int]
    """The tokens, as an `array("I")`."""


class Prefixes(Protocol):
    """What one replica has cached, as far as is known; prompts are given as keys of `chain`."""

    def __len__(self) -> int:
        """Blocks that are believed to be there."""

    def resize(self, blocks: int) -> None:
        """Its KV cache holds so many blocks."""

    def clear(self) -> None:
        """It may have lost its cache: believe nothing."""

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """For each block from the prompt's beginning that is held: which prompt had it last; 0: the replica says so."""
        ...

    def sent(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks went there."""

    def answered(self, told: Answered) -> None:
        """The answer to it has begun."""

    def read(self, prompt: Read) -> None:
        """The answer has begun, of a replica that tells the prompt's tokens instead."""


class PrefixIndex:
    """One replica's, from what was sent there; see `Prefixes`."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._held: OrderedDict[bytes, int] = OrderedDict()
        """Key -> number of the prompt that had it last, the least recent first."""
        self._prompts = 0

    def __len__(self) -> int:
        return len(self._held)

    def resize(self, blocks: int) -> None:
        """See `Prefixes`."""
        self._capacity = min(max(1, blocks), MOST)
        self._trim()

    def clear(self) -> None:
        """See `Prefixes`."""
        self._held.clear()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """See `Prefixes`."""
        held, found = self._held, []
        for key in keys:
            prompt = held.get(key)
            if prompt is None:
                break
            found.append(prompt)
        return found

    def sent(self, keys: Sequence[bytes]) -> None:
        """See `Prefixes`."""
        held = self._held
        self._prompts += 1
        for key in reversed(keys):  # the beginning is the most recent: ends are evicted first
            held[key] = self._prompts
            held.move_to_end(key)
        self._trim()

    def answered(self, told: Answered) -> None:
        """See `Prefixes`: its cached tokens correct what was believed."""
        # Rounded up, and one more: a template's tokens and the cache's own blocks make it inexact.
        there = math.ceil(told.blocks * told.cached_tokens / max(1, told.tokens)) + 1
        self.correct(told.found, there)

    def read(self, prompt: Read) -> None:
        """See `Prefixes`: tokens say nothing of what is cached."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """What was believed of these is known now."""
        for key in keys:
            self._held.pop(key, None)

    def correct(self, found: Sequence[int], blocks: int) -> None:
        """Of a prompt for which `found` was found, only the first `blocks` were there.

        What was used less recently than the first block that was missing has been evicted with it.
        """
        if blocks >= len(found):
            return
        gone = found[blocks]
        while self._held and next(iter(self._held.values())) < gone:
            self._held.popitem(last=False)

    def _trim(self) -> None:
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


class LastPlaces:
    """Which replica prompts with a certain beginning went to last: found without asking each of very many."""

    REMEMBERED = 1 << 16
    """Beginnings; some 10 MB."""

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, str] = OrderedDict()
        """Key of a beginning -> name, the least recent first."""

    def went(self, keys: Sequence[bytes], name: str) -> None:
        """A prompt with these blocks went there."""
        for key in _marks(keys):
            self._places[key] = name
            self._places.move_to_end(key)
        while len(self._places) > self.REMEMBERED:
            self._places.popitem(last=False)

    def find(self, keys: Sequence[bytes]) -> str | None:
        """Where the last prompt went that had at least half of the blocks that any had in common with this one."""
        return next((self._places[key] for key in _marks(keys) if key in self._places), None)


def _marks(keys: Sequence[bytes]) -> list[bytes]:
    """The keys of the beginnings of 1, 2, 4 blocks and so on, the longest first."""
    return [keys[(1 << depth) - 1] for depth in reversed(range(len(keys).bit_length()))]
