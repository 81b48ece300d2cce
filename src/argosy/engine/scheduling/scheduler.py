"""Continuous batching: each step gives some sequences some new tokens, under one token budget.

`schedule` says what the next step computes, `commit` takes in what it gave. Steps may overlap:
`schedule` can be called again before `commit`, and results are committed in the order planned.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from argosy.engine.scheduling.admission import Batching, Continuous, OutputEstimate
from argosy.engine.scheduling.memory import Memory
from argosy.engine.scheduling.plan import Admission, Plan, StepResult
from argosy.engine.scheduling.queue import FairQueue
from argosy.engine.scheduling.register import Register
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.policy import TenantShares

if TYPE_CHECKING:
    from argosy.protocol import SamplingParams

Finish = Literal["stop", "length", "timeout", "cancelled", "error"]
_BY_ORDER = attrgetter("order")
AGEING_TOKENS_PER_S = 256.0
"""A waiting prefill counts as this much shorter for each second since it arrived, so none starves."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes the scheduler keeps to."""

    max_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    host_blocks: int = 0
    prefill_share: float = 0.5
    watermark: float = 0.01
    prefix_cache: bool = True


class Progress(NamedTuple):
    """What a committed step means for one sequence of it."""

    seq: Sequence
    chunk: int
    """Index into the plan."""
    token: int
    """The new token; -1 when there is none."""
    finish: Finish | None


