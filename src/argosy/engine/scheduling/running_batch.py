"""The sequences that run: who may join them, who gets a block, and who has to leave for whom."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from argosy.engine.scheduling.batching_policy import Batching, OutputEstimate
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.step_plan import Admission, Plan
from argosy.engine.scheduling.ttft_guard import Newcomer

if TYPE_CHECKING:
    from argosy.engine.scheduling.kv_cache_manager import Memory
    from argosy.engine.scheduling.request_registry import Register
    from argosy.engine.scheduling.waiting_queue import FairQueue

_order = attrgetter("order")
_tier = attrgetter("tier")


class Running:
    """Gives sequences their rows, and takes them back."""

    def __init__(
        self,
        *,
        max_seqs: int,
        watermark: float,
        batching: Batching,
        memory: Memory,
        queue: FairQueue,
        requests: Register,
    ) -> None:
        self.sequences: list[Sequence] = []
        """Most important first."""
        self.estimate = OutputEstimate()
        self.preemptions = 0
        self.step = 0
        """The last step planned: its results, and earlier ones, do not concern who leaves now."""
        self._max_seqs = max_seqs
        self._watermark = watermark
        self._batching = batching
        self._memory = memory
        self._queue = queue
        self._requests = requests
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._admissions = 0

    def down_to(self, tier: int) -> tuple[Sequence, ...]:
        """Those of this tier and higher ones."""
        if tier == NEVER:
            return tuple(self.sequences)
        return tuple(self.sequences[: bisect_right(self.sequences, tier, key=_tier)])

    def displace(self, now: float) -> Newcomer | None:
        """Make room for the head of the queue at the cost of lower tiers, if that is what it takes.

        Returns it when there is room now, and somebody of a lower tier runs.
        """
        head = self._queue.head()
        if head is None or not self.sequences or self.sequences[-1].tier <= head.tier:
            return None
        if self._memory.awaited(head) is not None:
            return None
        lower = [seq for seq in self.sequences if seq.tier > head.tier]
        gain = sum(len(seq.blocks) for seq in lower)
        if not self._may_join(head, now) or self._memory.cost(head) > self._memory.available + gain:
            return None
        while not (room := bool(self._rows) and self._fits(head)) and lower:
            self.preempt(lower.pop())
        return Newcomer(head.tier, self._memory.lacking(head)) if room and lower else None

    def admit(self, plan: Plan, now: float, lowest: int) -> Sequence | None:
        """Let the head of the queue join, if it is of tier `lowest` or above; None when it cannot."""
        while (seq := self._queue.head()) is not None:
            if seq.tier > lowest or not self._rows or not self._may_join(seq, now):
                return None
            block = self._memory.awaited(seq)
            if block is None:
                break
            self._queue.remove(seq)
            self._requests.hold(seq, block)
        if seq is None or not self._fits(seq):
            return None
        self._queue.remove(seq)
        seq.row = self._rows.pop()
        if seq.scheduled_at is None:
            seq.scheduled_at = now
            self._admissions += 1
            seq.order = (seq.tier, self._admissions)
        self._memory.place(seq, plan)
        plan.admitted.append(
            Admission(seq.row, list(seq.tokens), seq.prompt_len, seq.params, list(seq.blocks))
        )
        insort(self.sequences, seq, key=_order)
        return seq

    def grow(self, seq: Sequence, plan: Plan) -> bool:
        """Give a running sequence its next block, taken from the least important one if need be."""
        if seq.row < 0:
            return False  # preempted a moment ago, for a more important one
        while not self._memory.available:
            victim = self.sequences[-1]
            self.preempt(victim)
            self.estimate.shortage()
            if victim is seq:
                return False
        block = self._memory.take(plan)
        plan.placed.append((seq.row, len(seq.blocks), block))
        seq.blocks.append(block)
        seq.capacity += self._memory.block_size
        return True

    def preempt(self, seq: Sequence) -> None:
        """Finish and resubmit: it keeps its tokens and its place, and gives back all else."""
        self.leave(seq)
        seq.length = len(seq.tokens)
        seq.void = self.step
        seq.preemptions += 1
        self.preemptions += 1
        self._queue.push(seq)

    def leave(self, seq: Sequence) -> None:
        """It gives its row and its blocks back."""
        self.sequences.remove(seq)
        self._rows.append(seq.row)
        seq.row = -1
        seq.prefilled = False
        self._memory.release(seq)
        self.wake()

    def wake(self) -> None:
        """Those who waited for a block that is there now, or will not come, queue up again."""
        for block in self._memory.underway.settled():
            for seq in self._requests.release(block):
                self._queue.push(seq)

    def check(self) -> None:
        """Assert the invariants between steps. Raises AssertionError."""
        rows = [seq.row for seq in self.sequences]
        assert sorted(rows + self._rows) == list(range(self._max_seqs)), "a row leaked"
        assert self.sequences == sorted(self.sequences, key=_order), "they are out of order"
        for seq in self.sequences:
            assert 0 <= seq.computed <= seq.capacity, "computed tokens without a block"

    def _may_join(self, seq: Sequence, now: float) -> bool:
        """Whether the batching mode, and the isolation of suspects, let it join now."""
        running = self.sequences
        if seq.suspect or (running and running[0].suspect):
            return not running
        return self._batching.open(
            running=len(running),
            generating=sum(other.prefilled for other in running),
            waiting=len(self._queue),
            waited_s=now - seq.arrival,
        )

    def _fits(self, seq: Sequence) -> bool:
        """Whether there are blocks for it and for what running sequences will probably still need."""
        spare = self._memory.available - self._memory.cost(seq)
        if not self.sequences:
            return spare >= 0
        promised = seq.limit - seq.length + sum(s.limit - s.length for s in self.sequences)
        growth = self.estimate.share * promised / self._memory.block_size
        return spare >= growth + self._watermark * self._memory.pool.num_blocks
