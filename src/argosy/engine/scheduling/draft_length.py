"""Policy for the number of drafts in a step: as many as make the step deliver more tokens per second.

A step with drafts takes longer than one without, and delivers a draft only if it equals the sampled token. The policy
estimates both from earlier steps. The output does not depend on its decisions.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from argosy.engine.scheduling.sequence import NEVER
from argosy.policy import OnlineLinearFit

MAX_DRAFT_TOKENS = 16
"""Maximum number of drafts of a sequence in one step."""
MAX_SLOWDOWN = 1.15
"""Maximum duration of a step relative to the same step without drafts, if one of its sequences has none."""
MAX_LOSS = 0.04
"""Maximum time that a sequence may lose by drafts, its own and those of others, relative to that without drafts."""
FIRST_LOSS = 1.0
"""Time that it may lose beside that, in steps without drafts."""
MIN_GAIN = 1.02
"""Minimum tokens per second with drafts relative to those without, below which only probes are drafted."""
MIN_ACCEPTANCE = 0.01
"""Minimum chance that a draft is accepted."""
FIRST_PROBE_WAIT = 8
MAX_PROBE_WAIT = 4096
"""Drafts that a sequence skips between two probes, which doubles with each probe that fails."""
PROBE_SHARE = 1 / 200
"""Maximum fraction of the time of steps that is spent on probes, without those that are accepted."""
MAX_SPARE_PROBES = 4.0
MIN_ROW_COST = 1 / 4
"""Minimum cost of as many tokens as `ridge_tokens`, relative to a step of one token.

