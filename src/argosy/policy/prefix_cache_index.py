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
DEFAULT_CAPACITY_BLOCKS = 8192
"""Blocks of a replica that has not told the size of its cache."""
MAX_CAPACITY_BLOCKS = 1 << 17
"""Blocks that are remembered of any replica: 8 million tokens, some 25 MB."""


def compute_prefix_keys(salt: bytes, prompt: bytes, block_size: int) -> list[bytes]:
    """One 16-byte key for each whole block of `block` bytes, each covering all before it."""
    keys, parent = [], hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block_size + 1, block_size):
        parent = hashlib.blake2b(
            prompt[start : start + block_size], key=parent, digest_size=16
        ).digest()
        keys.append(parent)
    return keys


class CacheHitReport(NamedTuple):
    """What a replica has told of a prompt that it was sent."""

    keys: Sequence[bytes]
    """Of the prompt's whole blocks."""
    matched: Sequence[int]
    """What `find` gave for them when it was sent."""
    prompt_blocks: float
    """The prompt's length."""
    prompt_tokens: int
    cached_tokens: int
    block_names: array[int]
    """Of the token blocks that the prompt became; empty where that is not told."""


class PromptTokensReport(NamedTuple):
    """A prompt that a replica was sent, and the tokens that it says it became."""

    keys: Sequence[bytes]
    """Of the prompt's whole blocks."""
    prompt_blocks: float
    """The prompt's length."""
    cache_salt: str
    """The cache salt that the replica was sent with it; empty: none."""
    token_ids: array[int]
    """The tokens, as an `array("I")`."""


class PrefixCacheIndex(Protocol):
    """What one replica has cached, as far as is known; prompts are given as keys of `chain`."""

    def __len__(self) -> int:
        """Blocks that are believed to be there."""

    def resize(self, blocks: int) -> None:
        """Its KV cache holds so many blocks."""

    def clear(self) -> None:
        """It may have lost its cache: believe nothing."""

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """For each block from the prompt's beginning that is held: which prompt had it last; 0: the replica says so."""
        ...

    def on_prompt_sent(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks went there."""

    def on_cache_hit_report(self, report: CacheHitReport) -> None:
        """The answer to it has begun."""

    def on_prompt_tokens_report(self, report: PromptTokensReport) -> None:
        """The answer has begun, of a replica that tells the prompt's tokens instead."""


class EstimatedPrefixIndex:
    """One replica's, from what was sent there; see `Prefixes`."""

    def __init__(self, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self._capacity_blocks = capacity_blocks
        self._last_prompt_by_key: OrderedDict[bytes, int] = OrderedDict()
        """Key -> number of the prompt that had it last, the least recent first."""
        self._prompt_count = 0

    def __len__(self) -> int:
        return len(self._last_prompt_by_key)

    def resize(self, blocks: int) -> None:
        """See `Prefixes`."""
        self._capacity_blocks = min(max(1, blocks), MAX_CAPACITY_BLOCKS)
        self._trim()

    def clear(self) -> None:
        """See `Prefixes`."""
        self._last_prompt_by_key.clear()

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """See `Prefixes`."""
        held, found = self._last_prompt_by_key, []
        for key in keys:
            prompt = held.get(key)
            if prompt is None:
                break
            found.append(prompt)
        return found

    def on_prompt_sent(self, keys: Sequence[bytes]) -> None:
        """See `Prefixes`."""
        held = self._last_prompt_by_key
        self._prompt_count += 1
        for key in reversed(keys):  # the beginning is the most recent: ends are evicted first
            held[key] = self._prompt_count
            held.move_to_end(key)
        self._trim()

    def on_cache_hit_report(self, report: CacheHitReport) -> None:
        """See `Prefixes`: its cached tokens correct what was believed."""
        # Rounded up, and one more: a template's tokens and the cache's own blocks make it inexact.
        there = (
            math.ceil(report.prompt_blocks * report.cached_tokens / max(1, report.prompt_tokens))
            + 1
        )
        self.evict_missing(report.matched, there)

    def on_prompt_tokens_report(self, report: PromptTokensReport) -> None:
        """See `Prefixes`: tokens say nothing of what is cached."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """What was believed of these is known now."""
        for key in keys:
            self._last_prompt_by_key.pop(key, None)

    def evict_missing(self, matched: Sequence[int], cached_blocks: int) -> None:
        """Of a prompt for which `found` was found, only the first `blocks` were there.

        What was used less recently than the first block that was missing has been evicted with it.
        """
        if cached_blocks >= len(matched):
            return
        gone = matched[cached_blocks]
        while self._last_prompt_by_key and next(iter(self._last_prompt_by_key.values())) < gone:
            self._last_prompt_by_key.popitem(last=False)

    def _trim(self) -> None:
        while len(self._last_prompt_by_key) > self._capacity_blocks:
            self._last_prompt_by_key.popitem(last=False)


class RecentPlacements:
    """Which replica prompts with a certain beginning went to last: found without asking each of very many."""

    MAX_ENTRIES = 1 << 16
    """Beginnings; some 10 MB."""

    def __init__(self) -> None:
        self._replica_by_key: OrderedDict[bytes, str] = OrderedDict()
        """Key of a beginning -> name, the least recent first."""

    def record_placement(self, keys: Sequence[bytes], replica: str) -> None:
        """A prompt with these blocks went there."""
        for key in _power_of_two_prefixes(keys):
            self._replica_by_key[key] = replica
            self._replica_by_key.move_to_end(key)
        while len(self._replica_by_key) > self.MAX_ENTRIES:
            self._replica_by_key.popitem(last=False)

    def find_replica(self, keys: Sequence[bytes]) -> str | None:
        """Where the last prompt went that had at least half of the blocks that any had in common with this one."""
        return next(
            (
                self._replica_by_key[key]
                for key in _power_of_two_prefixes(keys)
                if key in self._replica_by_key
            ),
            None,
        )


def _power_of_two_prefixes(keys: Sequence[bytes]) -> list[bytes]:
    """The keys of the beginnings of 1, 2, 4 blocks and so on, the longest first."""
    return [keys[(1 << depth) - 1] for depth in reversed(range(len(keys).bit_length()))]
