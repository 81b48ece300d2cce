"""Continuous batching: each step gives some sequences some new tokens, under one token budget.

`schedule` says what the next step computes, `commit` takes in what it gave. Steps may overlap:
`schedule` can be called again before `commit`, and results are committed in the order planned.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from argosy.engine.scheduling.batching_policy import Batching, Continuous
from argosy.engine.scheduling.kv_cache_manager import Memory
from argosy.engine.scheduling.request_registry import Register
from argosy.engine.scheduling.running_batch import Running
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.step_plan import Plan, StepResult
from argosy.engine.scheduling.ttft_guard import FirstTokens
from argosy.engine.scheduling.waiting_queue import FairQueue
from argosy.policy import TenantShares

if TYPE_CHECKING:
    from argosy.protocol import SamplingParams

Finish = Literal["stop", "length", "timeout", "cancelled", "error"]
AGEING_TOKENS_PER_S = 256.0
"""A waiting prefill counts as this much shorter for each second since it arrived, so none starves."""
TIER_TOKENS = 4096.0
"""And as this much longer for each tier below the highest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes the scheduler keeps to."""

    max_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    prefill_share: float
    """Most of the step's tokens that prefills may take while decodes run."""
    watermark: float
    """Part of the blocks kept free for running sequences to grow into."""
    prefix_cache: bool
    ridge_tokens: int
    """Computing so many takes as long as reading the weights."""
    host_blocks: int = 0


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
        batching = batching or Continuous()
        self.limits = limits
        self.shares = TenantShares()
        self.memory = Memory(
            num_blocks=limits.num_blocks,
            host_blocks=limits.host_blocks,
            block_size=limits.block_size,
            prefix_cache=limits.prefix_cache,
        )
        self.queue = FairQueue()
        self.requests = Register()
        """All that have not ended: running, waiting, held."""
        self._running = Running(
            max_seqs=limits.max_seqs,
            watermark=limits.watermark,
            batching=batching,
            memory=self.memory,
            queue=self.queue,
            requests=self.requests,
        )
        self.running = self._running.sequences
        """Most important first."""
        self.estimate = self._running.estimate
        self.step_tokens = limits.max_step_tokens
        """The token budget in force; `shrink` lowers it."""
        self._partial_prefills = batching.partial_prefills
        self._first_tokens = FirstTokens(limits.ridge_tokens)
        self._in_flight: deque[tuple[Plan, list[Sequence]]] = deque()

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
    def preemptions(self) -> int:
        """How often a running sequence was put back."""
        return self._running.preemptions

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed: of those who queue, and of running prefills."""
        left = (seq.length - seq.computed for seq in self.running)
        return sum(seq.length for seq in self.queue) + sum(count for count in left if count > 1)

    # -- the step ---------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan:
        """Plan a step: running decodes first, then running prefills, then the queue."""
        running = self._running
        plan = Plan(running.step + 1)
        rows, starts = plan.rows, plan.starts
        seqs: list[Sequence] = []
        prefills: list[Sequence] = []
        most = 1 + int(self.step_tokens * self.limits.prefill_share)
        newcomer = running.displace(now)
        lowest = self._first_tokens.lowest_tier(self.running, newcomer, most)
        for seq in running.down_to(lowest):
            start, length = seq.computed, seq.length
            if length - start != 1:
                prefills.append(seq)
                continue
            if length >= seq.limit and length > len(seq.tokens):
                continue  # its last token is being sampled by a step in flight
            if start == seq.capacity and not running.grow(seq, plan):
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
        if decodes or lowest != NEVER:
            budget = min(budget, most)
        prefills = [seq for seq in prefills if seq.row >= 0 and seq.length > seq.computed]
        backlog = sum(seq.length - seq.computed for seq in prefills)
        while backlog < budget or len(prefills) < self._partial_prefills:
            admitted = running.admit(plan, now, lowest)
            if admitted is None:
                break
            prefills.append(admitted)
            backlog += admitted.length - admitted.computed
        for seq in sorted(prefills, key=partial(_urgency, now=now)):
            budget -= self._prefill(seq, budget, plan, seqs)
        self._in_flight.append((plan, seqs))
        running.step = plan.step
        return plan

    def commit(self, result: StepResult) -> list[Progress]:
        """Take in the oldest step in flight. Sequences that ended meanwhile are passed over."""
        plan, seqs = self._in_flight.popleft()
        step, tokens, samples, starts = plan.step, result.tokens, plan.samples, plan.starts
        for seq in self.memory.settle(step, result.corrupt):
            if seq.void < step:
                self._running.preempt(seq)
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
        self._running.wake()
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
            self._running.preempt(seq)
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
        self._running.check()
        at_rest = [*self.queue, *self.requests.held]
        everyone = [*holders, *at_rest]
        assert len(everyone) == len(self.requests), "a request is in two places or in none"
        assert set(everyone) == set(self.requests), "a request was lost"
        assert all(not seq.blocks and seq.row < 0 for seq in at_rest), "blocks at rest"

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

    def _prefilled(self, seq: Sequence) -> None:
        """Its first token since it joined: siblings may fork, and it is no suspect any more."""
        seq.prefilled = True
        seq.suspect = False
        for sibling in self.requests.release(seq):
            self.queue.push(sibling)

    def _end(self, seq: Sequence) -> None:
        """The request is over, wherever it was."""
        if seq.row >= 0:
            self._running.leave(seq)
        elif seq.awaits is None:
            self.queue.remove(seq)
        seq.void = NEVER
        self.requests.leave(seq)
        self.shares.leave(seq.account)
        for sibling in self.requests.release(seq):
            self.queue.push(sibling)


def _urgency(seq: Sequence, now: float) -> float:
    """Higher tiers first, then the shortest remaining prefill, each second of waiting making one seem shorter."""
    lacking = seq.length - seq.computed + TIER_TOKENS * seq.tier
    return lacking - AGEING_TOKENS_PER_S * (now - seq.arrival)
