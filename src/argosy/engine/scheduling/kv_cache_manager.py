"""Assignment of KV blocks to sequences, with prefix hits, forks, growth, and restores from host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.engine.scheduling.block_pool import BlockPool, HostCacheIndex
from argosy.engine.scheduling.pending_blocks import PendingBlocks
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.step_plan import BlockRestore

if TYPE_CHECKING:
    from argosy.engine.scheduling.step_plan import StepPlan

MAX_ANNOUNCED_BLOCKS = 512
"""Maximum blocks of one prompt announced as pending. Later blocks are hashed only when they are computed."""


@dataclass(frozen=True, slots=True)
class _PendingRestore:
    """Block that a step in flight restores from host memory."""

    seq: Sequence
    index: int
    key: bytes
    slot: int
    block: int


class KvCacheManager:
    """Manager of the KV blocks of all sequences, and counters of the prefix cache's hits."""

    def __init__(
        self, *, num_blocks: int, host_blocks: int, block_size: int, prefix_cache: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_cache = HostCacheIndex(host_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pending = PendingBlocks()
        self.query_tokens = 0
        self.hit_tokens = 0
        self.host_hit_tokens = 0
        self.corrupt_blocks = 0
        self._pending_restores: dict[int, list[_PendingRestore]] = {}
        """Pending restores by the number of their step."""

    @property
    def available_blocks(self) -> int:
        """Number of blocks that can be taken now."""
        return self.pool.available_blocks

    def has_block(self, key: bytes) -> bool:
        """Return whether this block is cached on the device or in host memory."""
        return self.pool.find(key) is not None or key in self.host_cache

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` has keys to return."""
        return bool(self.pool.changed_keys or self.host_cache.changed_keys)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys changed since the last call, split into cached and no longer cached ones."""
        changed = self.pool.changed_keys | self.host_cache.changed_keys
        self.pool.changed_keys.clear()
        self.host_cache.changed_keys.clear()
        cached = [key for key in changed if self.has_block(key)]
        return cached, list(changed.difference(cached))

    def blocks_needed(self, seq: Sequence) -> int:
        """Return how many available blocks `allocate` would use for this waiting sequence."""
        lead = self._fork_source(seq)
        num_blocks = -(-seq.length // self.block_size)
        if lead is not None:
            return num_blocks - _forkable_tokens(seq) // self.block_size
        shared = 0
        for index in range(self._count_hits(seq)):
            block = self.pool.find(seq.block_hash(index, self.block_size))
            shared += block is not None and not self.pool.is_cached(block)
        return num_blocks - shared

    def tokens_to_compute(self, seq: Sequence) -> int:
        """Return how many tokens of this waiting sequence would remain to be computed after `allocate`."""
        if self._fork_source(seq) is not None:
            return seq.length - _forkable_tokens(seq)
        return seq.length - self._count_hits(seq) * self.block_size

    def allocate(self, seq: Sequence, plan: StepPlan) -> None:
        """Allocate blocks for all tokens of a waiting sequence, and set its `computed_len` to the tokens found."""
        size = self.block_size
        lead = self._fork_source(seq)
        if lead is not None:
            seq.computed_len = _forkable_tokens(seq)
            num_full_blocks = seq.computed_len // size
            seq.blocks = lead.blocks[:num_full_blocks]
            for block in seq.blocks:
                self.pool.share(block)
            if seq.computed_len % size:
                self._append_block(seq, plan)
                plan.block_copies.append(
                    (lead.blocks[num_full_blocks], seq.blocks[num_full_blocks])
                )
        else:
            num_hits = self._count_hits(seq)
            self._share_hits(seq, num_hits, plan)
            seq.computed_len = num_hits * size
            self._announce_pending(seq, num_hits)
        if seq.scheduled_at is not None and seq.preemptions == 0:
            self.query_tokens += seq.prompt_len
            self.hit_tokens += seq.computed_len
            seq.hit_tokens = min(seq.computed_len, seq.prompt_len)
        seq.next_publish_length = (
            (seq.computed_len // size + 1) * size if self.prefix_cache else NEVER
        )
        while len(seq.blocks) * size < seq.length:
            self._append_block(seq, plan)
        seq.capacity = len(seq.blocks) * size

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

    def publish_blocks(self, seq: Sequence, end: int) -> None:
        """Publish the sequence's full blocks among its computed tokens, which are those before `end`."""
        while seq.next_publish_length <= end:
            index = seq.next_publish_length // self.block_size - 1
            key = seq.block_hash(index, self.block_size)
            self.pool.publish(seq.blocks[index], key)
            self.pending.resolve(key)
            seq.next_publish_length += self.block_size

    def release_blocks(self, seq: Sequence) -> None:
        """Release all blocks of a sequence."""
        self.pending.remove_sequence(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
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
                self.pool.publish(restore.block, restore.key)
                self.pending.resolve(restore.key)
        return affected

    def clear_cache(self) -> None:
        """Remove every block that no sequence references, on the device and in host memory."""
        self.pool.clear_cache()
        self.host_cache.clear()

    def discard_step(self, plan: StepPlan) -> None:
        """Undo the block moves of a step that failed, which may or may not have happened."""
        self.complete_restores(plan.step, [])
        self.host_cache.discard_slots({slot for _, slot in plan.block_offloads})

    def check_invariants(self, running: list[Sequence]) -> None:
        """Raise AssertionError if an invariant of blocks or host slots is broken."""
        self.pool.check_invariants([seq.blocks for seq in running])
        self.host_cache.check_invariants()
        for block, count in _count_references(running).items():
            assert count == 1 or len({s.cache_salt for s in running if block in s.blocks}) == 1, (
                "a block is shared between cache domains"
            )

    def _append_block(self, seq: Sequence, plan: StepPlan) -> None:
        seq.blocks.append(self.take_block(plan))

    def _fork_source(self, seq: Sequence) -> Sequence | None:
        """Return the sequence's lead if the blocks of its computed prompt can be shared, else None."""
        lead = seq.parent
        if lead is None or not lead.is_prefilled or lead.cache_salt != seq.cache_salt:
            return None
        return lead if lead.tokens[: lead.prompt_len] == seq.tokens[: seq.prompt_len] else None

    def _can_use_prefix_cache(self, seq: Sequence) -> bool:
        """Return whether cached blocks may be used. Prompt log-probabilities need the whole prompt computed."""
        return self.prefix_cache and seq.params.prompt_logprobs is None

    def _announce_pending(self, seq: Sequence, num_hits: int) -> None:
        """Announce the blocks that the sequence will compute, up to `MAX_ANNOUNCED_BLOCKS`."""
        if self.prefix_cache:
            end = min(seq.length // self.block_size, num_hits + MAX_ANNOUNCED_BLOCKS)
            keys = [seq.block_hash(index, self.block_size) for index in range(num_hits, end)]
            self.pending.add(seq, keys)

    def _count_hits(self, seq: Sequence) -> int:
        """Count leading full blocks cached on the device or host. At least one token remains to be computed."""
        if not self._can_use_prefix_cache(seq):
            return 0
        max_hits = (seq.length - 1) // self.block_size
        for index in range(max_hits):
            key = seq.block_hash(index, self.block_size)
            if not self.has_block(key):
                return index
        return max_hits

    def _share_hits(self, seq: Sequence, num_hits: int, plan: StepPlan) -> None:
        """Reference every hit before taking a new block, so that taking one cannot evict a hit."""
        size = self.block_size
        restores: list[tuple[int, bytes, int]] = []
        for index in range(num_hits):
            key = seq.block_hash(index, size)
            block = self.pool.find(key)
            if block is not None:
                self.pool.share(block)
                seq.blocks.append(block)
            else:
                restores.append((index, key, self.host_cache.pin_slot(key)))
                seq.blocks.append(-1)
        for index, key, slot in restores:
            block = seq.blocks[index] = self.take_block(plan)
            plan.block_restores.append(BlockRestore(slot, block))
            self.pending.add(seq, [key])
            self._pending_restores.setdefault(plan.step, []).append(
                _PendingRestore(seq, index, key, slot, block)
            )
        self.host_hit_tokens += len(restores) * size


def _forkable_tokens(seq: Sequence) -> int:
    """Count the tokens whose KV a sibling shares with its lead. A sibling always computes its last token."""
    return min(seq.prompt_len, seq.length - 1)


def _count_references(seqs: list[Sequence]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for seq in seqs:
        for block in seq.blocks:
            counts[block] = counts.get(block, 0) + 1
    return counts
