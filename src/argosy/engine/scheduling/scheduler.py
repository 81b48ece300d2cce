"""Scheduler with continuous batching, which divides one token budget per step among sequences.

`schedule` plans the next step, and `commit` applies its results. Steps may overlap. `schedule` can be called again
before `commit`, and results are committed in the order in which their steps were planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling.batching_policy import BatchingPolicy, ContinuousBatching
from argosy.engine.scheduling.block_pool import KvCacheGroups
from argosy.engine.scheduling.kv_cache_manager import KvCacheManager
from argosy.engine.scheduling.running_batch import RunningBatch
from argosy.engine.scheduling.sequence import NEVER, RequestRegistry, Sequence
from argosy.engine.scheduling.step_plan import StepPlan, StepResult
from argosy.engine.scheduling.token_budget import TokenBudget, TtftGuard
from argosy.engine.scheduling.waiting_queue import WaitingQueue
from argosy.policy import LOWEST_TIER, VirtualTokenCounters

SequenceFinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]
AGEING_TOKENS_PER_S = 256.0
"""Tokens by which a prefill counts as shorter for each second since its arrival, which prevents starvation."""
TIER_PENALTY_TOKENS = 4096.0
"""Tokens by which a prefill counts as longer for each tier below the highest."""
MAX_DRAFTED_STEP_TOKENS = 64
"""Maximum tokens of a step with drafts, which bounds the memory of its logits."""
DRAFTED_STEP_RIDGES = 2
"""Maximum tokens of a step with drafts, in times in which the weights are read."""
NO_DRAFTS: Mapping[Sequence, list[int]] = {}


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one scheduler and its executor."""

    max_seqs: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    max_prefill_fraction: float
    """Maximum fraction of the token budget for prefills while decodes run."""
    watermark: float
    """Fraction of the blocks that stays free for the growth of running sequences."""
    prefix_cache: bool
    ridge_tokens: int
    """Number of tokens whose computation takes as long as reading the weights."""
    host_blocks: int = 0
    kv_windows: tuple[int | None, ...] = (None,)
    """Sliding window of each KV cache group in tokens, longest first. Empty for a model without a KV cache."""
    state_snapshots: int | None = None
    """Number of snapshots of recurrent states. None for a model without recurrent layers."""
    is_chunked: bool = True
    """Whether a prompt may be divided among steps. Attention in both directions needs all of it in one step."""
    max_model_len: int = 0
    """Maximum tokens of one sequence, which is checked before a request is added. The executor has room for them."""

    @property
    def max_group_seqs(self) -> int:
        """Sequences of one request that may run while other requests of its tenant wait.

        A quarter of all, so that four requests run side by side. Smaller requests keep the order of their arrivals, in
        which the sequences of one prompt follow each other and share its blocks.
        """
        return max(1, self.max_seqs // 4)

    @property
    def kv_capacity_tokens(self) -> int:
        """Number of tokens that fit into the KV cache, if there is one, when all sequences have `max_model_len`."""
        if not self.kv_windows:
            return 0
        groups = KvCacheGroups(self.kv_windows, self.block_size)
        return self.num_blocks * self.max_model_len // groups.count_blocks(self.max_model_len)


class SequenceUpdate(NamedTuple):
    """Effect of a committed step on one of its sequences."""

    seq: Sequence
    chunk_index: int
    """Index of the sequence's chunk in the plan."""
    tokens: list[int]
    """New tokens. Empty if the step sampled none for this sequence."""
    finish_reason: SequenceFinishReason | None


class Scheduler:
    """Scheduler of one engine. Deterministic, because the time is an argument, so equal calls give equal plans."""

    def __init__(
        self, limits: SchedulerLimits, batching_policy: BatchingPolicy | None = None
    ) -> None:
        batching_policy = batching_policy or ContinuousBatching()
        self.limits = limits
        self.token_counters = VirtualTokenCounters()
        self.kv_cache = KvCacheManager(
            num_blocks=limits.num_blocks,
            host_blocks=limits.host_blocks,
            groups=KvCacheGroups(limits.kv_windows, limits.block_size),
            prefix_cache=limits.prefix_cache,
            state_snapshots=limits.state_snapshots,
        )
        self.queue = WaitingQueue(limits.max_group_seqs)
        self.requests = RequestRegistry()
        """All unfinished requests, whether they run, wait or are blocked."""
        self._batch = RunningBatch(
            max_seqs=limits.max_seqs,
            max_group_seqs=limits.max_group_seqs,
            watermark=limits.watermark,
            batching_policy=batching_policy,
            kv_cache=self.kv_cache,
            queue=self.queue,
            requests=self.requests,
        )
        self.running = self._batch.sequences
        """Running sequences by tier, then by admission."""
        self.output_estimator = self._batch.output_estimator
        self.token_budget = TokenBudget(limits.max_step_tokens)
        self._next_turn = 0
        """Index of the running sequence that is first in the next step that cannot include all of them."""
        self._max_partial_prefills = batching_policy.max_partial_prefills
        self._ttft_guard = TtftGuard(limits.ridge_tokens)
        self._max_drafted_tokens = min(
            MAX_DRAFTED_STEP_TOKENS, DRAFTED_STEP_RIDGES * limits.ridge_tokens
        )
        self._steps_in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()

    # -- requests ---------------------------------------------------------------------------

    def add(
        self,
        request: EngineRequest,
        *,
        now: float,
        timeout_s: float = float("inf"),
        stop_token_ids: frozenset[int] = frozenset(),
        adapter_slot: int = 0,
    ) -> Sequence:
        """Add a request and queue its sequence, which the executor computes with the adapter of a slot.

        The sequence must fit into the block pool by itself. Its id must not be in use. The request's own timeout and
        stop tokens do not apply, because only the core knows their defaults.
        """
        seq = Sequence(
            request,
            stop_token_ids=stop_token_ids,
            tenant_counter=self.token_counters.add_request(request.tenant, request.weight),
            arrived_at=now,
            deadline=now + timeout_s,
            parent=self.requests.get(request.parent_id),
            group=self.requests.find_group(request),
            adapter_slot=adapter_slot,
        )
        if self.requests.add(seq):
            self.queue.push(seq)
        return seq

    def cancel(self, request_id: str) -> Sequence | None:
        """End a running, waiting or blocked request. Returns None if it has already ended."""
        seq = self.requests.get(request_id)
        if seq is not None:
            self._end_request(seq)
        return seq

    def expire(self, now: float) -> list[Sequence]:
        """End and return the requests whose deadline has passed."""
        expired = self.requests.pop_expired(now)
        for seq in expired:
            self._end_request(seq)
        return expired

    @property
    def has_work(self) -> bool:
        """Whether an unfinished request exists."""
        return len(self.requests) > 0

    @property
    def waiting(self) -> int:
        """Number of unfinished requests that do not run."""
        return len(self.requests) - len(self.running)

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._batch.preemptions

    @property
    def queued_tokens(self) -> int:
        """Tokens that queued sequences and running prefills still have to compute."""
        remaining = (seq.length - seq.computed_len for seq in self.running)
        return sum(seq.length for seq in self.queue) + sum(
            count for count in remaining if count > 1
        )

    # -- steps ------------------------------------------------------------------------------

    def schedule(self, now: float, drafts: Mapping[Sequence, list[int]] = NO_DRAFTS) -> StepPlan:
        """Plan the next step. The token budget serves running decodes first, then running prefills, then the queue.

        What remains of it serves the drafts, of which a decode then computes some. A step with drafts must be committed
        before the next one is planned.
        """
        batch = self._batch
        plan = StepPlan(batch.last_planned_step + 1)
        rows, starts = plan.rows, plan.starts
        seqs: list[Sequence] = []
        prefills: list[Sequence] = []
        max_tokens = self.token_budget.tokens
        max_prefill_tokens = 1 + int(max_tokens * self.limits.max_prefill_fraction)
        candidate = batch.make_room(now)
        lowest_tier = self._ttft_guard.lowest_admitted_tier(
            self.running, candidate, max_prefill_tokens
        )
        for seq in self._select_sequences(batch.sequences_from_tier(lowest_tier), max_tokens):
            start, length = seq.computed_len, seq.length
            if length >= seq.max_length and length > len(seq.tokens):
                continue  # its last token is being sampled by a step in flight
            if start == seq.capacity and not batch.append_blocks(seq, plan):
                continue
            if length - start != 1:
                prefills.append(seq)
                continue
            rows.append(seq.row)
            starts.append(start)
            seqs.append(seq)
            seq.computed_len = length
            seq.length = length + 1
            seq.tenant_counter.served_tokens += seq.decode_cost
        num_decodes = len(seqs)
        plan.counts.extend([1] * num_decodes)
        plan.sample_counts.extend([1] * num_decodes)
        budget = max_tokens - num_decodes
        if num_decodes or lowest_tier != NEVER:
            budget = min(budget, max_prefill_tokens)
        prefills = [seq for seq in prefills if seq.row >= 0 and seq.length > seq.computed_len]
        prefill_tokens = sum(seq.length - seq.computed_len for seq in prefills)
        while prefill_tokens < budget or len(prefills) < self._max_partial_prefills:
            admitted = batch.admit_next(plan, now, lowest_tier)
            if admitted is None:
                break
            prefills.append(admitted)
            prefill_tokens += admitted.length - admitted.computed_len
        batch_budget = self._ttft_guard.max_batch_tokens(self.running)
        for seq in sorted(prefills, key=partial(_prefill_priority, now=now)):
            if seq.tier <= LOWEST_TIER or not self.limits.is_chunked:
                budget -= self._plan_prefill(seq, budget, plan, seqs)
            else:
                planned = self._plan_prefill(seq, min(budget, batch_budget), plan, seqs)
                budget, batch_budget = budget - planned, batch_budget - planned
        self.kv_cache.complete_plan(plan, seqs)
        if drafts and not self.token_budget.is_reduced:
            self._plan_drafts(drafts, plan, seqs[:num_decodes])
        self._steps_in_flight.append((plan, seqs))
        batch.last_planned_step = plan.step
        return plan

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Apply the results of the oldest step in flight. Sequences that ended meanwhile are skipped."""
        plan, seqs = self._steps_in_flight.popleft()
        if self.token_budget.is_reduced:
            self.token_budget.record_success()
        step, tokens, samples, starts = plan.step, result.tokens, plan.sample_counts, plan.starts
        for seq in self.kv_cache.complete_restores(step, result.corrupt_blocks):
            if seq.stale_until_step < step:
                self._batch.preempt(seq)
        updates: list[SequenceUpdate] = []
        for chunk, seq in enumerate(seqs):
            if step <= seq.stale_until_step:
                continue
            if chunk in result.failures:
                self._end_request(seq)
                updates.append(SequenceUpdate(seq, chunk, [], "error"))
                continue
            num_samples = samples[chunk]
            if num_samples > 1:
                updates.append(self._commit_window(seq, chunk, starts[chunk], result))
                continue
            end = starts[chunk] + plan.counts[chunk]
            if end >= seq.next_full_length:
                self.kv_cache.update_full_blocks(seq, end)
            finish: SequenceFinishReason | None = None
            if not num_samples:
                new_tokens = []
            else:
                token = tokens[chunk]
                seq.tokens.append(token)
                new_tokens = [token]
                if not seq.is_prefilled:
                    self._on_first_token(seq)
                if token in seq.stop_token_ids:
                    finish = "stop"
                elif len(seq.tokens) >= seq.max_length:
                    finish = "length"
                if finish is not None:
                    if len(seq.tokens) > seq.max_length:  # max_tokens is 0
                        seq.tokens.pop()
                        new_tokens = []
                    self._complete_request(seq)
            updates.append(SequenceUpdate(seq, chunk, new_tokens, finish))
        self._batch.requeue_unblocked()
        return updates

    def count_plain_decodes(self) -> int:
        """Return for how many steps each running sequence will decode one token while nothing else changes.

        A step that admits, preempts or ends a sequence is not among them, nor is one with a prefill or with drafts.
        Without an event from outside, `skip_decodes` may apply these steps at once, as simulations do.
        """
        running, cache, size = self.running, self.kv_cache, self.limits.block_size
        is_settled = not (self._steps_in_flight or self.waiting or self._batch.is_short)
        if not (running and is_settled) or cache.snapshots is not None:
            return 0
        if self.token_budget.is_reduced or len(running) > self.token_budget.tokens:
            return 0
        if not all(seq.is_prefilled and seq.length - seq.computed_len == 1 for seq in running):
            return 0
        steps = min(seq.max_length - seq.length for seq in running) - 1
        missing = (max(0, seq.computed_len + steps - seq.capacity) for seq in running)
        blocks = sum(-(-tokens // size) for tokens in missing) * len(self.limits.kv_windows)
        return max(0, steps) if blocks <= cache.pool.available_blocks else 0

    def skip_decodes(self, steps: int, token: int) -> None:
        """Apply `steps` steps, at most `count_plain_decodes`, in which each running sequence decodes `token`.

        The state is that after as many calls of `schedule` and `commit`, but for the numbers of new blocks.
        """
        plan = StepPlan(0)
        for seq in self.running:
            end = seq.computed_len = seq.computed_len + steps
            seq.length += steps
            seq.tokens += [token] * steps
            seq.tenant_counter.served_tokens += steps * seq.decode_cost
            self.kv_cache.extend_blocks(seq, end, plan)
            if end >= seq.next_full_length:
                self.kv_cache.update_full_blocks(seq, end)
        self._batch.skip_steps(steps)
        self._ttft_guard.skip_steps(steps)

    def recover_failed_step(self) -> list[Sequence]:
        """Roll back all steps in flight after the oldest of them raised.

        A sequence that was alone in the failed step ends. Otherwise every sequence of that step is a suspect. A
        suspect runs alone until it has produced one token, which isolates the sequence that causes the failure.

        Returns:
            The sequences that ended.
        """
        suspects = self._oldest_step_sequences()
        for seq in suspects:
            seq.is_suspect = True
            seq.can_draft = False
        return self._roll_back_steps(suspects if len(suspects) == 1 else [])

    def recover_out_of_memory(self) -> list[Sequence]:
        """Roll back all steps in flight after the oldest of them ran out of memory, and reduce the token budget.

        No sequence ends, unless the step cannot be smaller: it computed a single token, or one prompt that cannot be
        divided.

        Returns:
            The sequence that ended, if any.
        """
        step_tokens = self._steps_in_flight[0][0].total_tokens
        self.token_budget.record_out_of_memory(step_tokens)
        seqs = self._oldest_step_sequences()
        is_smallest = step_tokens == 1 or (len(seqs) == 1 and not self.limits.is_chunked)
        return self._roll_back_steps(seqs if is_smallest else [])

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant that holds between steps is broken."""
        running = self.running
        self.kv_cache.check_invariants(running)
        self._batch.check_invariants()
        idle = [*self.queue, *self.requests.blocked_requests]
        all_seqs = [*running, *idle]
        assert len(all_seqs) == len(self.requests), "a request is in two states or in none"
        assert set(all_seqs) == set(self.requests), "a request was lost"
        assert all(not seq.block_tables and seq.row < 0 for seq in idle), (
            "an idle sequence has blocks or a row"
        )

    def _select_sequences(
        self, candidates: tuple[Sequence, ...], max_tokens: int
    ) -> tuple[Sequence, ...]:
        """Return the candidates that take part in a step of `max_tokens`, in their order.

        If a reduced token budget does not suffice for one token of each, they take turns.
        """
        if len(candidates) <= max_tokens:
            return candidates
        first = self._next_turn % len(candidates)
        self._next_turn = first + max_tokens
        selected = {*candidates[first : first + max_tokens]}
        selected.update(candidates[: max_tokens - len(selected)])
        return tuple(seq for seq in candidates if seq in selected)

    def _oldest_step_sequences(self) -> list[Sequence]:
        """Return the running sequences of the oldest step in flight."""
        return [seq for seq in self._steps_in_flight[0][1] if seq.row >= 0]

    def _roll_back_steps(self, ended: list[Sequence]) -> list[Sequence]:
        """Discard all steps in flight, end the sequences `ended`, and preempt every other running sequence.

        Returns:
            `ended`.
        """
        for seq in ended:
            self._end_request(seq)
        for seq in tuple(self.running):
            self._batch.preempt(seq)
        for plan, _ in self._steps_in_flight:
            self.kv_cache.discard_step(plan)
        self._steps_in_flight.clear()
        return ended

    def _plan_prefill(
        self, seq: Sequence, budget: int, plan: StepPlan, seqs: list[Sequence]
    ) -> int:
        """Plan up to `budget` of the sequence's remaining tokens, or all or none of them, and return their number."""
        remaining = seq.length - seq.computed_len
        count = min(remaining, budget)
        if count < remaining and not self.limits.is_chunked:
            count = 0 if plan.rows else remaining  # alone if a reduced budget does not suffice
        if count <= 0:
            return 0
        if seq.computed_len + count > seq.capacity:
            self.kv_cache.extend_blocks(seq, seq.computed_len + count, plan)
            count = min(count, seq.capacity - seq.computed_len)
        plan.rows.append(seq.row)
        plan.starts.append(seq.computed_len)
        plan.counts.append(count)
        seqs.append(seq)
        seq.computed_len += count
        is_complete = seq.computed_len == seq.length
        plan.sample_counts.append(int(is_complete))
        seq.length += is_complete
        seq.tenant_counter.served_tokens += count * seq.prefill_cost
        return count

    def _plan_drafts(
        self, drafts: Mapping[Sequence, list[int]], plan: StepPlan, decodes: list[Sequence]
    ) -> None:
        """Add drafts to the planned decodes, as far as tokens and blocks suffice. No sequence is preempted for them."""
        assert not self._steps_in_flight, "drafts are planned before the last token is known"
        pool, size = self.kv_cache.pool, self.limits.block_size
        max_tokens = min(self._max_drafted_tokens, self.token_budget.tokens)
        budget = max_tokens - plan.total_tokens
        for chunk, seq in enumerate(decodes):
            proposed = drafts.get(seq)
            if proposed is None or budget <= 0 or not seq.can_draft:
                continue
            count = min(len(proposed), budget, seq.max_length - seq.length)
            end = seq.computed_len + count
            if end > seq.capacity:
                num_blocks = -(-count // size) * len(seq.block_tables)
                spare = pool.available_blocks - self.limits.watermark * pool.num_blocks
                if num_blocks <= spare:
                    self.kv_cache.extend_blocks(seq, end, plan)
                count = min(count, seq.capacity - seq.computed_len)
            if count > 0:
                plan.draft_tokens[chunk] = proposed[:count]
                plan.counts[chunk] += count
                plan.sample_counts[chunk] += count
                budget -= count

    def _commit_window(
        self, seq: Sequence, chunk: int, start: int, result: StepResult
    ) -> SequenceUpdate:
        """Apply the new tokens of a sequence with drafts, up to the first one that ends it.

        A window without a token leaves the sequence as it was. The next step computes its last token again.
        """
        new_tokens: list[int] = []
        finish: SequenceFinishReason | None = None
        for token in result.windows[chunk]:
            seq.tokens.append(token)
            new_tokens.append(token)
            if token in seq.stop_token_ids:
                finish = "stop"
                break
            if len(seq.tokens) >= seq.max_length:
                finish = "length"
                break
        seq.can_draft = bool(new_tokens)
        seq.computed_len = end = start + len(new_tokens)
        seq.length = end + 1
        seq.tenant_counter.served_tokens += (len(new_tokens) - 1) * seq.decode_cost
        if end >= seq.next_full_length:  # after the tokens, of which the names of blocks are hashes
            self.kv_cache.update_full_blocks(seq, end)
        if finish is not None:
            self._complete_request(seq)
        return SequenceUpdate(seq, chunk, new_tokens, finish)

    def _on_first_token(self, seq: Sequence) -> None:
        """Handle the first token since the sequence joined. Siblings may fork, and a suspect is cleared."""
        seq.is_prefilled = True
        seq.is_suspect = False
        for sibling in self.requests.unblock(seq):
            self.queue.push(sibling)

    def _complete_request(self, seq: Sequence) -> None:
        """End a request that has reached its end."""
        self.output_estimator.record_end(seq.output_len, seq.max_length - seq.prompt_len)
        self._end_request(seq)

    def _end_request(self, seq: Sequence) -> None:
        """End a running, waiting or blocked request and release what it holds."""
        if seq.row >= 0:
            self._batch.remove(seq)
        elif seq.blocked_on is None:
            self.queue.remove(seq)
        seq.stale_until_step = NEVER
        self.requests.remove(seq)
        self.token_counters.remove_request(seq.tenant_counter)
        for sibling in self.requests.unblock(seq):
            self.queue.push(sibling)


def _prefill_priority(seq: Sequence, now: float) -> float:
    """Return the sort key of a prefill, its remaining tokens plus the tier penalty minus the ageing bonus."""
    remaining = seq.length - seq.computed_len + TIER_PENALTY_TOKENS * seq.tier
    return remaining - AGEING_TOKENS_PER_S * (now - seq.arrived_at)
