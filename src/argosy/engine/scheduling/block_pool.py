"""Who holds which KV block: reference counts, the prefix index, and the host-memory tier's index."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """`num_blocks` blocks, each free, used (referenced) or cached (published, unreferenced, evictable).

    A block is published under the hash of its content's whole history; equal hashes mean equal KV,
    so a published block can be shared by any number of sequences of its cache domain.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.changed_keys: set[bytes] = set()
        """Keys that were published or evicted; whoever tells of them empties it."""

    @property
    def available_blocks(self) -> int:
        """Blocks that can be taken now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks kept for later prefix hits."""
        return len(self._cached)

    def find(self, key: bytes) -> int | None:
        """The block published under `key`."""
        return self._published.get(key)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds this published block."""
        return block in self._cached

    def take_block(self) -> tuple[int, bytes | None]:
        """A block for new content, and the key whose content it loses (evicted), if any.

        Raises IndexError when none is available.
        """
        if self._free:
            block, key = self._free.pop(), None
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            key = self._hash[block]
            self._unpublish(block)
        else:
            msg = "no KV block is available; check `available` first"
            raise IndexError(msg)
        self._refs[block] = 1
        return block, key

    def share(self, block: int) -> None:
        """One more holder of a used or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder fewer of each; the last of a chain becomes evictable first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Let others find this full, computed block. The first publisher of a key stays the one found."""
        if key not in self._published and self._hash[block] is None:
            self._published[key] = block
            self._hash[block] = key
            self.changed_keys.add(key)

    def _unpublish(self, block: int) -> None:
        key = self._hash[block]
        if key is not None:
            del self._published[key]
            self._hash[block] = None
            self.changed_keys.add(key)

    def check_invariants(self, block_lists: list[list[int]]) -> None:
        """Assert the invariants, given the block lists of all sequences. Raises AssertionError."""
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
        for key, block in self._published.items():
            assert self._hash[block] == key, "index and block disagree"
            assert block not in free, "a free block is published"
        assert all(self._hash[block] is not None for block in cached), "a cached block has no key"


class HostCacheIndex:
    """Which evicted blocks live on in host memory, and in which slot; least recently used goes first.

    A slot being read by a step in flight is pinned: it belongs to nobody until `free`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: set[int] = set()
        self.changed_keys: set[bytes] = set()
        """Keys that came or went; whoever tells of them empties it."""

    def assign_slot(self, key: bytes) -> int | None:
        """A slot to save `key`'s block in; None when it is there already or every slot is pinned."""
        if key in self._by_key:
            self._by_key.move_to_end(key)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._by_key:
            lost, slot = self._by_key.popitem(last=False)
            self.changed_keys.add(lost)
        else:
            return None
        self._by_key[key] = slot
        self.changed_keys.add(key)
        return slot

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def pin_slot(self, key: bytes) -> int:
        """Take `key`'s slot for reading: the block moves back to the device."""
        slot = self._by_key.pop(key)
        self.changed_keys.add(key)
        self._pinned.add(slot)
        return slot

    def release_slot(self, slot: int) -> None:
        """The step that read the pinned slot is done."""
        self._pinned.remove(slot)
        self._free.append(slot)

    def check_invariants(self) -> None:
        """Assert the invariants. Raises AssertionError."""
        live = [*self._free, *self._by_key.values(), *self._pinned]
        assert sorted(live) == list(range(self.num_slots)), "a host slot leaked or is in two states"