Measured durations are noisy, and those that are too low by chance would select the most drafts.
"""
MAX_DOMAINS = 4096
"""Number of cache domains whose acceptance is known."""
MAX_RIDGES = 2
"""Maximum number of tokens of a step with drafts, in times in which the weights are read."""

MAX_DRAFTED_STEPS = 64
"""Maximum number of steps with drafts after which one without is measured, to compare with."""
MAX_DECODES_RATIO = 1.25
"""Number of sequences, relative to those of measured steps without drafts, up to which these say what a step costs."""

_SEQUENCE_WEIGHT = 1 / 4
_DRAFT_MODEL_WEIGHT = 1 / 16
"""Weight of a new outcome of a draft model, whose acceptance changes less than that of texts."""
_MEAN_WEIGHT = 1 / 64
_COST_WEIGHT = 1 / 8
"""Weight of a new measurement in the averages."""
_DECODE_HALF_LIFE_STEPS = 64.0
_COST_ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024)
"""Numbers of tokens whose relative duration is estimated. Others are interpolated."""


class DraftSource(NamedTuple):
    """Drafts that are equally likely to be accepted: those of one drafter after matches of similar size."""

    drafter: str
    match_size: int
    """Number of earlier tokens on which the drafts rely, rounded down to a power of two."""


class DraftCandidate(NamedTuple):
    """Drafts that a step may compute for one of its sequences."""

    history: DraftHistory
    source: DraftSource
    size: int
    needs_passes: bool = False
    """Whether a draft model computes the drafts before the step, one of all candidates in each pass."""


class _SourceHistory:
    """Acceptance of the drafts of one source in one sequence."""

    __slots__ = ("acceptance", "skipped", "wait")

    def __init__(self, acceptance: float) -> None:
        self.acceptance = acceptance
        """Mean fraction of drafts that were accepted, given that those before them were."""
        self.wait = FIRST_PROBE_WAIT
        self.skipped = 0
        """Drafts since the last probe."""


class DraftHistory:
    """Acceptance of earlier drafts of one sequence, by source, and the mean of all sequences of its cache domain."""

    __slots__ = ("means", "saved", "sources")

    def __init__(self, means: dict[DraftSource, float] | None = None) -> None:
        """Create the history of a new sequence, which starts from `means` and changes them."""
        self.saved = 0.0
        """Time that drafts have saved the sequence, in steps without drafts. Negative if it was slower with them."""
        self.means: dict[DraftSource, float] = {} if means is None else means
        self.sources: dict[DraftSource, _SourceHistory] = {}

    def find_max_loss(self, num_tokens: int) -> float:
        """Return how much longer a step may take, relative to one without drafts, after `num_tokens` output tokens."""
        return FIRST_LOSS + MAX_LOSS * num_tokens + self.saved


class DraftLengthPolicy:
    """Chooses the number of drafts of each sequence in a step. Deterministic."""

    def __init__(self, ridge_tokens: int, pass_s: float = 0.0) -> None:
        """Create a policy. Computing `ridge_tokens` tokens takes as long as one pass over the weights.

        `pass_s` are the seconds of a pass of the draft model, before any of its passes is recorded.
        """
        self._pass_s = pass_s
        self._ridge_tokens = ridge_tokens
        self._means: OrderedDict[bytes, dict[DraftSource, float]] = OrderedDict()
        """Acceptance in each cache domain, least recently used first.

        Other domains must not see it, because it depends on how often texts repeat themselves.
        """
        self._costs = [_initial_cost(rows, ridge_tokens) for rows in _COST_ROWS]
        """Duration of a step of `_COST_ROWS` tokens relative to that of one token. Never decreases."""
        self._min_row_cost = MIN_ROW_COST / ridge_tokens
        self._spare_probes = 0.0
        """Number of probes for which `PROBE_SHARE` of the time has sufficed, and that were not computed."""
        self._cost_weights = [1.0] * len(_COST_ROWS)
        """Weight of the next measurement of each cost."""
        self._decode_s = OnlineLinearFit(_DECODE_HALF_LIFE_STEPS)
        """Duration of a step without drafts by its number of sequences."""
        self._min_decodes, self._max_decodes = inf, 0.0
        """Numbers of sequences for which it is known well enough."""
        self._drafted_steps = 0
        """Number of steps with drafts since the last one without."""

    def create_history(self, domain: bytes) -> DraftHistory:
        """Return the history of a new sequence of a cache domain."""
        means = self._means.setdefault(domain, {})
        self._means.move_to_end(domain)
        if len(self._means) > MAX_DOMAINS:
            self._means.popitem(last=False)
        return DraftHistory(means)

    def select_lengths(
        self,
        candidates: Sequence[DraftCandidate],
        num_decodes: int,
        prefill_tokens: int = 0,
        max_loss: float = inf,
    ) -> list[int]:
        """Return the number of drafts to compute of each candidate, which may be 0.

        Args:
            candidates: Drafts of different sequences.
            num_decodes: Number of sequences that decode in the step, with or without drafts.
            prefill_tokens: Other tokens of the step.
            max_loss: How much longer the step may take, relative to the same step without drafts.
        """
        rows = num_decodes + prefill_tokens
        max_rows = MAX_RIDGES * self._ridge_tokens
        is_known = self._min_decodes <= num_decodes <= self._max_decodes
        if not is_known or self._drafted_steps >= MAX_DRAFTED_STEPS:
            return [0] * len(candidates)  # the next step without drafts is measured
        if prefill_tokens >= self._ridge_tokens or rows >= max_rows or max_loss <= 0:
            return [0] * len(candidates)
        cost = self.step_cost(rows)
        max_cost = (1.0 + max_loss) * cost
        lengths = self._maximize_rate(candidates, num_decodes, rows, max_rows, max_cost)
        if 0 in lengths or num_decodes > len(candidates):
            max_cost = min(max_cost, MAX_SLOWDOWN * cost)
            lengths = self._maximize_rate(candidates, num_decodes, rows, max_rows, max_cost)
            _, row_cost = self._find_row_cost(rows)
            self._spare_probes = min(
                self._spare_probes + PROBE_SHARE * cost / row_cost, MAX_SPARE_PROBES
            )
            max_rows = self._max_rows_beside_others(rows, max_rows)
            pass_price = self._find_pass_cost(num_decodes) / row_cost
            self._add_probes(candidates, lengths, max_rows - rows - sum(lengths), pass_price)
        return lengths

    def estimate(self, candidate: DraftCandidate) -> float:
        """Return the estimated chance that a draft is accepted, given that those before it are."""
        return self._find_history(candidate.history, candidate.source).acceptance

    def record_drafts(
        self,
        history: DraftHistory,
        source: DraftSource,
        drafted: int,
        accepted: int,
        *,
        needed_passes: bool = False,
    ) -> None:
        """Record that the first `accepted` of `drafted` drafts were accepted."""
        weight = _DRAFT_MODEL_WEIGHT if needed_passes else _SEQUENCE_WEIGHT
        entry = self._find_history(history, source)
        mean = history.means[source]
        for index in range(min(accepted + 1, drafted)):
            outcome = float(index < accepted)
            entry.acceptance += weight * (outcome - entry.acceptance)
            mean += _MEAN_WEIGHT * (outcome - mean)
        history.means[source] = mean
        if accepted:
            entry.wait = FIRST_PROBE_WAIT
            self._spare_probes += 1.0

    def record_step(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """Record the duration of a step that computed nothing but decodes and their drafts."""
        if not num_drafts:
            self._decode_s.add(num_decodes, seconds)
            self._min_decodes = min(self._min_decodes, num_decodes / MAX_DECODES_RATIO)
            self._max_decodes = max(self._max_decodes, num_decodes * MAX_DECODES_RATIO)
            self._drafted_steps = 0
            return
        self._drafted_steps += 1
        expected_s = self._decode_s.predict(num_decodes)
        if expected_s <= 0:
            return
        rows = num_decodes + num_drafts
        estimated = self.step_cost(rows)
        measured = self.step_cost(num_decodes) * seconds / expected_s
        difference = min(2.0 * estimated, max(0.5 * estimated, measured)) - estimated
        index, fraction = _locate(rows)
        costs = self._costs
        for knot, weight in ((index, 1.0 - fraction), (index + 1, fraction)):
            # the cost of the decodes alone is what the measurement is relative to
            if weight and _COST_ROWS[knot] > num_decodes:
                change = self._cost_weights[knot] * difference
                self._cost_weights[knot] = max(_COST_WEIGHT, self._cost_weights[knot] / 2)
                costs[knot] = max(costs[knot - 1], costs[knot] + change)
        for knot in range(index + 1, len(costs)):
            costs[knot] = max(costs[knot], costs[knot - 1])

    def record_passes(self, num_passes: int, seconds: float) -> None:
        """Record the duration of at least one pass of the draft model."""
        self._pass_s += _COST_WEIGHT * (seconds / num_passes - self._pass_s)

    def _find_history(self, history: DraftHistory, source: DraftSource) -> _SourceHistory:
        entry = history.sources.get(source)
        if entry is None:
            mean = history.means.setdefault(source, 1.0 - 1.0 / (1.0 + source.match_size / 4))
            entry = history.sources[source] = _SourceHistory(mean)
        return entry

    def _maximize_rate(
        self,
        candidates: Sequence[DraftCandidate],
        num_decodes: int,
        rows: int,
        max_rows: int,
        max_cost: float,
    ) -> list[int]:
        """Return the lengths with the most expected tokens per second.

        Each further draft is the one that is most likely to be accepted.
        """
        estimates = list(map(self.estimate, candidates))
        pass_cost = self._find_pass_cost(num_decodes)
        num_passes = 0
        lengths = [0] * len(candidates)
        heap = [
            (-estimate, index)
            for index, estimate in enumerate(estimates)
            if candidates[index].size > 0
        ]
        heapq.heapify(heap)
        order: list[int] = []
        tokens = float(num_decodes)
        cost = self.step_cost(rows)
        best_rate = MIN_GAIN * tokens / cost
        best_count = 0
        knot_rows = rows  # up to which each row adds `row_cost`
        row_cost = 0.0
        while heap and rows < max_rows:
            negative_gain, index = heap[0]
            if negative_gain > -MIN_ACCEPTANCE:
                break
            if rows >= knot_rows:
                knot_rows, row_cost = self._find_row_cost(rows)
            added_cost = row_cost
            adds_pass = candidates[index].needs_passes and lengths[index] == num_passes
            if adds_pass:
                added_cost += pass_cost
            if cost + added_cost >= max_cost:
                heapq.heappop(heap)
                continue
            num_passes += adds_pass
            rows += 1
            cost += added_cost
            tokens -= negative_gain
            order.append(index)
            lengths[index] += 1
            rate = tokens / cost
            if rate > best_rate:
                best_rate, best_count = rate, len(order)
            if lengths[index] < min(candidates[index].size, MAX_DRAFT_TOKENS):
                heapq.heapreplace(heap, (negative_gain * estimates[index], index))
            else:
                heapq.heappop(heap)
        for index in order[best_count:]:
            lengths[index] -= 1
        return lengths

    def _add_probes(
        self,
        candidates: Sequence[DraftCandidate],
        lengths: list[int],
        max_probes: int,
        pass_price: float,
    ) -> None:
        """Draft one token of a candidate that has been without drafts for long enough.

        A pass of a draft model counts as `pass_price` probes, which later ones wait for.
        """
        for index, (history, source, size, needs_passes) in enumerate(candidates):
            if lengths[index] or size <= 0:
                continue
            entry = history.sources[source]
            entry.skipped += 1
            price = 1.0 + (pass_price if needs_passes else 0.0)
            is_due = entry.skipped > entry.wait and max_probes > 0 and price < inf
            if is_due and self._spare_probes >= 1.0:
                self._spare_probes -= price
                pass_price = 0.0 if needs_passes else pass_price
                lengths[index] = 1
                max_probes -= 1
                entry.skipped = 0
                entry.wait = min(2 * entry.wait, MAX_PROBE_WAIT)

    def _find_pass_cost(self, num_decodes: int) -> float:
        """Return the duration of a pass of the draft model relative to that of a step of one token.

        It is infinite before a step without drafts was measured.
        """
        expected_s = self._decode_s.predict(num_decodes)
        return self._pass_s * self.step_cost(num_decodes) / expected_s if expected_s > 0 else inf

    def _max_rows_beside_others(self, rows: int, max_rows: int) -> int:
        """Return the maximum tokens of a step in which some sequences have no drafts."""
        limit = MAX_SLOWDOWN * self.step_cost(rows)
        while max_rows > rows and self.step_cost(max_rows) > limit:
            max_rows -= 1
        return max_rows

    def _find_row_cost(self, rows: int) -> tuple[int, float]:
        """Return the next number of tokens whose cost is estimated, and the cost of each token up to it."""
        index, _ = _locate(rows)
        lower, upper = _COST_ROWS[index], _COST_ROWS[index + 1]
        if rows >= upper:
            return NEVER, self._min_row_cost
        row_cost = (self._costs[index + 1] - self._costs[index]) / (upper - lower)
        return upper, max(row_cost, self._min_row_cost)

    def relative_cost(self, rows: int, other_rows: int) -> float:
        """Return the estimated duration of a step of `rows` tokens relative to that of `other_rows`."""
        return 1.0 if rows == other_rows else self.step_cost(rows) / self.step_cost(other_rows)

    def step_cost(self, rows: int) -> float:
        """Return the estimated duration of a step of `rows` tokens relative to that of one token."""
        index, fraction = _locate(rows)
        lower, upper = self._costs[index], self._costs[index + 1]
        return lower + fraction * (upper - lower)


def _locate(rows: int) -> tuple[int, float]:
    """Return the index of the largest of `_COST_ROWS` up to `rows`, and the fraction of the way to the next one."""
    rows = min(rows, _COST_ROWS[-1])
    index = min(bisect_right(_COST_ROWS, rows), len(_COST_ROWS) - 1) - 1
    lower, upper = _COST_ROWS[index], _COST_ROWS[index + 1]
    return index, (rows - lower) / (upper - lower)


def _initial_cost(rows: int, ridge_tokens: int) -> float:
    """Return the assumed cost before any measurement: one half more at the ridge, and then proportional."""
    if rows <= ridge_tokens:
        return 1.0 + 0.5 * (rows - 1) / ridge_tokens
    return 0.5 + rows / ridge_tokens
