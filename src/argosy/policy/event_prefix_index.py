"""What a replica has cached of a prompt, from what it tells of its KV blocks itself.

A gateway knows prompts as text, a replica its cache as blocks of tokens. What joins them is the first answer to a
text, by any replica of the pool: it names the blocks that its prompt became, or its tokens (`Texts`). Each replica
tells which blocks it holds (`ExactIndex`). So what is evicted, lost in a restart, or came there by way of another
gateway is known.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from argosy.policy.engine_block_names import compute_block_names
from argosy.policy.prefix_cache_index import (
    CacheHitReport,
    EstimatedPrefixIndex,
    PromptTokensReport,
)

MAX_MAP_WEIGHT = 1 << 20
"""Of all texts of a pool: the prompts of some 8 million tokens, in 30 MB."""
KEY_WEIGHT = 4
"""A key takes as much memory as so many names, at least."""
MAX_INDEXED_BLOCKS = 1 << 22
"""Blocks of a replica that can be followed: 67 million tokens in blocks of 16, some 300 MB."""
MAX_PENDING_PROMPTS = 64
"""Answered prompts that may still be told of; an answer overtakes that by some milliseconds at most."""


class _PromptBlocks:
    """The blocks of one prompt, and how far each of its keys reaches into them."""

    __slots__ = ("_density", "key_count", "keys", "names")

    def __init__(self, keys: Sequence[bytes], names: array[int], density: float) -> None:
        self.names = names
        self._density = density
        self.keys = [
            key for count, key in enumerate(keys, 1) if 0 < self.token_blocks(count) <= len(names)
        ]
        self.key_count = 0
        """Keys that go by it."""

    def token_blocks(self, count: int) -> int:
        """How many token blocks the prompt's first `count` text blocks fill, its tokens being spread evenly.

        Rounded down: a block that reaches into other text is not for all who have this one.
        """
        return int(self._density * count)

    @property
    def weight(self) -> int:
        """Memory that it takes."""
        return len(self.names) + KEY_WEIGHT * len(self.keys)


class TextBlockMap:
    """Which token blocks texts become, as far as answers have told; for replicas that read alike.

    Each key goes by the latest prompt that had it. The prompts that were answered least recently are forgotten.
    """

    def __init__(self, max_weight: int = MAX_MAP_WEIGHT) -> None:
        self._max_weight = max_weight
        self._weight = 0
        self._by_key: dict[bytes, _PromptBlocks] = {}
        self._prompts: OrderedDict[_PromptBlocks, None] = OrderedDict()
        """The least recent first."""

    def __len__(self) -> int:
        return len(self._by_key)

    def add_prompt(self, keys: Sequence[bytes], block_names: array[int], density: float) -> None:
        """A prompt with these text blocks became these token blocks, `density` of them for each."""
        chain = _PromptBlocks(keys, block_names, density)
        if not chain.keys:
            return
        self._prompts[chain] = None
        self._weight += chain.weight
        for key in chain.keys:
            before = self._by_key.get(key)
            if before is not None:
                self._release(before)
            self._by_key[key] = chain
            chain.key_count += 1
        while self._weight > self._max_weight:
            self._evict(next(iter(self._prompts)))

    def count_covered(self, keys: Sequence[bytes], held_blocks: Collection[int]) -> int:
        """How many of a prompt's text blocks, from its beginning, are covered by these token blocks.

        Text that nobody has told about is not.
        """
        for count in range(len(keys), 0, -1):
            chain = self._by_key.get(keys[count - 1])
            if chain is not None:
                reach = chain.token_blocks(count)
                return count * _count_leading(chain.names[:reach], held_blocks) // reach
        return 0

    def _release(self, chain: _PromptBlocks) -> None:
        chain.key_count -= 1
        if not chain.key_count:
            self._remove(chain)

    def _evict(self, chain: _PromptBlocks) -> None:
        for key in chain.keys:
            if self._by_key.get(key) is chain:
                del self._by_key[key]
        self._remove(chain)

    def _remove(self, chain: _PromptBlocks) -> None:
        del self._prompts[chain]
        self._weight -= chain.weight


def _count_leading(names: array[int], blocks: Collection[int]) -> int:
    """How many of the first names are there without a gap."""
    return next((n for n, name in enumerate(names) if name not in blocks), len(names))


class EventPrefixIndex:
    """One replica's, while it tells; see `Prefixes`.

    A prompt that is on its way is believed to be there until its blocks are known to be: by its answer, a replica that
    names them has told of them all. So is text of which no answer tells the blocks (several prompts in one request).
    """

    def __init__(self, text_blocks: TextBlockMap, block_size: int) -> None:
        self._text_blocks = text_blocks
        self._block_size = block_size
        self._estimated = EstimatedPrefixIndex()
        self.blocks: set[int] = set()
        """Names of those that it holds."""
        self._pending_prompts: deque[Sequence[bytes]] = deque(maxlen=MAX_PENDING_PROMPTS)
        """Prompts whose answer came before what is told of their blocks."""

    def __len__(self) -> int:
        return len(self._estimated)

    def on_blocks_stored(self, names: Iterable[int]) -> None:
        """The replica holds these now."""
        self.blocks.update(names)
        if self._pending_prompts:
            late = [keys for keys in self._pending_prompts if not self._is_fully_reported(keys)]
            self._pending_prompts = deque(late, MAX_PENDING_PROMPTS)

    def on_blocks_removed(self, names: Iterable[int]) -> None:
        """It no longer does."""
        self.blocks.difference_update(names)

    def resize(self, blocks: int) -> None:
        """See `Prefixes`."""
        self._estimated.resize(blocks)

    def clear(self) -> None:
        """See `Prefixes`; what it tells of itself is no belief."""
        self._estimated.clear()

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """See `Prefixes`."""
        known = self._text_blocks.count_covered(keys, self.blocks)
        return [0] * known + self._estimated.match_prefix(keys[known:])

    def on_prompt_sent(self, keys: Sequence[bytes]) -> None:
        """See `Prefixes`."""
        self._estimated.on_prompt_sent(keys)

    def on_cache_hit_report(self, report: CacheHitReport) -> None:
        """See `Prefixes`."""
        if not report.block_names:
            self._estimated.on_cache_hit_report(report)
            return
        density = report.prompt_tokens / self._block_size / report.prompt_blocks
        self._text_blocks.add_prompt(report.keys, report.block_names, density)
        self._estimated.remove(report.keys)

    def on_prompt_tokens_report(self, report: PromptTokensReport) -> None:
        """See `Prefixes`.

        What the replica has not told of stays believed: it may have been there before, or is told in a moment.
        """
        density = len(report.token_ids) / self._block_size / report.prompt_blocks
        ids = report.token_ids[: int(density * len(report.keys)) * self._block_size]
        self._text_blocks.add_prompt(
            report.keys, compute_block_names(report.cache_salt, ids, self._block_size), density
        )
        if not self._is_fully_reported(report.keys):
            self._pending_prompts.append(report.keys)

    def _is_fully_reported(self, keys: Sequence[bytes]) -> bool:
        """Whether the replica has told of all of a prompt; what it has told of is no longer believed."""
        known = self._text_blocks.count_covered(keys, self.blocks)
        self._estimated.remove(keys[:known])
        return known == len(keys)
