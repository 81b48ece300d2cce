"""The sequences that run: who may join them, who gets a block, and who has to leave for whom."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from argosy.engine.scheduling.batching_policy import BatchingPolicy, OutputFractionEstimator
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.step_plan import AdmittedSequence, StepPlan
from argosy.engine.scheduling.ttft_guard import AdmissionCandidate

if TYPE_CHECKING:
    from argosy.engine.scheduling.kv_cache_manager import KvCacheManager
    from argosy.engine.scheduling.request_registry import RequestRegistry
    from argosy.engine.scheduling.waiting_queue import WaitingQueue

_order = attrgetter("priority_order")
_tier = attrgetter("tier")


class RunningBatch:
    """Gives sequences their rows, and takes them back."""

    def __init__(
        self,
        *,
        max_seqs: int,
        watermark: float,
        batching_policy: BatchingPolicy,
        kv_cache: KvCacheManager,
        queue: WaitingQueue,
        requests: RequestRegistry,
    ) -> None:
        self.sequences: list[Sequence] = []
        """Most important first."""
        self.output_estimator = OutputFractionEstimator()
        self.preemptions = 0
        self.last_planned_step = 0
        """The last step planned: its results, and earlier ones, do not concern who leaves now."""
        self._max_seqs = max_seqs
        self._watermark = watermark
        self._batching_policy = batching_policy
        self._kv_cache = kv_cache
        self._queue = queue
        self._requests = requests
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._admission_count = 0

    def sequences_from_tier(self, lowest_tier: int) -> tuple[Sequence, ...]:
        """Those of this tier and higher ones."""
        if lowest_tier == NEVER:
            return tuple(self.sequences)
        return tuple(self.sequences[: bisect_right(self.sequences, lowest_tier, key=_tier)])

    def make_room(self, now: float) -> AdmissionCandidate | None:
        """Make room for the head of the queue at the cost of lower tiers, if that is what it takes.

        Returns it when there is room now, and somebody of a lower tier runs.
        """
        head = self._queue.peek()
        if head is None or not self.sequences or self.sequences[-1].tier <= head.tier:
            return None
        if self._kv_cache.pending_prefix_key(head) is not None:
            return None
        lower = [seq for seq in self.sequences if seq.tier > head.tier]
        gain = sum(len(seq.blocks) for seq in lower)
        if (
            not self._can_join(head, now)
            or self._kv_cache.blocks_needed(head) > self._kv_cache.available_blocks + gain
        ):
            return None
        while not (room := bool(self._free_rows) and self._has_room_for(head)) and lower:
            self.preempt(lower.pop())
        return (
            AdmissionCandidate(head.tier, self._kv_cache.tokens_to_compute(head))
            if room and lower
            else None
        )

    def admit_next(self, plan: StepPlan, now: float, lowest_tier: int) -> Sequence | None:
        """Let the head of the queue join, if it is of tier `lowest` or above; None when it cannot."""
        while (seq := self._queue.peek()) is not None:
            if seq.tier > lowest_tier or not self._free_rows or not self._can_join(seq, now):
                return None
            block = self._kv_cache.pending_prefix_key(seq)
            if block is None:
                break
            self._queue.remove(seq)
            self._requests.block(seq, block)
        if seq is None or not self._has_room_for(seq):
            return None
        self._queue.remove(seq)
        seq.row = self._free_rows.pop()
        if seq.scheduled_at is None:
            seq.scheduled_at = now
            self._admission_count += 1
            seq.priority_order = (seq.tier, self._admission_count)
        self._kv_cache.allocate(seq, plan)
        plan.admissions.append(
            AdmittedSequence(
                seq.row, list(seq.tokens), seq.prompt_len, seq.params, list(seq.blocks)
            )
        )
        insort(self.sequences, seq, key=_order)
        return seq

    def append_block(self, seq: Sequence, plan: StepPlan) -> bool:
        """Give a running sequence its next block, taken from the least important one if need be."""
        if seq.row < 0:
            return False  # preempted a moment ago, for a more important one
        while not self._kv_cache.available_blocks:
            victim = self.sequences[-1]
            self.preempt(victim)
            self.output_estimator.record_shortage()
            if victim is seq:
                return False
        block = self._kv_cache.take_block(plan)
        plan.block_appends.append((seq.row, len(seq.blocks), block))
        seq.blocks.append(block)
        seq.capacity += self._kv_cache.block_size
        return True

    def preempt(self, seq: Sequence) -> None:
        """Finish and resubmit: it keeps its tokens and its place, and gives back all else."""
        self.remove(seq)
        seq.length = len(seq.tokens)
        seq.stale_until_step = self.last_planned_step
        seq.preemptions += 1
        self.preemptions += 1
        self._queue.push(seq)

    def remove(self, seq: Sequence) -> None:
        """It gives its row and its blocks back."""
        self.sequences.remove(seq)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.is_prefilled = False
        self._kv_cache.release_blocks(seq)
        self.requeue_unblocked()

    def requeue_unblocked(self) -> None:
        """Those who waited for a block that is there now, or will not come, queue up again."""
        for block in self._kv_cache.pending.drain_resolved():
            for seq in self._requests.unblock(block):
                self._queue.push(seq)

    def check_invariants(self) -> None:
        """Assert the invariants between steps. Raises AssertionError."""
        rows = [seq.row for seq in self.sequences]
        assert sorted(rows + self._free_rows) == list(range(self._max_seqs)), "a row leaked"
        assert self.sequences == sorted(self.sequences, key=_order), "they are out of order"
        for seq in self.sequences:
            assert 0 <= seq.computed_len <= seq.capacity, "computed tokens without a block"

    def _can_join(self, seq: Sequence, now: float) -> bool:
        """Whether the batching mode, and the isolation of suspects, let it join now."""
        running = self.sequences
        if seq.is_suspect or (running and running[0].is_suspect):
            return not running
        return self._batching_policy.can_admit(
            running=len(running),
            generating=sum(other.is_prefilled for other in running),
            waiting=len(self._queue),
            waited_s=now - seq.arrived_at,
        )

    def _has_room_for(self, seq: Sequence) -> bool:
        """Whether there are blocks for it and for what running sequences will probably still need."""
        spare = self._kv_cache.available_blocks - self._kv_cache.blocks_needed(seq)
        if not self.sequences:
            return spare >= 0
        promised = (
            seq.max_length - seq.length + sum(s.max_length - s.length for s in self.sequences)
        )
        growth = self.output_estimator.fraction * promised / self._kv_cache.block_size
        return spare >= growth + self._watermark * self._kv_cache.pool.num_blocks
