"""Continuous batching: each step gives some sequences some new tokens, under one token budget.

`schedule` says what the next step computes, `commit` takes in what it gave. Steps may overlap:
`schedule` can be called again before `commit`, and results are committed in the order planned.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from argosy.engine.scheduling.batching_policy import BatchingPolicy, ContinuousBatching
from argosy.engine.scheduling.kv_cache_manager import KvCacheManager
from argosy.engine.scheduling.request_registry import RequestRegistry
from argosy.engine.scheduling.running_batch import RunningBatch
from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.engine.scheduling.step_plan import StepPlan, StepResult
from argosy.engine.scheduling.ttft_guard import TtftGuard
from argosy.engine.scheduling.waiting_queue import WaitingQueue
from argosy.policy import VirtualTokenCounters

if TYPE_CHECKING:
    from argosy.protocol import SamplingParams

SequenceFinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]
AGEING_TOKENS_PER_S = 256.0
"""A waiting prefill counts as this much shorter for each second since it arrived, so none starves."""
TIER_PENALTY_TOKENS = 4096.0
"""And as this much longer for each tier below the highest."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The sizes the scheduler keeps to."""

    max_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    max_prefill_fraction: float
    """Most of the step's tokens that prefills may take while decodes run."""
    watermark: float
    """Part of the blocks kept free for running sequences to grow into."""
    prefix_cache: bool
    ridge_tokens: int
    """Computing so many takes as long as reading the weights."""
    host_blocks: int = 0


class SequenceUpdate(NamedTuple):
    """What a committed step means for one sequence of it."""

    seq: Sequence
    chunk_index: int
    """Index into the plan."""
    token: int
    """The new token; -1 when there is none."""
    finish_reason: SequenceFinishReason | None