class Scheduler:
    """Decides, step by step. Pure: the time is an argument, equal calls give equal plans."""

    def __init__(self, limits: Limits, batching: Batching | None = None) -> None:
        self.limits = limits
        self.shares = TenantShares()
        self.memory = Memory(
            num_blocks=limits.num_blocks,
            host_blocks=limits.host_blocks,
            block_size=limits.block_size,
            prefix_cache=limits.prefix_cache,
        )
        self.estimate = OutputEstimate()
        self.running: list[Sequence] = []
        """Most important first."""
        self.queue = FairQueue()
        self.preemptions = 0
        self.step_tokens = limits.max_step_tokens
        """The token budget in force; `shrink` lowers it."""
        self._batching = batching or Continuous()
        self.requests = Register()
        """All that have not ended: running, waiting, held."""
        self._rows = list(range(limits.max_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[Plan, list[Sequence]]] = deque()
        self._step = 0
        """The last step planned."""
        self._admissions = 0

    # -- requests come and go ---------------------------------------------------------------

    def add(
        self,
        *,
        id: str,  # noqa: A002 - the field's name
        prompt: list[int],
        params: SamplingParams,
        now: float,
        output: list[int] | None = None,
        stops: frozenset[int] = frozenset(),
        domain: str = "",
        tenant: str = "",
        tier: int = 1,
        weight: float = 1.0,
        timeout_s: float = float("inf"),
        lead: str | None = None,
    ) -> Sequence:
        """Line up a sequence. It must fit the pool by itself, and its id must not be in use."""
        seq = Sequence(
            id=id,
            prompt=prompt,
            output=output or [],
            params=params,
            stops=stops,
            domain=domain,
            tier=tier,
            account=self.shares.enter(tenant, weight),
            arrival=now,
            deadline=now + timeout_s,
            lead=self.requests.get(lead),
        )
        if self.requests.enter(seq):
            self.queue.push(seq)
        return seq

    def cancel(self, request_id: str) -> Sequence | None:
        """End a request wherever it is; None when it has ended already."""
        seq = self.requests.get(request_id)
        if seq is not None:
            self._end(seq)
        return seq

    def expire(self, now: float) -> list[Sequence]:
        """End the requests whose deadline has passed."""
        expired = self.requests.expired(now)
        for seq in expired:
            self._end(seq)
        return expired

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return len(self.requests) > 0

    @property
    def waiting(self) -> int:
        """Requests that have not ended and do not run."""
        return len(self.requests) - len(self.running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed: of those who queue, and of running prefills."""
        left = (seq.length - seq.computed for seq in self.running)
        return sum(seq.length for seq in self.queue) + sum(count for count in left if count > 1)

    # -- the step ---------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan:
        """Plan a step: running decodes first, then running prefills, then the queue."""
        plan = Plan(self._step + 1)
        rows, starts = plan.rows, plan.starts
        seqs: list[Sequence] = []
        prefills: list[Sequence] = []
        self._displace(now)
        for seq in tuple(self.running):
            start, length = seq.computed, seq.length
            if length - start != 1:
                prefills.append(seq)
                continue
            if length >= seq.limit and length > len(seq.tokens):
                continue  # its last token is being sampled by a step in flight
            if start == seq.capacity and not self._grow(seq, plan):
                continue
            rows.append(seq.row)
            starts.append(start)
            seqs.append(seq)
            seq.computed = length
            seq.length = length + 1
            seq.account.served += seq.decode_price
        decodes = len(seqs)
        plan.counts.extend([1] * decodes)
        plan.samples.extend([True] * decodes)
        budget = self.step_tokens - decodes
        if decodes:
            budget = min(budget, 1 + int(self.step_tokens * self.limits.prefill_share))
        prefills = [seq for seq in prefills if seq.row >= 0 and seq.length > seq.computed]
        backlog = sum(seq.length - seq.computed for seq in prefills)
        while backlog < budget or len(prefills) < self._batching.partial_prefills:
            admitted = self._admit(plan, now)
            if admitted is None:
                break
            prefills.append(admitted)
            backlog += admitted.length - admitted.computed
        for seq in sorted(prefills, key=partial(_urgency, now=now)):
            budget -= self._prefill(seq, budget, plan, seqs)
        self._in_flight.append((plan, seqs))
        self._step = plan.step
        return plan

    def commit(self, result: StepResult) -> list[Progress]:
        """Take in the oldest step in flight. Sequences that ended meanwhile are passed over."""
        plan, seqs = self._in_flight.popleft()
        step, tokens, samples, starts = plan.step, result.tokens, plan.samples, plan.starts
        for seq in self.memory.settle(step, result.corrupt):
            if seq.void < step:
                self._preempt(seq)
        progress: list[Progress] = []
        for chunk, seq in enumerate(seqs):
            if step <= seq.void:
                continue
            if chunk in result.failed:
                self._end(seq)
                progress.append(Progress(seq, chunk, -1, "error"))
                continue
            end = starts[chunk] + plan.counts[chunk]
            if end >= seq.publish_at:
                self.memory.publish(seq, end)
            token = tokens[chunk]
            finish: Finish | None = None
            if samples[chunk]:
                seq.tokens.append(token)
                if not seq.prefilled:
                    self._prefilled(seq)
                if token in seq.stops:
                    finish = "stop"
                elif len(seq.tokens) >= seq.limit:
                    finish = "length"
                if finish is not None:
                    if len(seq.tokens) > seq.limit:  # nothing was to be generated (max_tokens 0)
                        seq.tokens.pop()
                        token = -1
                    self.estimate.ended(seq.output_len, seq.params.max_tokens)
                    self._end(seq)
            progress.append(Progress(seq, chunk, token, finish))
        self._wake()
        return progress

    def fail(self) -> list[Sequence]:
        """A step raised. Everything that ran starts over; a sequence that was alone in its step ends.

        The others of that step are suspects: each runs alone until it has shown itself innocent.
        Returns the sequences that ended.
        """
        culprits = [seq for seq in self._in_flight[0][1] if seq.row >= 0]
        for seq in culprits:
            seq.suspect = True
        ended = culprits if len(culprits) == 1 else []
        for seq in ended:
            self._end(seq)
        for seq in tuple(self.running):
            self._preempt(seq)
        for plan, _ in self._in_flight:
            self.memory.settle(plan.step, [])
        self._in_flight.clear()
        return ended

    def shrink(self) -> None:
        """Memory ran out in a step: halve the token budget (never below one token a sequence)."""
        self.step_tokens = max(self.limits.max_seqs, self.step_tokens // 2)

    def check(self) -> None:
        """Assert the invariants between steps. Raises AssertionError."""
        holders = self.running
        self.memory.check(holders)
        rows = [seq.row for seq in holders]
        assert sorted(rows + self._rows) == list(range(self.limits.max_seqs)), "a row leaked"
        at_rest = [*self.queue, *self.requests.held]
        everyone = [*holders, *at_rest]
        assert len(everyone) == len(self.requests), "a request is in two places or in none"
        assert set(everyone) == set(self.requests), "a request was lost"
        assert holders == sorted(holders, key=_BY_ORDER), "running sequences are out of order"
        for seq in holders:
            assert 0 <= seq.computed <= seq.capacity, "computed tokens without a block"
        assert all(not seq.blocks and seq.row < 0 for seq in at_rest), "blocks at rest"

    # -- joining and leaving the batch ------------------------------------------------------

    def _prefill(self, seq: Sequence, budget: int, plan: Plan, seqs: list[Sequence]) -> int:
        """Give `seq` up to `budget` of its remaining tokens; returns how many."""
        count = min(seq.length - seq.computed, budget)
        if count <= 0:
            return 0
        plan.rows.append(seq.row)
        plan.starts.append(seq.computed)
        plan.counts.append(count)
        seqs.append(seq)
        seq.computed += count
        complete = seq.computed == seq.length
        plan.samples.append(complete)
        seq.length += complete
        seq.account.served += count * seq.prefill_price
        return count

    def _grow(self, seq: Sequence, plan: Plan) -> bool:
        """Give a running sequence its next block, taken from the least important one if need be."""
        if seq.row < 0:
            return False  # preempted a moment ago, for a more important one
        while not self.memory.available:
            victim = self.running[-1]
            self._preempt(victim)
            self.estimate.shortage()
            if victim is seq:
                return False
        block = self.memory.take(plan)
        plan.placed.append((seq.row, len(seq.blocks), block))
        seq.blocks.append(block)
        seq.capacity += self.limits.block_size
        return True

    def _displace(self, now: float) -> None:
        """Make room for the head of the queue at the cost of lower tiers, if that is what it takes."""
        head = self.queue.head()
        if head is None or not self.running or self.running[-1].tier <= head.tier:
            return
        if self.memory.awaited(head) is not None:
            return
        lower = [seq for seq in self.running if seq.tier > head.tier]
        gain = sum(len(seq.blocks) for seq in lower)
        if not self._may_join(head, now) or self.memory.cost(head) > self.memory.available + gain:
            return
        while lower and not (self._rows and self._fits(head)):
            self._preempt(lower.pop())

    def _may_join(self, seq: Sequence, now: float) -> bool:
        """Whether the batching mode, and the isolation of suspects, let it join now."""
        if seq.suspect or (self.running and self.running[0].suspect):
            return not self.running
        return self._batching.open(
            running=len(self.running),
            generating=sum(other.prefilled for other in self.running),
            waiting=len(self.queue),
            waited_s=now - seq.arrival,
        )

    def _fits(self, seq: Sequence) -> bool:
        """Whether there are blocks for it and for what running sequences will probably still need."""
        spare = self.memory.available - self.memory.cost(seq)
        if not self.running:
            return spare >= 0
        promised = seq.limit - seq.length + sum(s.limit - s.length for s in self.running)
        growth = self.estimate.share * promised / self.limits.block_size
        return spare >= growth + self.limits.watermark * self.limits.num_blocks

    def _admit(self, plan: Plan, now: float) -> Sequence | None:
        """Let the head of the queue join the batch; None when it cannot."""
        while (seq := self.queue.head()) is not None:
            if not self._rows or not self._may_join(seq, now):
                return None
            block = self.memory.awaited(seq)
            if block is None:
                break
            self.queue.remove(seq)
            self.requests.hold(seq, block)
        if seq is None or not self._fits(seq):
            return None
        self.queue.remove(seq)
        seq.row = self._rows.pop()
        if seq.scheduled_at is None:
            seq.scheduled_at = now
            self._admissions += 1
            seq.order = (seq.tier, self._admissions)
        self.memory.place(seq, plan)
        plan.admitted.append(
            Admission(seq.row, list(seq.tokens), seq.prompt_len, seq.params, list(seq.blocks))
        )
        insort(self.running, seq, key=_BY_ORDER)
        return seq

    def _prefilled(self, seq: Sequence) -> None:
        """Its first token since it joined: siblings may fork, and it is no suspect any more."""
        seq.prefilled = True
        seq.suspect = False
        for sibling in self.requests.release(seq):
            self.queue.push(sibling)

    def _wake(self) -> None:
        """Those who waited for a block that is there now, or will not come, queue up again."""
        for block in self.memory.underway.settled():
            for seq in self.requests.release(block):
                self.queue.push(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Finish and resubmit: it keeps its tokens and its place, and gives back all else."""
        self._leave(seq)
        seq.length = len(seq.tokens)
        seq.void = self._step
        seq.preemptions += 1
        self.preemptions += 1
        self.queue.push(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._rows.append(seq.row)
        seq.row = -1
        seq.prefilled = False
        self.memory.release(seq)
        self._wake()

    def _end(self, seq: Sequence) -> None:
        """The request is over, wherever it was."""
        if seq.row >= 0:
            self._leave(seq)
        elif seq.awaits is None:
            self.queue.remove(seq)
        seq.void = NEVER
        self.requests.leave(seq)
        self.shares.leave(seq.account)
        for sibling in self.requests.release(seq):
            self.queue.push(sibling)


def _urgency(seq: Sequence, now: float) -> float:
    """Shortest remaining prefill first, each second of waiting making one seem shorter."""
    return seq.length - seq.computed - AGEING_TOKENS_PER_S * (now - seq.arrival)
