"""KV blocks: how many a sequence needs, who references them, which are published, in host memory, or computed now."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

from argosy.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KvCacheGroups:
    """Blocks that a sequence needs in each group. Block i of any group holds the sequence's tokens from i * block_size.

    A group without a window keeps all blocks of a sequence. A group with a window keeps those that a token to be
    computed can attend to.
    """

    windows: tuple[int | None, ...]
    """Sliding window of each group in tokens, longest first. None is all tokens. Empty without a KV cache."""
    block_size: int
    """Tokens per block."""

    def first_block(self, group: int, position: int) -> int:
        """Return the first block that the token at `position` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def max_blocks(self, group: int, tokens: int) -> int:
        """Return the maximum number of blocks of a sequence of `tokens` tokens in a group.

        Beside the window there are two blocks, one that fills and one that has left the window in a step in flight.
        """
        num_blocks = -(-tokens // self.block_size)
        window = self.windows[group]
        return num_blocks if window is None else min(num_blocks, -(-window // self.block_size) + 2)

    def count_blocks(self, tokens: int) -> int:
        """Return the number of blocks of a sequence of `tokens` tokens, all groups together."""
        return sum(self.max_blocks(group, tokens) for group in range(len(self.windows)))

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """Return the length of the longest sequence that fits into `num_blocks` blocks, up to `limit` tokens."""
        size = self.block_size
        lengths = range(0, limit + size, size)
        return min(limit, lengths[bisect_right(lengths, num_blocks, key=self.count_blocks) - 1])


class BlockPool:
    """Pool of `num_blocks` KV blocks.

    Each block is free, used (referenced) or cached (published, unreferenced, evictable). A block is published under
    the hash of all tokens up to its end. Equal hashes mean equal KV, so any number of sequences of a cache domain can
    share a published block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self.published: dict[bytes, int] = {}
        """Published blocks by key."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, least recently used first."""
        self.changed_keys: set[bytes] = set()
        """Keys published or evicted since the KV cache manager last cleared the set."""

    @property
    def available_blocks(self) -> int:
        """Number of free and cached blocks, all of which can be taken now."""
        return len(self._free) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that sequences reference."""
        return self.num_blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Number of blocks kept for later prefix hits."""
        return len(self._cached)

    def find(self, key: bytes) -> int | None:
        """Return the block published under `key`, or None."""
        return self.published.get(key)

    def is_cached(self, block: int) -> bool:
        """Return whether this published block has no references."""
        return block in self._cached

    def take_block(self) -> tuple[int, bytes | None]:
        """Take a block for new content and return it with the key evicted from it, or None.

        Raises:
            IndexError: No block is available.
        """
        if self._free:
            block, key = self._free.pop(), None
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            key = self._hash[block]
            self._unpublish(block)
        else:
            msg = "no KV block is available; check `available_blocks` first"
            raise IndexError(msg)
        self._refs[block] = 1
        return block, key

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove a reference from each block. The last block of a chain becomes evictable first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Make a full, computed block available for sharing. `find` returns the first block published under a key."""
        if key not in self.published and self._hash[block] is None:
            self.published[key] = block
            self._hash[block] = key
            self.changed_keys.add(key)

    @property
    def cached_keys(self) -> list[tuple[int, bytes]]:
        """Cached blocks with their keys, least recently used first."""
        return [(block, key) for block in self._cached if (key := self._hash[block]) is not None]

    def clear_cache(self) -> None:
        """Free every cached block. Blocks that sequences reference keep their keys."""
        for block in self._cached:
            self._unpublish(block)
            self._free.append(block)
        self._cached.clear()

    def _unpublish(self, block: int) -> None:
        key = self._hash[block]
        if key is not None:
            del self.published[key]
            self._hash[block] = None
            self.changed_keys.add(key)

    def check_invariants(self, block_lists: list[list[int]]) -> None:
        """Raise AssertionError if an invariant is broken, given the block lists of all sequences."""
        refs = [0] * self.num_blocks
        for blocks in block_lists:
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "references differ from what sequences hold"
        free, cached = set(self._free), set(self._cached)
        in_use = {block for block, count in enumerate(refs) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached), "a free block is cached"
        assert in_use.isdisjoint(free | cached), "a block in use is also free or cached"
        assert len(free) + len(cached) + len(in_use) == self.num_blocks, "a block leaked"
        for key, block in self.published.items():
            assert self._hash[block] == key, "index and block disagree"
            assert block not in free, "a free block is published"
        assert all(self._hash[block] is not None for block in cached), "a cached block has no key"


class HostCacheIndex:
    """Index of evicted blocks in host memory, with least-recently-used eviction.

    A host slot that a step in flight reads is pinned. It is neither free nor indexed until `release_slot`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: set[int] = set()
        self.changed_keys: set[bytes] = set()
        """Keys added or evicted since the KV cache manager last cleared the set."""

    def assign_slot(self, key: bytes) -> int | None:
        """Return a host slot for `key`'s block, or None if the block is in host memory or every slot is pinned."""
        if key in self._by_key:
            self._by_key.move_to_end(key)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._by_key:
            evicted_key, slot = self._by_key.popitem(last=False)
            self.changed_keys.add(evicted_key)
        else:
            return None
        self._by_key[key] = slot
        self.changed_keys.add(key)
        return slot

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def pin_slot(self, key: bytes) -> int:
        """Pin and return `key`'s host slot, because a step moves the block back to the device."""
        slot = self._by_key.pop(key)
        self.changed_keys.add(key)
        self._pinned.add(slot)
        return slot

    def release_slot(self, slot: int) -> None:
        """Free a pinned host slot after the step that read it is done."""
        self._pinned.remove(slot)
        self._free.append(slot)

    def clear(self) -> None:
        """Remove every block that no step in flight reads."""
        self.discard_slots(set(self._by_key.values()))

    def discard_slots(self, slots: set[int]) -> None:
        """Remove the blocks whose content did not reach these host slots."""
        for key, slot in list(self._by_key.items()):
            if slot in slots:
                del self._by_key[key]
                self._free.append(slot)
                self.changed_keys.add(key)

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        live = [*self._free, *self._by_key.values(), *self._pinned]
        assert sorted(live) == list(range(self.num_slots)), "a host slot leaked or is in two states"


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
