"""The blocks of sequences: prefix hits, forks, growth, and blocks that come back from host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.engine.scheduling.block_pool import BlockPool, HostIndex
from argosy.engine.scheduling.pending_blocks import Underway
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.step_plan import Restore

if TYPE_CHECKING:
    from argosy.engine.scheduling.step_plan import Plan

MOST_ANNOUNCED = 512
"""Blocks of one prompt that others may wait for; the rest are hashed only when they are computed."""


@dataclass(frozen=True, slots=True)
class _Restoring:
    """A block on its way back from the host, until the step that brings it has committed."""

    seq: Sequence
    index: int
    key: bytes
    slot: int
    block: int


class Memory:
    """Gives sequences their blocks and takes them back; counts what the prefix cache saved."""

    def __init__(
        self, *, num_blocks: int, host_blocks: int, block_size: int, prefix_cache: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = HostIndex(host_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.underway = Underway()
        self.query_tokens = 0
        self.hit_tokens = 0
        self.host_hit_tokens = 0
        self.corrupt_blocks = 0
        self._restoring: dict[int, list[_Restoring]] = {}
        """By the step that brings them back."""

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.available

    def holds(self, key: bytes) -> bool:
        """Whether a sequence would find this block, on the device or the host."""
        return self.pool.find(key) is not None or key in self.host

    @property
    def changed(self) -> bool:
        """Whether `changes` has anything to tell."""
        return bool(self.pool.touched or self.host.touched)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Of the blocks that came or went since the last call: those that are held now, and those that are not."""
        touched = self.pool.touched | self.host.touched
        self.pool.touched.clear()
        self.host.touched.clear()
        held = [key for key in touched if self.holds(key)]
        return held, list(touched.difference(held))

    def cost(self, seq: Sequence) -> int:
        """How many available blocks `place` would use up for this waiting sequence."""
        source = self._fork_source(seq)
        total = -(-seq.length // self.block_size)
        if source is not None:
            return total - _forkable(seq) // self.block_size
        shared = 0
        for index in range(self._hits(seq)):
            block = self.pool.find(seq.hash_of(index, self.block_size))
            shared += block is not None and not self.pool.is_cached(block)
        return total - shared

    def lacking(self, seq: Sequence) -> int:
        """How many tokens `place` would leave to be computed for this waiting sequence."""
        if self._fork_source(seq) is not None:
            return seq.length - _forkable(seq)
        return seq.length - self._hits(seq) * self.block_size

    def place(self, seq: Sequence, plan: Plan) -> None:
        """Give a waiting sequence blocks for all its tokens; `computed` is set to what was found."""
        size = self.block_size
        source = self._fork_source(seq)
        if source is not None:
            seq.computed = _forkable(seq)
            full = seq.computed // size
            seq.blocks = source.blocks[:full]
            for block in seq.blocks:
                self.pool.share(block)
            if seq.computed % size:
                self._append(seq, plan)
                plan.copies.append((source.blocks[full], seq.blocks[full]))
        else:
            hits = self._hits(seq)
            self._share_hits(seq, hits, plan)
            seq.computed = hits * size
            self._announce(seq, hits)
        if seq.scheduled_at is not None and seq.preemptions == 0:
            self.query_tokens += seq.prompt_len
            self.hit_tokens += seq.computed
            seq.hit_tokens = min(seq.computed, seq.prompt_len)
        seq.publish_at = (seq.computed // size + 1) * size if self.prefix_cache else NEVER
        while len(seq.blocks) * size < seq.length:
            self._append(seq, plan)
        seq.capacity = len(seq.blocks) * size

    def awaited(self, seq: Sequence) -> bytes | None:
        """The last of the blocks that it lacks and that running sequences are computing right now."""
        if self._fork_source(seq) is not None or not self._may_hit(seq):
            return None
        last = None
        for index in range(self._hits(seq), (seq.length - 1) // self.block_size):
            key = seq.hash_of(index, self.block_size)
            if key not in self.underway:
                break
            last = key
        return last

    def take(self, plan: Plan) -> int:
        """A block for new content; what it evicts moves to the host tier when there is room."""
        block, lost = self.pool.take()
        if lost is not None:
            slot = self.host.put(lost)
            if slot is not None:
                plan.offloads.append((block, slot))
        return block

    def publish(self, seq: Sequence, end: int) -> None:
        """The sequence's tokens before `end` are computed: let others find the full blocks among them."""
        while seq.publish_at <= end:
            index = seq.publish_at // self.block_size - 1
            key = seq.hash_of(index, self.block_size)
            self.pool.publish(seq.blocks[index], key)
            self.underway.settle(key)
            seq.publish_at += self.block_size

    def release(self, seq: Sequence) -> None:
        """Take all blocks back."""
        self.underway.leave(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.capacity = 0
        seq.computed = 0

    def settle(self, step: int, corrupt: list[int]) -> list[Sequence]:
        """Step `step` has brought its blocks back from the host, all but the `corrupt` ones.

        Returns the sequences that were computed on a corrupt block.
        """
        bad = set(corrupt)
        self.corrupt_blocks += len(bad)
        victims: list[Sequence] = []
        for item in self._restoring.pop(step, ()):
            self.host.free(item.slot)
            if item.block in bad and item.seq not in victims:
                victims.append(item.seq)
            elif item.seq.void < step and item.seq not in victims:
                self.pool.publish(item.block, item.key)
                self.underway.settle(item.key)
        return victims

    def check(self, holders: list[Sequence]) -> None:
        """Assert the invariants of blocks and host slots. Raises AssertionError."""
        self.pool.check([seq.blocks for seq in holders])
        self.host.check()
        for block, count in _shared(holders).items():
            assert count == 1 or len({s.salt for s in holders if block in s.blocks}) == 1, (
                "a block is shared between cache domains"
            )

    def _append(self, seq: Sequence, plan: Plan) -> None:
        seq.blocks.append(self.take(plan))

    def _fork_source(self, seq: Sequence) -> Sequence | None:
        """The lead, when its computed prompt can be taken over."""
        lead = seq.lead
        if lead is None or not lead.prefilled or lead.salt != seq.salt:
            return None
        return lead if lead.tokens[: lead.prompt_len] == seq.tokens[: seq.prompt_len] else None

    def _may_hit(self, seq: Sequence) -> bool:
        """Whether cached blocks are of use: log-probabilities of the prompt need all of it computed."""
        return self.prefix_cache and seq.params.prompt_logprobs is None

    def _announce(self, seq: Sequence, hits: int) -> None:
        """Tell which blocks will come of it: those it computes, as far as is worth hashing ahead."""
        if self.prefix_cache:
            last = min(seq.length // self.block_size, hits + MOST_ANNOUNCED)
            keys = [seq.hash_of(index, self.block_size) for index in range(hits, last)]
            self.underway.begin(seq, keys)

    def _hits(self, seq: Sequence) -> int:
        """Leading full blocks found on the device or the host; one token at least stays to be computed."""
        if not self._may_hit(seq):
            return 0
        most = (seq.length - 1) // self.block_size
        for index in range(most):
            key = seq.hash_of(index, self.block_size)
            if not self.holds(key):
                return index
        return most

    def _share_hits(self, seq: Sequence, hits: int, plan: Plan) -> None:
        """Hold every hit before anything new is taken, so that taking cannot evict one."""
        size = self.block_size
        coming: list[tuple[int, bytes, int]] = []
        for index in range(hits):
            key = seq.hash_of(index, size)
            block = self.pool.find(key)
            if block is not None:
                self.pool.share(block)
                seq.blocks.append(block)
            else:
                coming.append((index, key, self.host.pin(key)))
                seq.blocks.append(-1)
        for index, key, slot in coming:
            block = seq.blocks[index] = self.take(plan)
            plan.restores.append(Restore(slot, block))
            self.underway.begin(seq, [key])
            self._restoring.setdefault(plan.step, []).append(
                _Restoring(seq, index, key, slot, block)
            )
        self.host_hit_tokens += len(coming) * size


def _forkable(seq: Sequence) -> int:
    """Tokens whose KV a sibling takes over from its lead; the last one it always computes itself."""
    return min(seq.prompt_len, seq.length - 1)


def _shared(holders: list[Sequence]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for seq in holders:
        for block in seq.blocks:
            counts[block] = counts.get(block, 0) + 1
    return counts
