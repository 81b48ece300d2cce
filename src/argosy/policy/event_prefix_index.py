"""Prefix cache index that is built from the KV events of a replica, and the names of the blocks in these events.

The gateway knows prompts as text, while a replica knows its cache as blocks of tokens. The first response of any
replica of the pool to a text connects the two, since it contains the prompt's block names or tokens (`TextBlockMap`).
KV events report which blocks each replica holds (`EventPrefixIndex`). The index therefore covers eviction, restarts and
prompts that arrived through other gateways.

A block's name is a hash over the cache salt and all tokens up to the end of the block. Argosy computes names from two
sources, namely the blocks that an engine reports as stored and the prompt tokens that a response reports. The engine's
own hashes only identify a block's parent and the blocks that are removed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from argosy.policy.prefix_cache_index import (
    CacheHitReport,
    EstimatedPrefixIndex,
    PromptTokensReport,
)
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


MAX_MAP_WEIGHT = 1 << 20
"""Largest weight of all texts of a pool, which is prompts of some 8 million tokens, in 30 MB."""
KEY_WEIGHT = 4
"""Lower bound of a key's memory in units of one block name."""
MAX_INDEXED_BLOCKS = 1 << 22
"""Largest number of indexed blocks per replica, which is 67 million tokens in blocks of 16, in some 300 MB."""
MAX_PENDING_PROMPTS = 64
"""Prompts whose response arrived before their KV events; responses overtake events by a few milliseconds."""


class _PromptBlocks:
    """Token blocks of one prompt, with the range of blocks that each of its keys covers."""

    __slots__ = ("_density", "key_count", "keys", "names")

    def __init__(self, keys: Sequence[bytes], names: array[int], density: float) -> None:
        self.names = names
        self._density = density
        self.keys = [
            key for count, key in enumerate(keys, 1) if 0 < self.token_blocks(count) <= len(names)
        ]
        self.key_count = 0
        """Keys that the map resolves to this prompt."""

    def token_blocks(self, count: int) -> int:
        """Return how many token blocks the first `count` text blocks fill, if the tokens are spread evenly.

        The number is rounded down, because a token block that extends beyond this text is not shared by all prompts
        that begin with it.
        """
        return int(self._density * count)

    @property
    def weight(self) -> int:
        """Memory use in units of one block name."""
        return len(self.names) + KEY_WEIGHT * len(self.keys)


class TextBlockMap:
    """Map from text blocks to token blocks, shared by replicas with the same tokenization.

    Each key resolves to the latest prompt that contained it. The prompts with the oldest responses are evicted first.
    """

    def __init__(self, max_weight: int = MAX_MAP_WEIGHT) -> None:
        self._max_weight = max_weight
        self._weight = 0
        self._by_key: dict[bytes, _PromptBlocks] = {}
        self._prompts: OrderedDict[_PromptBlocks, None] = OrderedDict()
        """Prompts in order of their response, oldest first."""

    def __len__(self) -> int:
        return len(self._by_key)

    def add_prompt(self, keys: Sequence[bytes], block_names: array[int], density: float) -> None:
        """Add a prompt whose text blocks became these token blocks; `density` is token blocks per text block."""
        prompt = _PromptBlocks(keys, block_names, density)
        if not prompt.keys:
            return
        self._prompts[prompt] = None
        self._weight += prompt.weight
        for key in prompt.keys:
            previous = self._by_key.get(key)
            if previous is not None:
                self._release(previous)
            self._by_key[key] = prompt
            prompt.key_count += 1
        while self._weight > self._max_weight:
            self._evict(next(iter(self._prompts)))

    def count_covered(self, keys: Sequence[bytes], held_blocks: Collection[int]) -> int:
        """Return how many leading text blocks of a prompt the token blocks `held_blocks` cover.

        Text without a known mapping is not covered.
        """
        for count in range(len(keys), 0, -1):
            prompt = self._by_key.get(keys[count - 1])
            if prompt is not None:
                block_count = prompt.token_blocks(count)
                return (
                    count * _count_leading(prompt.names[:block_count], held_blocks) // block_count
                )
        return 0

    def _release(self, prompt: _PromptBlocks) -> None:
        prompt.key_count -= 1
        if not prompt.key_count:
            self._remove(prompt)

    def _evict(self, prompt: _PromptBlocks) -> None:
        for key in prompt.keys:
            if self._by_key.get(key) is prompt:
                del self._by_key[key]
        self._remove(prompt)

    def _remove(self, prompt: _PromptBlocks) -> None:
        del self._prompts[prompt]
        self._weight -= prompt.weight


