"""Engine under virtual time: the production's scheduler and draft policy, with a price for each step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from argosy.engine import EngineRequest
from argosy.engine.scheduling import (
    MAX_DRAFT_TOKENS,
    NO_DRAFTS,
    BatchingPolicy,
    DraftCandidate,
    DraftHistory,
    DraftLengthPolicy,
    DraftSource,
    Scheduler,
    SchedulerLimits,
    StepPlan,
    StepResult,
)
from argosy.engine.scheduling import Sequence as EngineSequence
from argosy.protocol import SamplingParams
from argosy.twin import StepCost

TOKEN = 0
SOURCE = DraftSource("simulated", 8)


class Offered(NamedTuple):
    """Request to an engine."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Served(NamedTuple):
    """Result of a run."""

    times: list[list[float]]
    """Time of each token by request."""
    peak_tokens: int
    """Largest number of tokens in the KV cache for requests that ran."""

    def ttft_ms(self, requests: Sequence[Offered]) -> list[float]:
        """Return the time to the first token of each request."""
        pairs = zip(self.times, requests, strict=True)
        return [1e3 * (times[0] - request.at_s) for times, request in pairs]

    def gaps_ms(self) -> list[float]:
        """Return the times between two tokens of a request, of all requests."""
        return [
            1e3 * (after - before)
            for times in self.times
            for before, after in itertools.pairwise(times)
        ]

    def longest_gaps_ms(self) -> list[float]:
        """Return the longest time between two tokens of each request that has two."""
        return [
            1e3 * max(after - before for before, after in itertools.pairwise(times))
            for times in self.times
            if len(times) > 1
        ]


class SimulatedDrafts:
    """Drafts that cost nothing to find, each of which is accepted with a given chance if those before it are.

    The production's policy chooses their number. With `fixed`, it is always that one, as a baseline.
    """

    def __init__(
        self, acceptance: float, ridge_tokens: int, seed: int, fixed: int | None = None
    ) -> None:
        self._acceptance = acceptance
        self._fixed = fixed
        self._stream = random.Random(seed)
        self._policy = DraftLengthPolicy(ridge_tokens)
        self._histories: dict[str, DraftHistory] = {}
        self._by_row: dict[int, DraftHistory] = {}

    def propose(self, running: Sequence[EngineSequence]) -> Mapping[EngineSequence, list[int]]:
        """Return the drafts of the next step."""
        decodes = [seq for seq in running if seq.is_prefilled]
        prefill_tokens = sum(
            seq.length - seq.computed_len for seq in running if not seq.is_prefilled
        )
        candidates = []
        for seq in decodes:
            history = self._histories.get(seq.id)
            if history is None:
                history = self._histories[seq.id] = self._policy.create_history(b"")
            self._by_row[seq.row] = history
            candidates.append(DraftCandidate(history, SOURCE, MAX_DRAFT_TOKENS))
        if self._fixed is not None:
            lengths = [self._fixed] * len(decodes)
        else:
            lengths = self._policy.select_lengths(candidates, len(decodes), prefill_tokens)
        pairs = zip(decodes, lengths, strict=True)
        return {seq: [TOKEN] * length for seq, length in pairs if length}

    def verify(self, plan: StepPlan, seconds: float) -> dict[int, list[int]]:
        """Return the new tokens of the chunks with drafts, and let the policy learn from the step."""
        windows = {}
        for chunk, drafts in plan.draft_tokens.items():
            accepted = 0
            while accepted < len(drafts) and self._stream.random() < self._acceptance:
                accepted += 1
            windows[chunk] = [TOKEN] * (accepted + 1)
            history = self._by_row[plan.rows[chunk]]
            self._policy.record_drafts(history, SOURCE, len(drafts), accepted)
        num_decodes = plan.counts.count(1) + len(plan.draft_tokens)
        if num_decodes + plan.num_drafts == plan.total_tokens:
            self._policy.record_step(num_decodes, plan.num_drafts, seconds)
        return windows


def serve(
    requests: Sequence[Offered],
    limits: SchedulerLimits,
    cost: StepCost,
    *,
    batching: BatchingPolicy | None = None,
    drafts: SimulatedDrafts | None = None,
    prefix_tokens: int = 0,
) -> Served:
    """Serve requests in the order of their arrival.

    Args:
        requests: The requests by time of arrival.
        limits: Limits of the scheduler.
        cost: Price of the steps.
        batching: Policy of batches; by default that of production.
        drafts: Speculation; by default none.
        prefix_tokens: Tokens at the beginning of each prompt that all of them share.
    """
    scheduler = Scheduler(limits, batching)
    pool = scheduler.kv_cache.pool
    times: list[list[float]] = [[] for _ in requests]
    now, added, peak_blocks = 0.0, 0, 0
    while added < len(requests) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, requests[added].at_s)
        while added < len(requests) and requests[added].at_s <= now:
            scheduler.add(_build_request(added, requests[added], prefix_tokens), now=now)
            added += 1
        proposed = NO_DRAFTS if drafts is None else drafts.propose(scheduler.running)
        plan = scheduler.schedule(now, proposed)
        assert plan.rows, "no step can run"  # noqa: S101 - else this would never end
        peak_blocks = max(peak_blocks, pool.used_blocks)
        seconds = cost.step_seconds(*plan.count_work())
        windows = {} if drafts is None else drafts.verify(plan, seconds)
        now += seconds
        tokens = [TOKEN if samples else -1 for samples in plan.sample_counts]
        for update in scheduler.commit(StepResult(tokens, windows)):
            times[int(update.seq.id)] += [now] * len(update.tokens)
    return Served(times, peak_blocks * limits.block_size)


def _build_request(number: int, request: Offered, prefix_tokens: int) -> EngineRequest:
    own = request.prompt_tokens - prefix_tokens
    first = 1_000_000 + 100_000 * number
    return EngineRequest(
        id=str(number),
        prompt=[*range(prefix_tokens), *range(first, first + own)],
        params=SamplingParams(max_tokens=request.output_tokens),
    )
