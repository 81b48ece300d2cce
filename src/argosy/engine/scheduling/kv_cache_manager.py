"""Assignment of KV blocks to sequences, with prefix hits, forks, growth, and restores from host memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from argosy.engine.scheduling.block_pool import (
    BlockPool,
    HostCacheIndex,
    KvCacheGroups,
    PendingBlocks,
)
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.state_snapshots import StateSnapshots
from argosy.engine.scheduling.step_plan import NO_BLOCK, BlockRestore, StepPlan

HASH_BYTES = 32
"""Bytes of a block's hash, which its key starts with."""
HASHED_BLOCKS = 32
"""Blocks of a prompt that are hashed at once. Those after the first one that is not cached may never be needed."""
MAX_ANNOUNCED_BLOCKS = 512
"""Maximum blocks of one prompt announced as pending. Later blocks are hashed only when they are computed."""


@dataclass(frozen=True, slots=True)
class _PendingRestore:
    """Block that a step in flight restores from host memory."""

    seq: Sequence
    key: bytes
    group: int
    slot: int
    block: int


class KvCacheManager:
    """Manager of the KV blocks of all sequences, and counters of the prefix cache's hits.

    The key of a block in a group is the hash of all tokens up to its end, followed by the group's suffix. A prefix is a
    hit if the groups without a window have all its blocks, and the other groups those of the window at its end. In a
    model with recurrent layers, there must also be a snapshot of their state at its end.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        host_blocks: int,
        groups: KvCacheGroups,
        prefix_cache: bool,
        state_snapshots: int | None = None,
    ) -> None:
        """Create the manager. `state_snapshots` is None for a model without recurrent layers."""
        self.pool = BlockPool(num_blocks)
        self.host_cache = HostCacheIndex(host_blocks)
        self.block_size = groups.block_size
        self.prefix_cache = prefix_cache and state_snapshots != 0
        self.snapshots = (
            None if state_snapshots is None else StateSnapshots(state_snapshots, self.block_size)
        )
        self._groups = groups
        windows = groups.windows
        self._suffixes = [bytes((group,) * (group > 0)) for group in range(len(windows))]
        self._num_full_groups = windows.count(None)
        self._windowed_groups = [
            range(windows.index(window), windows.index(window) + count)
            for window, count in Counter(windows).items()
            if window is not None
        ]
        """Groups of each sliding window."""
        self._reported_suffixes = self._suffixes[: windows.count(windows[0]) if windows else 0]
        """Suffixes of the groups with the longest window, which alone decide whether a block is reported as cached."""
        self.pending = PendingBlocks()
        self.query_tokens = 0
        self.hit_tokens = 0
        self.host_hit_tokens = 0
        self.corrupt_blocks = 0
        self._pending_restores: dict[int, list[_PendingRestore]] = {}
        """Pending restores by the number of their step."""

    def has_block(self, key: bytes) -> bool:
        """Return whether the groups with the longest window have this block, on the device or in host memory."""
        return all(self._is_cached(key + suffix) for suffix in self._reported_suffixes)

    def _is_cached(self, key: bytes) -> bool:
        return self.pool.find(key) is not None or key in self.host_cache

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` has keys to return."""
        return bool(self.pool.changed_keys or self.host_cache.changed_keys)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys changed since the last call, split into cached and no longer cached ones."""
        changed_keys = self.pool.changed_keys | self.host_cache.changed_keys
        self.pool.changed_keys.clear()
        self.host_cache.changed_keys.clear()
        changed = {
            key[:HASH_BYTES] for key in changed_keys if key[HASH_BYTES:] in self._reported_suffixes
        }
        cached = [key for key in changed if self.has_block(key)]
        return cached, list(changed.difference(cached))

    def count_held_blocks(self, seq: Sequence) -> int:
        """Return the number of blocks of a running sequence."""
        return sum(map(len, seq.block_tables)) - sum(seq.first_blocks)

    def blocks_needed(self, seq: Sequence) -> int:
        """Return how many available blocks `allocate` would use for this waiting sequence."""
        if self._fork_source(seq) is not None:
            position = _forkable_tokens(seq)
            return sum(
                self._allocated_end(group, position, seq.length) - position // self.block_size
                for group in range(len(self._suffixes))
            )
        num_hits = self._count_hits(seq)
        needed = 0
        for group, suffix in enumerate(self._suffixes):
            position = num_hits * self.block_size
            first = self._groups.first_block(group, position)
            needed += self._allocated_end(group, position, seq.length) - first
            for key in seq.block_hashes[first:num_hits]:
                block = self.pool.find(key + suffix)
                needed -= block is not None and not self.pool.is_cached(block)
        return needed

    def max_growth(self, seqs: list[Sequence]) -> float:
        """Return by how many blocks sequences grow until they reach their maximum lengths."""
        tokens = self._num_full_groups * sum(seq.max_length - seq.length for seq in seqs)
        for groups in self._windowed_groups:
            window = self._groups.windows[groups[0]] or 0
            ends = ((seq.length, min(seq.max_length, window)) for seq in seqs)
            tokens += len(groups) * sum(end - length for length, end in ends if end > length)
        return tokens / self.block_size

    def tokens_to_compute(self, seq: Sequence) -> int:
        """Return how many tokens of this waiting sequence would remain to be computed after `allocate`."""
        if self._fork_source(seq) is not None:
            return seq.length - _forkable_tokens(seq)
        return seq.length - self._count_hits(seq) * self.block_size

    def allocate(self, seq: Sequence, plan: StepPlan) -> None:
        """Allocate blocks for a waiting sequence, and set its `computed_len` to the number of tokens found.

        Groups without a window get blocks for all tokens, others for a window and more. `extend_blocks` adds the rest.
        """
        size = self.block_size
        lead = self._fork_source(seq)
        if lead is not None:
            seq.computed_len = _forkable_tokens(seq)
            self._share_fork(seq, lead, plan)
        else:
            num_hits = self._count_hits(seq)
            seq.computed_len = num_hits * size
            if self.snapshots is not None:
                self.snapshots.load(seq, num_hits, self._count_cached_blocks(seq), plan)
            self._share_hits(seq, num_hits, plan)
            self._announce_pending(seq, num_hits)
        if seq.scheduled_at is not None and seq.preemptions == 0:
            self.query_tokens += seq.prompt_len
            self.hit_tokens += seq.computed_len
            seq.hit_tokens = min(seq.computed_len, seq.prompt_len)
        seq.next_full_length = (
            (seq.computed_len // size + 1) * size
            if self.prefix_cache or self._windowed_groups
            else NEVER
        )
        for group, table in enumerate(seq.block_tables):
            end = self._allocated_end(group, seq.computed_len, seq.length)
            while len(table) < end:
                table.append(self.take_block(plan))
        seq.capacity = min(map(len, seq.block_tables), default=NEVER) * size

    def complete_plan(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        """Add what a planned step must save for later prefix hits, beside its KV blocks."""
        if self.snapshots is not None and self.prefix_cache:
            self.snapshots.plan_saves(plan, seqs)

    def append_blocks(self, seq: Sequence, plan: StepPlan) -> bool:
        """Append a block to each group of a running sequence that needs one for the next token after `capacity`.

        Returns False, without an effect, if too few blocks are available.
        """
        index, tables = seq.capacity // self.block_size, seq.block_tables
        available = self.pool.available_blocks
        if available < len(tables) and available < sum(len(table) == index for table in tables):
            return False
        for group, table in enumerate(tables):
            if len(table) == index:
                block = self.take_block(plan)
                table.append(block)
                plan.block_appends.append((seq.row, group, index, block))
        seq.capacity += self.block_size
        return True

    def will_release_blocks(self, seq: Sequence) -> bool:
        """Return whether a step in flight may release blocks of this running sequence that leave a window."""
        return bool(self._windowed_groups) and seq.next_full_length <= seq.computed_len

    def extend_blocks(self, seq: Sequence, end: int, plan: StepPlan) -> None:
        """Append blocks to a running sequence for its tokens before `end`, as long as blocks are available."""
        while seq.capacity < end and self.append_blocks(seq, plan):
            pass

    def pending_prefix_key(self, seq: Sequence) -> bytes | None:
        """Return the key of the last missing prefix block that running sequences compute now, or None."""
        if self._fork_source(seq) is not None or not self._can_use_prefix_cache(seq):
            return None
        last_key = None
        for index in range(self._count_hits(seq), (seq.length - 1) // self.block_size):
            key = seq.block_hash(index, self.block_size)
            if key not in self.pending:
                break
            last_key = key
        return last_key

    def take_block(self, plan: StepPlan) -> int:
        """Take a block for new content. Its evicted content moves to the host tier if a host slot is available."""
        block, evicted_key = self.pool.take_block()
        if evicted_key is not None:
            slot = self.host_cache.assign_slot(evicted_key)
            if slot is not None:
                plan.block_offloads.append((block, slot))
        return block

    def update_full_blocks(self, seq: Sequence, end: int) -> None:
        """Publish the sequence's full blocks among its tokens before `end`, and release those that left a window.

        The tokens are computed. The last one's window is kept, so that siblings can share it.
        """
        size, pool = self.block_size, self.pool
        while seq.next_full_length <= end:
            if self.prefix_cache:
                index = seq.next_full_length // size - 1
                key = seq.block_hash(index, size)
                for table, suffix in zip(seq.block_tables, self._suffixes, strict=True):
                    pool.publish(table[index], key + suffix)
                self.pending.resolve(key)
            seq.next_full_length += size
        if self.snapshots is not None:
            self.snapshots.publish(seq, end)
        first_blocks = seq.first_blocks
        for groups in self._windowed_groups:
            previous = first_blocks[groups[0]]
            first = self._groups.first_block(groups[0], end - 1)
            if first > previous:
                for group in groups:
                    table = seq.block_tables[group]
                    pool.release(table[previous:first])
                    table[previous:first] = [NO_BLOCK] * (first - previous)
                    first_blocks[group] = first

    def release_blocks(self, seq: Sequence) -> None:
        """Release all blocks of a sequence. Those of windows are evicted first, because fewer prefixes need them."""
        self.pending.remove_sequence(seq)
        if self.snapshots is not None:
            self.snapshots.release(seq)
        for table in reversed(_held_tables(seq)):
            self.pool.release(table)
        seq.block_tables = []
        seq.first_blocks = []
        seq.capacity = 0
        seq.computed_len = 0

    def complete_restores(self, step: int, corrupt_blocks: list[int]) -> list[Sequence]:
        """Publish the blocks that step `step` restored from host memory, except the corrupt ones.

        Returns:
            The sequences that were computed on a corrupt block.
        """
        corrupt = set(corrupt_blocks)
        self.corrupt_blocks += len(corrupt)
        affected: list[Sequence] = []
        for restore in self._pending_restores.pop(step, ()):
            self.host_cache.release_slot(restore.slot)
            if restore.block in corrupt and restore.seq not in affected:
                affected.append(restore.seq)
            elif restore.seq.stale_until_step < step and restore.seq not in affected:
                self.pool.publish(restore.block, restore.key + self._suffixes[restore.group])
                self.pending.resolve(restore.key)
        return affected

    def clear_cache(self) -> None:
        """Remove every block that no sequence references, on the device and in host memory."""
        self.pool.clear_cache()
        self.host_cache.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def move_cache_to_host(self, plan: StepPlan) -> None:
        """Free every block while no sequence runs. The latest ones move to host memory, as many as fit there."""
        for block, key in self.pool.cached_keys[-self.host_cache.num_slots :]:
            slot = self.host_cache.assign_slot(key)
            if slot is not None:
                plan.block_offloads.append((block, slot))
        self.pool.clear_cache()
        if self.snapshots is not None:
            self.snapshots.clear()

    def discard_step(self, plan: StepPlan) -> None:
        """Undo the block moves of a step that failed, which may or may not have happened."""
        self.complete_restores(plan.step, [])
        self.host_cache.discard_slots({slot for _, slot in plan.block_offloads})

    def check_invariants(self, running: list[Sequence]) -> None:
        """Raise AssertionError if an invariant of blocks or host slots is broken."""
        self.pool.check_invariants([table for seq in running for table in _held_tables(seq)])
        self.host_cache.check_invariants()
        if self.snapshots is not None:
            self.snapshots.check_invariants(running)
        owners: dict[int, set[tuple[bytes, int]]] = {}
        for seq in running:
            for group, table in enumerate(_held_tables(seq)):
                for block in table:
                    owners.setdefault(block, set()).add((seq.cache_salt, group))
        assert all(len(each) == 1 for each in owners.values()), (
            "a block is shared between cache domains or groups"
        )

    def _fork_source(self, seq: Sequence) -> Sequence | None:
        """Return the sequence's lead if the blocks of its computed prompt can be shared, else None."""
        lead = seq.parent
        if self.snapshots is not None:
            return None  # the state of the lead is ahead of the prompt
        if lead is None or not lead.is_prefilled or lead.cache_salt != seq.cache_salt:
            return None
        position = _forkable_tokens(seq)
        if any(
            lead.first_blocks[groups[0]] > self._groups.first_block(groups[0], position)
            for groups in self._windowed_groups
        ):
            return None  # blocks of the prompt have left a window of the lead
        return lead if lead.tokens[: lead.prompt_len] == seq.tokens[: seq.prompt_len] else None

    def _allocated_end(self, group: int, position: int, length: int) -> int:
        """Return the end of the table that `allocate` fills for a sequence whose tokens before `position` are found."""
        first = self._groups.first_block(group, position)
        num_blocks = -(-length // self.block_size)
        return min(num_blocks, first + self._groups.max_blocks(group, length))

    def _can_use_prefix_cache(self, seq: Sequence) -> bool:
        """Return whether cached blocks may be used."""
        return self.prefix_cache and not seq.needs_whole_prompt

    def _announce_pending(self, seq: Sequence, num_hits: int) -> None:
        """Announce the blocks that the sequence will compute, up to `MAX_ANNOUNCED_BLOCKS`."""
        if self.prefix_cache:
            end = min(seq.length // self.block_size, num_hits + MAX_ANNOUNCED_BLOCKS)
            if end > num_hits:
                seq.block_hash(end - 1, self.block_size)  # with all before it
            self.pending.add(seq, seq.block_hashes[num_hits:end])

    def _count_hits(self, seq: Sequence) -> int:
        """Count leading full blocks that need not be computed. At least one token remains to be computed."""
        num_cached = self._count_cached_blocks(seq)
        return num_cached if self.snapshots is None else self.snapshots.count_hits(seq, num_cached)

    def _count_cached_blocks(self, seq: Sequence) -> int:
        """Count leading full blocks whose keys and values are cached, up to one token before the end."""
        if not self._can_use_prefix_cache(seq):
            return 0
        size, hashes = self.block_size, seq.block_hashes
        published, host_cache = self.pool.published, self.host_cache
        num_hits = (seq.length - 1) // size
        for suffix in self._suffixes[: self._num_full_groups]:
            for index in range(num_hits):
                if index >= len(hashes):
                    seq.block_hash(min(num_hits, index + HASHED_BLOCKS) - 1, size)
                key = hashes[index] + suffix
                if key not in published and key not in host_cache:
                    num_hits = index
                    break
        # Other groups are searched from the end, and each of their blocks once: `found` is where the blocks start that
        # a group is known to have.
        found = dict.fromkeys(range(self._num_full_groups, len(self._suffixes)), num_hits)
        groups = list(found)
        while groups:
            group = groups.pop()
            index = min(found[group], num_hits)
            first = self._groups.first_block(group, num_hits * size)
            while index > first:
                if not self._is_cached(seq.block_hash(index - 1, size) + self._suffixes[group]):
                    num_hits = index - 1
                    groups = list(found)
                    break
                index -= 1
            found[group] = index
        return num_hits

    def _share_fork(self, seq: Sequence, lead: Sequence, plan: StepPlan) -> None:
        """Share the lead's blocks of the tokens that are found, and copy the last one if it is not full."""
        num_full_blocks, rest = divmod(seq.computed_len, self.block_size)
        for group, table in enumerate(lead.block_tables):
            first = self._groups.first_block(group, seq.computed_len)
            shared = table[first:num_full_blocks]
            for block in shared:
                self.pool.share(block)
            seq.first_blocks.append(first)
            seq.block_tables.append([NO_BLOCK] * first + shared)
        if rest:
            for table, lead_table in zip(seq.block_tables, lead.block_tables, strict=True):
                table.append(self.take_block(plan))
                plan.block_copies.append((lead_table[num_full_blocks], table[num_full_blocks]))

    def _share_hits(self, seq: Sequence, num_hits: int, plan: StepPlan) -> None:
        """Reference every hit before taking a new block, so that taking one cannot evict a hit."""
        size = self.block_size
        restores: list[tuple[int, int, bytes, int]] = []
        """(group, index, hash, host slot)."""
        for group, suffix in enumerate(self._suffixes):
            first = self._groups.first_block(group, seq.computed_len)
            table = [NO_BLOCK] * first
            for index in range(first, num_hits):
                key = seq.block_hashes[index]
                block = self.pool.find(key + suffix)
                if block is not None:
                    self.pool.share(block)
                    table.append(block)
                else:
                    slot = self.host_cache.pin_slot(key + suffix)
                    restores.append((group, index, key, slot))
                    table.append(NO_BLOCK)
            seq.first_blocks.append(first)
            seq.block_tables.append(table)
        self.host_hit_tokens += size * sum(group == 0 for group, *_ in restores)
        for group, index, key, slot in restores:
            block = seq.block_tables[group][index] = self.take_block(plan)
            plan.block_restores.append(BlockRestore(slot, block))
            self.pending.add(seq, [key])
            self._pending_restores.setdefault(plan.step, []).append(
                _PendingRestore(seq, key, group, slot, block)
            )


def _forkable_tokens(seq: Sequence) -> int:
    """Count the tokens whose KV a sibling shares with its lead. A sibling always computes its last token."""
    return min(seq.prompt_len, seq.length - 1)


def _held_tables(seq: Sequence) -> list[list[int]]:
    """Return the blocks that a sequence holds in each group."""
    firsts = zip(seq.block_tables, seq.first_blocks, strict=True)
    return [table[first:] for table, first in firsts]
