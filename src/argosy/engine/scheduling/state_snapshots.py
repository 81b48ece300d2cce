"""Snapshots of recurrent states, from which sequences with the same prefix start.

A model with recurrent layers keeps one state per running sequence. It cannot go back to an earlier token, so a prefix
hit needs a copy of the state at its end. Snapshots are large, so a sequence saves only a few. It keeps the newest one,
and those at the end of its prompt and of a prefix that it shares with an earlier sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from argosy.engine.scheduling.sequence import Sequence
from argosy.engine.scheduling.step_plan import StepPlan


class _PendingSave(NamedTuple):
    """Snapshot that a step in flight saves."""

    position: int
    """Number of tokens of which it is the state."""
    slot: int
    is_lasting: bool
    """Whether it stays when the sequence saves a newer one."""


class StateSnapshots:
    """Index of `num_slots` snapshots by the key of the block that ends where they were saved.

    A slot is free, reserved for a step in flight, or published, in the order of the last use. Steps run in order, and
    a step loads before it saves. It therefore reads a snapshot before another one overwrites it.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self._block_size = block_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._published: OrderedDict[bytes, int] = OrderedDict()
        self._pending: dict[Sequence, list[_PendingSave]] = {}
        self._branches: dict[Sequence, int] = {}
        """Number of tokens at which a sequence leaves a prefix whose blocks are cached, without a snapshot."""
        self._superseded: dict[Sequence, bytes] = {}
        """Key of the snapshot that is of little use once the sequence saves a newer one."""

    def count_hits(self, seq: Sequence, num_blocks: int) -> int:
        """Return the length in blocks of the longest prefix, up to `num_blocks`, that ends at a snapshot."""
        while num_blocks and self._key(seq, num_blocks) not in self._published:
            num_blocks -= 1
        return num_blocks

    def load(self, seq: Sequence, num_blocks: int, num_cached: int, plan: StepPlan) -> None:
        """Start an admitted sequence from the snapshot after `num_blocks` blocks, or from nothing if there are none.

        `num_cached` is the number of its leading blocks in the KV cache.
        """
        if num_blocks:
            key = self._key(seq, num_blocks)
            self._published.move_to_end(key)
            plan.snapshot_loads.append((self._published[key], seq.row))
        if num_cached > num_blocks:
            self._branches[seq] = num_cached * self._block_size

    def plan_saves(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        """Reserve the snapshots that the sequences of a planned step save."""
        size = self._block_size
        for chunk, seq in enumerate(seqs):
            start, count = plan.starts[chunk], plan.counts[chunk]
            end = start + count
            if count == 1 and end % size:
                continue
            # A later sequence with the same tokens computes the last one, so that it hits before that token.
            is_prefill_end = count > 1 and plan.sample_counts[chunk] > 0
            newest = (end - is_prefill_end) // size * size
            lasting = (self._branches.get(seq, 0), (seq.prompt_len - 1) // size * size)
            for position in sorted({lasting[0], newest}):
                if start < position <= end:
                    self._reserve(seq, chunk, position, plan, is_lasting=position in lasting)

    def publish(self, seq: Sequence, end: int) -> None:
        """Publish the snapshots of a sequence among its first `end` tokens, which are computed."""
        pending = self._pending.get(seq)
        while pending and pending[0].position <= end:
            save = pending.pop(0)
            key = self._key(seq, save.position // self._block_size)
            if key in self._published:
                self._free.append(save.slot)
            else:
                self._published[key] = save.slot
            superseded = self._superseded.pop(seq, None)
            if superseded is not None and superseded in self._published:
                self._published.move_to_end(superseded, last=False)
            if not save.is_lasting:
                self._superseded[seq] = key

    def release(self, seq: Sequence) -> None:
        """Free the snapshots that a sequence has reserved, because it stops running. Its published ones stay."""
        self._free.extend(save.slot for save in self._pending.pop(seq, ()))
        self._branches.pop(seq, None)
        self._superseded.pop(seq, None)

    def clear(self) -> None:
        """Remove every published snapshot."""
        self._free.extend(self._published.values())
        self._published.clear()

    def check_invariants(self, running: list[Sequence]) -> None:
        """Raise AssertionError if an invariant is broken, given all running sequences."""
        pending = [save.slot for saves in self._pending.values() for save in saves]
        slots = [*self._free, *self._published.values(), *pending]
        assert sorted(slots) == list(range(self.num_slots)), "a snapshot leaked or is in two states"
        owners = {*self._pending, *self._branches, *self._superseded}
        assert owners <= set(running), "a sequence that does not run has snapshots"

    def _key(self, seq: Sequence, num_blocks: int) -> bytes:
        return seq.block_hash(num_blocks - 1, self._block_size)

    def _reserve(
        self, seq: Sequence, chunk: int, position: int, plan: StepPlan, *, is_lasting: bool
    ) -> None:
        """Reserve a slot for a snapshot, unless the prefix has one or all slots are reserved."""
        if position <= len(seq.tokens) and self._key(seq, position // self._block_size) in (
            self._published
        ):
            return
        if self._free:
            slot = self._free.pop()
        elif self._published:
            _, slot = self._published.popitem(last=False)
        else:
            return
        self._pending.setdefault(seq, []).append(_PendingSave(position, slot, is_lasting))
        plan.snapshot_saves.append((chunk, position, slot))
