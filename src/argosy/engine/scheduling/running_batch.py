"""Batch of running sequences, with admission, block growth and preemption.

**Sequences that yield.** A request with many sequences, or a tenant with many requests, may take all rows and blocks
while no other waits. When the head of the queue finds no room, running sequences of its tier yield one by one:

* of another tenant that has received more service per weight, and with one sequence less still runs at least as many
  per weight as the head's tenant with one more. The tenant with the most yields.
* of another request of the same tenant of which more than `max_group_seqs` sequences run.

In its tenant, the request with the most sequences yields the one that was admitted last, which has least to compute
again. The sequence keeps its tokens, so that its output is the same. Each yield brings the shares closer together, and
puts the sequence behind the head, so that yielding ends when the shares are equal. No request yields its last sequence
to its own tenant, and no tenant its last one, so that each makes progress. In any n steps, at most `MAX_BURST_YIELDS +
n / YIELD_INTERVAL_STEPS` sequences yield, since each may have to compute its tokens again.

A head that is owed a share need not leave blocks for the growth of the others. If blocks are short later, the tenant
with the most running sequences loses one, so that the cache that a tenant fills is missing to that tenant.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from operator import attrgetter, itemgetter

from argosy.engine.scheduling.batching_policy import BatchingPolicy, OutputFractionEstimator
from argosy.engine.scheduling.kv_cache_manager import KvCacheManager
from argosy.engine.scheduling.sequence import NEVER, RequestRegistry, Sequence, SequenceGroup
from argosy.engine.scheduling.step_plan import AdmittedSequence, StepPlan
from argosy.engine.scheduling.token_budget import AdmissionCandidate
from argosy.engine.scheduling.waiting_queue import WaitingQueue
from argosy.policy import TenantCounter

MAX_BURST_YIELDS = 8
"""Maximum number of sequences that yield in one step. A head may need the blocks of several."""
YIELD_INTERVAL_STEPS = 8
"""Number of steps per yield in the long run."""

_priority_key = attrgetter("priority_order")
_tier_key = attrgetter("tier")


class RunningBatch:
    """Running sequences and their rows in the executor's persistent batch."""

    def __init__(
        self,
        *,
        max_seqs: int,
        max_group_seqs: int,
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
        self._max_group_seqs = max_group_seqs
        self._watermark = watermark
        self._batching_policy = batching_policy
        self._kv_cache = kv_cache
        self._queue = queue
        self._requests = requests
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._admission_count = 0
        self._counts: Counter[tuple[int, TenantCounter]] = Counter()
        """Running sequences of each tier and tenant that has any."""
        self._num_grouped = 0
        """Running sequences of requests with several."""
        self._yield_credit_steps = MAX_BURST_YIELDS * YIELD_INTERVAL_STEPS
        """Steps made, minus `YIELD_INTERVAL_STEPS` for each yield."""
        self.is_short = False
        """Whether a sequence found no block, while one that was planned before it has to be preempted for it."""

    def sequences_from_tier(self, lowest_tier: int) -> tuple[Sequence, ...]:
        """Return the running sequences of tier `lowest_tier` and higher tiers."""
        if lowest_tier == NEVER:
            return tuple(self.sequences)
        return tuple(self.sequences[: bisect_right(self.sequences, lowest_tier, key=_tier_key)])

    def make_room(self, now: float) -> AdmissionCandidate | None:
        """Preempt sequences where the head of the queue needs their rows or blocks.

        Returns:
            The head of the queue, if it has room now and sequences of lower tiers still run. Otherwise None.
        """
        if self.is_short:
            self.is_short = False
            if self.sequences:
                self._preempt_for_blocks(self._choose_least_important())
        self._add_yield_credit(1)
        head = self._queue.peek()
        if head is None or not self.sequences:
            return None
        self._yield_to(head, now)
        if self.sequences[-1].tier <= head.tier:
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

    def skip_steps(self, steps: int) -> None:
        """Count steps that are applied without a plan."""
        self.last_planned_step += steps
        self._add_yield_credit(steps)

    def _add_yield_credit(self, steps: int) -> None:
        self._yield_credit_steps = min(
            self._yield_credit_steps + steps, MAX_BURST_YIELDS * YIELD_INTERVAL_STEPS
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
        self._count(seq, 1)
        self._kv_cache.allocate(seq, plan)
        plan.admissions.append(
            AdmittedSequence(
                seq.row,
                list(seq.tokens),
                seq.prompt_len,
                seq.params,
                [list(table) for table in seq.block_tables],
                seq.pooling,
                seq.adapter_slot,
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
            victim = self._choose_least_important()
            if victim.priority_order < seq.priority_order:
                self.is_short = True  # this step may compute it already, so that it is preempted before the next
                return False
            self._preempt_for_blocks(victim)
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

    def _preempt_for_blocks(self, seq: Sequence) -> None:
        self.preempt(seq)
        self.output_estimator.record_shortage()

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from the batch and release its row and blocks."""
        self.sequences.remove(seq)
        self._count(seq, -1)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.is_prefilled = False
        self._kv_cache.release_blocks(seq)
        self.requeue_unblocked()

    def _count(self, seq: Sequence, change: int) -> None:
        """Count a sequence that joins the batch or exits it."""
        key = seq.tier, seq.tenant_counter
        self._counts[key] += change
        if not self._counts[key]:
            del self._counts[key]
        if seq.group is not None:
            seq.group.num_running += change
            self._num_grouped += change

    def _yield_to(self, head: Sequence, now: float) -> None:
        """Preempt sequences of the head's tier that have to yield to it, if it finds no room."""
        while self._yield_credit_steps >= YIELD_INTERVAL_STEPS:
            victim = self._find_yielding(head)
            if victim is None or not self._can_join(head, now):
                return
            if self._kv_cache.pending_prefix_key(head) is not None:
                return
            if self._free_rows and self._has_room_for(head):
                return
            if not self._can_make_room(head):
                return
            self.preempt(victim)
            self._yield_credit_steps -= YIELD_INTERVAL_STEPS

    def _can_make_room(self, head: Sequence) -> bool:
        """Return whether the blocks of the head's tier would suffice for it."""
        held_blocks = sum(
            self._kv_cache.count_held_blocks(seq) for seq in self.sequences if seq.tier == head.tier
        )
        available_blocks = self._kv_cache.pool.available_blocks + held_blocks
        return self._kv_cache.blocks_needed(head) <= available_blocks

    def _find_yielding(self, head: Sequence) -> Sequence | None:
        """Return the running sequence that yields if the head finds no room, or None if none has to."""
        own = head.tenant_counter
        claim = (self._counts.get((head.tier, own), 0) + 1) / own.weight
        loads = [
            (count / tenant.weight, tenant)
            for (tier, tenant), count in self._counts.items()
            if tier == head.tier
            and tenant is not own
            and (count - 1) / tenant.weight >= claim
            and tenant.served_tokens > own.served_tokens
        ]
        if loads:
            return self._last_of_widest(head.tier, max(loads, key=itemgetter(0))[1])
        if not self._num_grouped or self._is_wide(head.group):
            return None
        if (head.tier, own) not in self._counts:
            return None
        victim = self._last_of_widest(head.tier, own)
        return victim if victim.group is not head.group and self._is_wide(victim.group, 1) else None

    def _is_wide(self, group: SequenceGroup | None, beyond: int = 0) -> bool:
        """Return whether as many sequences of a group run as may run while others wait, or more."""
        return group is not None and group.num_running >= self._max_group_seqs + beyond

    def _last_of_widest(self, tier: int, tenant: TenantCounter) -> Sequence:
        """Return the last admitted sequence of the tenant's request of which the most run."""
        return max(
            (seq for seq in self.sequences if seq.tier == tier and seq.tenant_counter is tenant),
            key=lambda seq: (seq.group.num_running if seq.group else 1, seq.priority_order),
        )

    def _choose_least_important(self) -> Sequence:
        """Return the sequence that is preempted if blocks are short.

        It is one of the tenant with the most running sequences per weight in the lowest tier. If each has only one, it
        is the last one.
        """
        lowest_tier = self.sequences[-1].tier
        loads = [
            (count / tenant.weight, tenant)
            for (tier, tenant), count in self._counts.items()
            if tier == lowest_tier and count > 1
        ]
        if not loads:
            return self.sequences[-1]
        return self._last_of_widest(lowest_tier, max(loads, key=itemgetter(0))[1])

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
        counts = Counter((seq.tier, seq.tenant_counter) for seq in self.sequences)
        assert counts == self._counts, "the running sequences of a tenant are counted wrongly"
        groups = Counter(seq.group for seq in self.sequences if seq.group is not None)
        assert groups.total() == self._num_grouped
        assert all(group.num_running == count for group, count in groups.items())
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
        pool, max_growth = self._kv_cache.pool, self._kv_cache.max_growth
        spare_blocks: float = pool.available_blocks - self._kv_cache.blocks_needed(seq)
        if not self.sequences:
            return spare_blocks >= 0
        spare_blocks -= self._watermark * pool.num_blocks
        fraction = self.output_estimator.fraction
        if spare_blocks >= fraction * max_growth([seq, *self.sequences]):
            return True
        return spare_blocks >= fraction * max_growth([seq]) and self._find_yielding(seq) is not None