class Scheduler:
    """Decides, step by step. Pure: the time is an argument, equal calls give equal plans."""

    def __init__(
        self, limits: SchedulerLimits, batching_policy: BatchingPolicy | None = None
    ) -> None:
        batching_policy = batching_policy or ContinuousBatching()
        self.limits = limits
        self.token_counters = VirtualTokenCounters()
        self.kv_cache = KvCacheManager(
            num_blocks=limits.num_blocks,
            host_blocks=limits.host_blocks,
            block_size=limits.block_size,
            prefix_cache=limits.prefix_cache,
        )
        self.queue = WaitingQueue()
        self.requests = RequestRegistry()
        """All that have not ended: running, waiting, held."""
        self._batch = RunningBatch(
            max_seqs=limits.max_seqs,
            watermark=limits.watermark,
            batching_policy=batching_policy,
            kv_cache=self.kv_cache,
            queue=self.queue,
            requests=self.requests,
        )
        self.running = self._batch.sequences
        """Most important first."""
        self.output_estimator = self._batch.output_estimator
        self.token_budget = limits.max_step_tokens
        """The token budget in force; `shrink` lowers it."""
        self._max_partial_prefills = batching_policy.max_partial_prefills
        self._ttft_guard = TtftGuard(limits.ridge_tokens)
        self._steps_in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()

    # -- requests come and go ---------------------------------------------------------------

    def add(
        self,
        *,
        id: str,  # noqa: A002 - the field's name
        prompt: list[int],
        params: SamplingParams,
        now: float,
        output: list[int] | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        cache_domain: str = "",
        tenant: str = "",
        tier: int = 1,
        weight: float = 1.0,
        timeout_s: float = float("inf"),
        parent_id: str | None = None,
    ) -> Sequence:
        """Line up a sequence. It must fit the pool by itself, and its id must not be in use."""
        seq = Sequence(
            id=id,
            prompt=prompt,
            output=output or [],
            params=params,
            stop_token_ids=stop_token_ids,
            cache_domain=cache_domain,
            tier=tier,
            tenant_counter=self.token_counters.add_request(tenant, weight),
            arrived_at=now,
            deadline=now + timeout_s,
            parent=self.requests.get(parent_id),
        )
        if self.requests.add(seq):
            self.queue.push(seq)
        return seq

    def cancel(self, request_id: str) -> Sequence | None:
        """End a request wherever it is; None when it has ended already."""
        seq = self.requests.get(request_id)
        if seq is not None:
            self._end_request(seq)
        return seq

    def expire(self, now: float) -> list[Sequence]:
        """End the requests whose deadline has passed."""
        expired = self.requests.pop_expired(now)
        for seq in expired:
            self._end_request(seq)
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
        return self._batch.preemptions

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed: of those who queue, and of running prefills."""
        left = (seq.length - seq.computed_len for seq in self.running)
        return sum(seq.length for seq in self.queue) + sum(count for count in left if count > 1)

    # -- the step ---------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan a step: running decodes first, then running prefills, then the queue."""
        running = self._batch
        plan = StepPlan(running.last_planned_step + 1)
        rows, starts = plan.rows, plan.starts
        seqs: list[Sequence] = []
        prefills: list[Sequence] = []
        most = 1 + int(self.token_budget * self.limits.max_prefill_fraction)
        newcomer = running.make_room(now)
        lowest = self._ttft_guard.lowest_admitted_tier(self.running, newcomer, most)
        for seq in running.sequences_from_tier(lowest):
            start, length = seq.computed_len, seq.length
            if length - start != 1:
                prefills.append(seq)
                continue
            if length >= seq.max_length and length > len(seq.tokens):
                continue  # its last token is being sampled by a step in flight
            if start == seq.capacity and not running.append_block(seq, plan):
                continue
            rows.append(seq.row)
            starts.append(start)
            seqs.append(seq)
            seq.computed_len = length
            seq.length = length + 1
            seq.tenant_counter.served_tokens += seq.decode_cost
        decodes = len(seqs)
        plan.counts.extend([1] * decodes)
        plan.sample_flags.extend([True] * decodes)
        budget = self.token_budget - decodes
        if decodes or lowest != NEVER:
            budget = min(budget, most)
        prefills = [seq for seq in prefills if seq.row >= 0 and seq.length > seq.computed_len]
        backlog = sum(seq.length - seq.computed_len for seq in prefills)
        while backlog < budget or len(prefills) < self._max_partial_prefills:
            admitted = running.admit_next(plan, now, lowest)
            if admitted is None:
                break
            prefills.append(admitted)
            backlog += admitted.length - admitted.computed_len
        for seq in sorted(prefills, key=partial(_prefill_order, now=now)):
            budget -= self._plan_prefill(seq, budget, plan, seqs)
        self._steps_in_flight.append((plan, seqs))
        running.last_planned_step = plan.step
        return plan

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Take in the oldest step in flight. Sequences that ended meanwhile are passed over."""
        plan, seqs = self._steps_in_flight.popleft()
        step, tokens, samples, starts = plan.step, result.tokens, plan.sample_flags, plan.starts
        for seq in self.kv_cache.complete_restores(step, result.corrupt_blocks):
            if seq.stale_until_step < step:
                self._batch.preempt(seq)
        progress: list[SequenceUpdate] = []
        for chunk, seq in enumerate(seqs):
            if step <= seq.stale_until_step:
                continue
            if chunk in result.failures:
                self._end_request(seq)
                progress.append(SequenceUpdate(seq, chunk, -1, "error"))
                continue
            end = starts[chunk] + plan.counts[chunk]
            if end >= seq.next_publish_length:
                self.kv_cache.publish_blocks(seq, end)
            token = tokens[chunk]
            finish: SequenceFinishReason | None = None
            if samples[chunk]:
                seq.tokens.append(token)
                if not seq.is_prefilled:
                    self._on_first_token(seq)
                if token in seq.stop_token_ids:
                    finish = "stop"
                elif len(seq.tokens) >= seq.max_length:
                    finish = "length"
                if finish is not None:
                    if (
                        len(seq.tokens) > seq.max_length
                    ):  # nothing was to be generated (max_tokens 0)
                        seq.tokens.pop()
                        token = -1
                    self.output_estimator.record_end(seq.output_len, seq.params.max_tokens)
                    self._end_request(seq)
            progress.append(SequenceUpdate(seq, chunk, token, finish))
        self._batch.requeue_unblocked()
        return progress

    def recover_failed_step(self) -> list[Sequence]:
        """A step raised. Everything that ran starts over; a sequence that was alone in its step ends.

        The others of that step are suspects: each runs alone until it has shown itself innocent.
        Returns the sequences that ended.
        """
        culprits = [seq for seq in self._steps_in_flight[0][1] if seq.row >= 0]
        for seq in culprits:
            seq.is_suspect = True
        ended = culprits if len(culprits) == 1 else []
        for seq in ended:
            self._end_request(seq)
        for seq in tuple(self.running):
            self._batch.preempt(seq)
        for plan, _ in self._steps_in_flight:
            self.kv_cache.complete_restores(plan.step, [])
        self._steps_in_flight.clear()
        return ended

    def halve_token_budget(self) -> None:
        """Memory ran out in a step: halve the token budget (never below one token a sequence)."""
        self.token_budget = max(self.limits.max_seqs, self.token_budget // 2)

    def check_invariants(self) -> None:
        """Assert the invariants between steps. Raises AssertionError."""
        holders = self.running
        self.kv_cache.check_invariants(holders)
        self._batch.check_invariants()
        at_rest = [*self.queue, *self.requests.blocked_requests]
        everyone = [*holders, *at_rest]
        assert len(everyone) == len(self.requests), "a request is in two places or in none"
        assert set(everyone) == set(self.requests), "a request was lost"
        assert all(not seq.blocks and seq.row < 0 for seq in at_rest), "blocks at rest"

    def _plan_prefill(
        self, seq: Sequence, budget: int, plan: StepPlan, seqs: list[Sequence]
    ) -> int:
        """Give `seq` up to `budget` of its remaining tokens; returns how many."""
        count = min(seq.length - seq.computed_len, budget)
        if count <= 0:
            return 0
        plan.rows.append(seq.row)
        plan.starts.append(seq.computed_len)
        plan.counts.append(count)
        seqs.append(seq)
        seq.computed_len += count
        complete = seq.computed_len == seq.length
        plan.sample_flags.append(complete)
        seq.length += complete
        seq.tenant_counter.served_tokens += count * seq.prefill_cost
        return count

    def _on_first_token(self, seq: Sequence) -> None:
        """Its first token since it joined: siblings may fork, and it is no suspect any more."""
        seq.is_prefilled = True
        seq.is_suspect = False
        for sibling in self.requests.unblock(seq):
            self.queue.push(sibling)

    def _end_request(self, seq: Sequence) -> None:
        """The request is over, wherever it was."""
        if seq.row >= 0:
            self._batch.remove(seq)
        elif seq.blocked_on is None:
            self.queue.remove(seq)
        seq.stale_until_step = NEVER
        self.requests.remove(seq)
        self.token_counters.remove_request(seq.tenant_counter)
        for sibling in self.requests.unblock(seq):
            self.queue.push(sibling)


def _prefill_order(seq: Sequence, now: float) -> float:
    """Higher tiers first, then the shortest remaining prefill, each second of waiting making one seem shorter."""
    lacking = seq.length - seq.computed_len + TIER_PENALTY_TOKENS * seq.tier
    return lacking - AGEING_TOKENS_PER_S * (now - seq.arrived_at)
