"""Index of the prompt prefixes that a replica probably has cached, as a hash chain over blocks with LRU eviction.

The key of a block covers all blocks before it. The salt of the chain consists of the tenant's cache domain, the model
and its revision, so prompts never match across them. The index is bounded by the capacity of the replica's KV cache in
blocks. Few engines publish their evictions. The cached token count of each response therefore corrects the index.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

BLOCK_TOKENS = 64
"""Tokens per block of a prompt that is known as tokens."""
BLOCK_BYTES = 256
"""Bytes per block of a prompt that is known as text, which is about `BLOCK_TOKENS` tokens."""
DEFAULT_CAPACITY_BLOCKS = 8192
"""Capacity of a replica that has not reported the size of its KV cache."""
MAX_CAPACITY_BLOCKS = 1 << 17
"""Largest number of indexed blocks per replica, which is 8 million tokens, in some 25 MB."""


def compute_prefix_keys(salt: bytes, prompt: bytes | memoryview, block_size: int) -> list[bytes]:
    """Return a 16-byte key for each whole block of `block_size` bytes; each key covers all bytes before it too."""
    if len(prompt) < block_size:
        return []
    keys, parent = [], hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block_size + 1, block_size):
        parent = hashlib.blake2b(
            prompt[start : start + block_size], key=parent, digest_size=16
        ).digest()
        keys.append(parent)
    return keys


class CacheHitReport(NamedTuple):
    """Cache usage of a prompt, as reported in the response."""

    keys: Sequence[bytes]
    """Keys of the prompt's whole blocks."""
    matched: Sequence[int]
    """Result of `match_prefix` for the keys when the prompt was sent."""
    prompt_blocks: float
    """Length of the prompt in blocks."""
    prompt_tokens: int
    cached_tokens: int
    block_names: array[int]
    """Names of the prompt's token blocks; empty if the replica does not report them."""


class PromptTokensReport(NamedTuple):
    """Token ids of a prompt, as reported in the response."""

    keys: Sequence[bytes]
    """Keys of the prompt's whole blocks."""
    prompt_blocks: float
    """Length of the prompt in blocks."""
    cache_salt: str
    """Cache salt that was sent with the prompt; empty for none."""
    token_ids: array[int]
    """Token ids as an `array("I")`."""


class PrefixCacheIndex(Protocol):
    """Index of the blocks that one replica has cached; prompts are sequences of keys from `compute_prefix_keys`."""

    def __len__(self) -> int:
        """Return the number of blocks that are estimated to be cached."""

    @property
    def is_reported(self) -> bool:
        """Whether the replica reports its blocks by KV events, so that they are not only estimated."""

    def count_tokens(self) -> int:
        """Return the number of tokens in the blocks that are known or estimated to be cached."""
        ...

    def resize(self, blocks: int) -> None:
        """Set the capacity of the replica's KV cache in blocks."""

    def clear(self) -> None:
        """Forget all estimated blocks, since the replica may have lost its cache."""

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Return the number of the last prompt that contained it for each leading cached block.

        The number is 0 for a block that the replica itself reported.
        """
        ...

    def on_prompt_sent(self, keys: Sequence[bytes]) -> None:
        """Record that a prompt with these blocks was sent to the replica."""

    def on_cache_hit_report(self, report: CacheHitReport) -> None:
        """Record that a response began and reported its cached tokens."""

    def on_prompt_tokens_report(self, report: PromptTokensReport) -> None:
        """Record that a response began and reported the prompt's tokens instead."""


class EstimatedPrefixIndex:
    """Index estimated from the prompts that were sent to the replica; implements `PrefixCacheIndex`."""

    def __init__(self, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self._capacity_blocks = capacity_blocks
        self._last_prompt_by_key: OrderedDict[bytes, int] = OrderedDict()
        """Number of the last prompt with each key, least recently used first."""
        self._prompt_count = 0

    def __len__(self) -> int:
        return len(self._last_prompt_by_key)

    @property
    def is_reported(self) -> bool:
        return False

    def count_tokens(self) -> int:
        return len(self._last_prompt_by_key) * BLOCK_TOKENS

    def resize(self, blocks: int) -> None:
        self._capacity_blocks = min(max(1, blocks), MAX_CAPACITY_BLOCKS)
        self._trim()

    def clear(self) -> None:
        self._last_prompt_by_key.clear()

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        cached, matched = self._last_prompt_by_key, []
        for key in keys:
            prompt = cached.get(key)
            if prompt is None:
                break
            matched.append(prompt)
        return matched

    def on_prompt_sent(self, keys: Sequence[bytes]) -> None:
        cached = self._last_prompt_by_key
        self._prompt_count += 1
        # The beginning becomes the most recent block, so that ends are evicted first.
        for key in reversed(keys):
            cached[key] = self._prompt_count
            cached.move_to_end(key)
        self._trim()

    def on_cache_hit_report(self, report: CacheHitReport) -> None:
        """Correct the estimate by the cached tokens of a response."""
        # Round up and add one block, because template tokens and the cache's own block size make this inexact.
        cached_blocks = (
            math.ceil(report.prompt_blocks * report.cached_tokens / max(1, report.prompt_tokens))
            + 1
        )
        self.evict_missing(report.matched, cached_blocks)

    def on_prompt_tokens_report(self, report: PromptTokensReport) -> None:
        """Do nothing, because token ids do not show what is cached."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys whose state is known from KV events."""
        for key in keys:
            self._last_prompt_by_key.pop(key, None)

    def evict_missing(self, matched: Sequence[int], cached_blocks: int) -> None:
        """Correct the index after a prompt of which only the first `cached_blocks` were cached.

        Blocks used less recently than the first missing block are evicted too, because the replica evicted them before.

        Args:
            matched: Result of `match_prefix` when the prompt was sent.
            cached_blocks: Leading blocks that were cached.
        """
        if cached_blocks >= len(matched):
            return
        missing_since = matched[cached_blocks]
        while (
            self._last_prompt_by_key
            and next(iter(self._last_prompt_by_key.values())) < missing_since
        ):
            self._last_prompt_by_key.popitem(last=False)

    def _trim(self) -> None:
        while len(self._last_prompt_by_key) > self._capacity_blocks:
            self._last_prompt_by_key.popitem(last=False)


class RecentPlacements:
    """Replica that last got a prompt with a given beginning, found without searching the index of every replica."""

    MAX_ENTRIES = 1 << 16
    """Largest number of prompt beginnings, in some 10 MB."""

    def __init__(self) -> None:
        self._replica_by_key: OrderedDict[bytes, str] = OrderedDict()
        """Replica name by key of the prompt's beginning, least recently used first."""

    def record_placement(self, keys: Sequence[bytes], replica: str) -> None:
        """Record that a prompt with these blocks was sent to `replica`."""
        for key in _power_of_two_prefixes(keys):
            self._replica_by_key[key] = replica
            self._replica_by_key.move_to_end(key)
        while len(self._replica_by_key) > self.MAX_ENTRIES:
            self._replica_by_key.popitem(last=False)

    def find_replica(self, keys: Sequence[bytes]) -> str | None:
        """Return the replica of the last prompt that shares a long prefix with this one; None if no prompt does.

        The shared prefix has at least half of the blocks of the longest known one.
        """
        return next(
            (
                self._replica_by_key[key]
                for key in _power_of_two_prefixes(keys)
                if key in self._replica_by_key
            ),
            None,
        )


def _power_of_two_prefixes(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of the beginnings of 1, 2, 4, 8 and so on blocks, the longest first."""
    return [keys[(1 << depth) - 1] for depth in reversed(range(len(keys).bit_length()))]