def _count_leading(names: array[int], held_blocks: Collection[int]) -> int:
    """Return how many of the first names are in `held_blocks` without a gap."""
    return next((n for n, name in enumerate(names) if name not in held_blocks), len(names))


class EventPrefixIndex:
    """Index of the blocks that one replica holds, from its KV events; implements `PrefixCacheIndex`.

    A dispatched prompt is estimated to be cached until events confirm its blocks. A replica that returns block names
    publishes all events of a prompt before its response, so the response ends the estimate. Text whose response carries
    no block names stays estimated, for example several prompts in one request.
    """

    def __init__(self, text_blocks: TextBlockMap, block_size: int) -> None:
        self._text_blocks = text_blocks
        self._block_size = block_size
        self._estimated = EstimatedPrefixIndex()
        self.blocks: set[int] = set()
        """Names of the blocks that the replica holds."""
        self._pending_prompts: deque[Sequence[bytes]] = deque(maxlen=MAX_PENDING_PROMPTS)
        """Prompts whose response arrived before the events of all their blocks."""

    def __len__(self) -> int:
        return len(self._estimated)

    @property
    def is_reported(self) -> bool:
        return True

    def count_tokens(self) -> int:
        return len(self.blocks) * self._block_size

    def on_blocks_stored(self, names: Iterable[int]) -> None:
        """Record that the replica stored blocks."""
        self.blocks.update(names)
        if self._pending_prompts:
            pending = [keys for keys in self._pending_prompts if not self._is_fully_reported(keys)]
            self._pending_prompts = deque(pending, MAX_PENDING_PROMPTS)

    def on_blocks_removed(self, names: Iterable[int]) -> None:
        """Record that the replica removed blocks."""
        self.blocks.difference_update(names)

    def resize(self, blocks: int) -> None:
        self._estimated.resize(blocks)

    def clear(self) -> None:
        """Forget the estimated blocks; blocks that the replica published stay until an event removes them."""
        self._estimated.clear()

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        covered = self._text_blocks.count_covered(keys, self.blocks)
        return [0] * covered + self._estimated.match_prefix(keys[covered:])

    def on_prompt_sent(self, keys: Sequence[bytes]) -> None:
        self._estimated.on_prompt_sent(keys)

    def on_cache_hit_report(self, report: CacheHitReport) -> None:
        if not report.block_names:
            self._estimated.on_cache_hit_report(report)
            return
        density = report.prompt_tokens / self._block_size / report.prompt_blocks
        self._text_blocks.add_prompt(report.keys, report.block_names, density)
        self._estimated.remove(report.keys)

    def on_prompt_tokens_report(self, report: PromptTokensReport) -> None:
        """Record the tokens of a prompt.

        Blocks without an event stay estimated. They may have been stored before the subscription began, or their event
        may follow in a moment.
        """
        density = len(report.token_ids) / self._block_size / report.prompt_blocks
        token_ids = report.token_ids[: int(density * len(report.keys)) * self._block_size]
        self._text_blocks.add_prompt(
            report.keys,
            compute_block_names(report.cache_salt, token_ids, self._block_size),
            density,
        )
        if not self._is_fully_reported(report.keys):
            self._pending_prompts.append(report.keys)

    def _is_fully_reported(self, keys: Sequence[bytes]) -> bool:
        """Return whether events cover a whole prompt, and stop estimating the part that they cover."""
        covered = self._text_blocks.count_covered(keys, self.blocks)
        self._estimated.remove(keys[:covered])
        return covered == len(keys)
