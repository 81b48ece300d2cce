"""Batch of running sequences, with admission, block growth and preemption."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter

from argosy.engine.scheduling.batching_policy import BatchingPolicy, OutputFractionEstimator
from argosy.engine.scheduling.kv_cache_manager import KvCacheManager
from argosy.engine.scheduling.sequence import NEVER, RequestRegistry, Sequence
from argosy.engine.scheduling.step_plan import AdmittedSequence, StepPlan
from argosy.engine.scheduling.token_budget import AdmissionCandidate
from argosy.engine.scheduling.waiting_queue import WaitingQueue

_priority_key = attrgetter("priority_order")
_tier_key = attrgetter("tier")


class RunningBatch:
    """Running sequences and their rows in the executor's persistent batch."""

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
        """Running sequences by tier, then by admission."""
        self.output_estimator = OutputFractionEstimator()
        self.preemptions = 0
        self.last_planned_step = 0
        """Number of the last planned step. A sequence that is preempted now ignores results up to this step."""
        self._max_seqs = max_seqs
        self._watermark = watermark
        self._batching_policy = batching_policy
        self._kv_cache = kv_cache
        self._queue = queue
        self._requests = requests
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._admission_count = 0

    def sequences_from_tier(self, lowest_tier: int) -> tuple[Sequence, ...]:
        """Return the running sequences of tier `lowest_tier` and higher tiers."""
        if lowest_tier == NEVER:
            return tuple(self.sequences)
        return tuple(self.sequences[: bisect_right(self.sequences, lowest_tier, key=_tier_key)])

    def make_room(self, now: float) -> AdmissionCandidate | None:
        """Preempt sequences of lower tiers where the head of the queue needs their rows or blocks.

        Returns:
            The head of the queue, if it has room now and sequences of lower tiers still run. Otherwise None.
        """
        head = self._queue.peek()
        if head is None or not self.sequences or self.sequences[-1].tier <= head.tier:
            return None
        if self._kv_cache.pending_prefix_key(head) is not None:
            return None
        lower_seqs = [seq for seq in self.sequences if seq.tier > head.tier]
        lower_blocks = sum(self._kv_cache.count_held_blocks(seq) for seq in lower_seqs)
        if (
            not self._can_join(head, now)
            or self._kv_cache.blocks_needed(head)
            > self._kv_cache.pool.available_blocks + lower_blocks
        ):
            return None
        while not (has_room := bool(self._free_rows) and self._has_room_for(head)) and lower_seqs:
            self.preempt(lower_seqs.pop())
        return (
            AdmissionCandidate(head.tier, self._kv_cache.tokens_to_compute(head))
            if has_room and lower_seqs
            else None
        )

    def admit_next(self, plan: StepPlan, now: float, lowest_tier: int) -> Sequence | None:
        """Admit and return the head of the queue.

        Returns None if the head cannot join or is of a lower tier than `lowest_tier`. Heads whose prefix is being
        computed are blocked, and the next one is tried.
        """
        while (seq := self._queue.peek()) is not None:
            if seq.tier > lowest_tier or not self._free_rows or not self._can_join(seq, now):
                return None
            pending_key = self._kv_cache.pending_prefix_key(seq)
            if pending_key is None:
                break
            self._queue.remove(seq)
            self._requests.block(seq, pending_key)
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
                seq.row,
                list(seq.tokens),
                seq.prompt_len,
                seq.params,
                [list(table) for table in seq.block_tables],
                seq.pooling,
            )
        )
        insort(self.sequences, seq, key=_priority_key)
        return seq

    def append_blocks(self, seq: Sequence, plan: StepPlan) -> bool:
        """Append the next blocks of a running sequence, preempting the least important ones if blocks are short.

        Returns whether the sequence got its blocks. Otherwise it was preempted itself, or sits out this step.
        """
        if seq.row < 0:
            return False  # preempted for a more important sequence in the same step
        while not self._kv_cache.append_blocks(seq, plan):
            if self._kv_cache.will_release_blocks(seq):
                return False
            victim = self.sequences[-1]
            self.preempt(victim)
            self.output_estimator.record_shortage()
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Move a running sequence to the queue. It keeps its tokens and its priority, and releases row and blocks."""
        self.remove(seq)
        seq.length = len(seq.tokens)
        seq.stale_until_step = self.last_planned_step
        seq.preemptions += 1
        self.preemptions += 1
        self._queue.push(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from the batch and release its row and blocks."""
        self.sequences.remove(seq)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.is_prefilled = False
        self._kv_cache.release_blocks(seq)
        self.requeue_unblocked()

    def requeue_unblocked(self) -> None:
        """Move the sequences to the queue whose pending block was published or abandoned."""
        for key in self._kv_cache.pending.drain_resolved():
            for seq in self._requests.unblock(key):
                self._queue.push(seq)

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant that holds between steps is broken."""
        rows = [seq.row for seq in self.sequences]
        assert sorted(rows + self._free_rows) == list(range(self._max_seqs)), "a row leaked"
        assert self.sequences == sorted(self.sequences, key=_priority_key), (
            "running sequences are out of order"
        )
        for seq in self.sequences:
            assert 0 <= seq.computed_len <= seq.capacity, "computed tokens without a block"

    def _can_join(self, seq: Sequence, now: float) -> bool:
        """Return whether the batching policy, and the isolation of suspect sequences, allow `seq` to join now."""
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
        """Return whether blocks suffice for `seq` and for the expected growth of running sequences."""
        spare_blocks = self._kv_cache.pool.available_blocks - self._kv_cache.blocks_needed(seq)
        if not self.sequences:
            return spare_blocks >= 0
        expected_growth = self.output_estimator.fraction * self._kv_cache.max_growth(
            [seq, *self.sequences]
        )
        return spare_blocks >= expected_growth + self._watermark * self._kv_cache.pool.num_blocks
