"""The blocks of sequences: prefix hits, forks, growth, and blocks that come back from host memory."""

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
"""Blocks of one prompt that others may wait for; the rest are hashed only when they are computed."""


@dataclass(frozen=True, slots=True)
class _PendingRestore:
    """A block on its way back from the host, until the step that brings it has committed."""

    seq: Sequence
    index: int
    key: bytes
    slot: int
    block: int


class KvCacheManager:
    """Gives sequences their blocks and takes them back; counts what the prefix cache saved."""

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
        """By the step that brings them back."""

    @property
    def available_blocks(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.available_blocks

    def has_block(self, key: bytes) -> bool:
        """Whether a sequence would find this block, on the device or the host."""
        return self.pool.find(key) is not None or key in self.host_cache

    @property
    def has_changes(self) -> bool:
        """Whether `changes` has anything to tell."""
        return bool(self.pool.changed_keys or self.host_cache.changed_keys)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Of the blocks that came or went since the last call: those that are held now, and those that are not."""
        touched = self.pool.changed_keys | self.host_cache.changed_keys
        self.pool.changed_keys.clear()
        self.host_cache.changed_keys.clear()
        held = [key for key in touched if self.has_block(key)]
        return held, list(touched.difference(held))

    def blocks_needed(self, seq: Sequence) -> int:
        """How many available blocks `place` would use up for this waiting sequence."""
        source = self._fork_source(seq)
        total = -(-seq.length // self.block_size)
        if source is not None:
            return total - _forkable_tokens(seq) // self.block_size
        shared = 0
        for index in range(self._count_hits(seq)):
            block = self.pool.find(seq.block_hash(index, self.block_size))
            shared += block is not None and not self.pool.is_cached(block)
        return total - shared

    def tokens_to_compute(self, seq: Sequence) -> int:
        """How many tokens `place` would leave to be computed for this waiting sequence."""
        if self._fork_source(seq) is not None:
            return seq.length - _forkable_tokens(seq)
        return seq.length - self._count_hits(seq) * self.block_size

    def allocate(self, seq: Sequence, plan: StepPlan) -> None:
        """Give a waiting sequence blocks for all its tokens; `computed` is set to what was found."""
        size = self.block_size
        source = self._fork_source(seq)
        if source is not None:
            seq.computed_len = _forkable_tokens(seq)
            full = seq.computed_len // size
            seq.blocks = source.blocks[:full]
            for block in seq.blocks:
                self.pool.share(block)
            if seq.computed_len % size:
                self._append_block(seq, plan)
                plan.block_copies.append((source.blocks[full], seq.blocks[full]))
        else:
            hits = self._count_hits(seq)
            self._share_hits(seq, hits, plan)
            seq.computed_len = hits * size
            self._announce_pending(seq, hits)
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
        """The last of the blocks that it lacks and that running sequences are computing right now."""
        if self._fork_source(seq) is not None or not self._can_use_prefix_cache(seq):
            return None
        last = None
        for index in range(self._count_hits(seq), (seq.length - 1) // self.block_size):
            key = seq.block_hash(index, self.block_size)
            if key not in self.pending:
                break
            last = key
        return last

    def take_block(self, plan: StepPlan) -> int:
        """A block for new content; what it evicts moves to the host tier when there is room."""
        block, lost = self.pool.take_block()
        if lost is not None:
            slot = self.host_cache.assign_slot(lost)
            if slot is not None:
                plan.block_offloads.append((block, slot))
        return block

    def publish_blocks(self, seq: Sequence, end: int) -> None:
        """The sequence's tokens before `end` are computed: let others find the full blocks among them."""
        while seq.next_publish_length <= end:
            index = seq.next_publish_length // self.block_size - 1
            key = seq.block_hash(index, self.block_size)
            self.pool.publish(seq.blocks[index], key)
            self.pending.resolve(key)
            seq.next_publish_length += self.block_size

    def release_blocks(self, seq: Sequence) -> None:
        """Take all blocks back."""
        self.pending.remove_sequence(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.capacity = 0
        seq.computed_len = 0

    def complete_restores(self, step: int, corrupt_blocks: list[int]) -> list[Sequence]:
        """Step `step` has brought its blocks back from the host, all but the `corrupt` ones.

        Returns the sequences that were computed on a corrupt block.
        """
        bad = set(corrupt_blocks)
        self.corrupt_blocks += len(bad)
        victims: list[Sequence] = []
        for item in self._pending_restores.pop(step, ()):
            self.host_cache.release_slot(item.slot)
            if item.block in bad and item.seq not in victims:
                victims.append(item.seq)
            elif item.seq.stale_until_step < step and item.seq not in victims:
                self.pool.publish(item.block, item.key)
                self.pending.resolve(item.key)
        return victims

    def check_invariants(self, holders: list[Sequence]) -> None:
        """Assert the invariants of blocks and host slots. Raises AssertionError."""
        self.pool.check_invariants([seq.blocks for seq in holders])
        self.host_cache.check_invariants()
        for block, count in _count_holders(holders).items():
            assert count == 1 or len({s.cache_salt for s in holders if block in s.blocks}) == 1, (
                "a block is shared between cache domains"
            )

    def _append_block(self, seq: Sequence, plan: StepPlan) -> None:
        seq.blocks.append(self.take_block(plan))

    def _fork_source(self, seq: Sequence) -> Sequence | None:
        """The lead, when its computed prompt can be taken over."""
        lead = seq.parent
        if lead is None or not lead.is_prefilled or lead.cache_salt != seq.cache_salt:
            return None
        return lead if lead.tokens[: lead.prompt_len] == seq.tokens[: seq.prompt_len] else None

    def _can_use_prefix_cache(self, seq: Sequence) -> bool:
        """Whether cached blocks are of use: log-probabilities of the prompt need all of it computed."""
        return self.prefix_cache and seq.params.prompt_logprobs is None

    def _announce_pending(self, seq: Sequence, hits: int) -> None:
        """Tell which blocks will come of it: those it computes, as far as is worth hashing ahead."""
        if self.prefix_cache:
            last = min(seq.length // self.block_size, hits + MAX_ANNOUNCED_BLOCKS)
            keys = [seq.block_hash(index, self.block_size) for index in range(hits, last)]
            self.pending.add(seq, keys)

    def _count_hits(self, seq: Sequence) -> int:
        """Leading full blocks found on the device or the host; one token at least stays to be computed."""
        if not self._can_use_prefix_cache(seq):
            return 0
        most = (seq.length - 1) // self.block_size
        for index in range(most):
            key = seq.block_hash(index, self.block_size)
            if not self.has_block(key):
                return index
        return most

    def _share_hits(self, seq: Sequence, hits: int, plan: StepPlan) -> None:
        """Hold every hit before anything new is taken, so that taking cannot evict one."""
        size = self.block_size
        coming: list[tuple[int, bytes, int]] = []
        for index in range(hits):
            key = seq.block_hash(index, size)
            block = self.pool.find(key)
            if block is not None:
                self.pool.share(block)
                seq.blocks.append(block)
            else:
                coming.append((index, key, self.host_cache.pin_slot(key)))
                seq.blocks.append(-1)
        for index, key, slot in coming:
            block = seq.blocks[index] = self.take_block(plan)
            plan.block_restores.append(BlockRestore(slot, block))
            self.pending.add(seq, [key])
            self._pending_restores.setdefault(plan.step, []).append(
                _PendingRestore(seq, index, key, slot, block)
            )
        self.host_hit_tokens += len(coming) * size


def _forkable_tokens(seq: Sequence) -> int:
    """Tokens whose KV a sibling takes over from its lead; the last one it always computes itself."""
    return min(seq.prompt_len, seq.length - 1)


def _count_holders(holders: list[Sequence]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for seq in holders:
        for block in seq.blocks:
            counts[block] = counts.get(block, 0) + 1
    return counts
