"""Capacity of a replica: the tokens per second that it serves within the objectives, learnt from load reports.

The time between two tokens grows linearly with the number of running sequences, because each adds its share to every
step. A line through the reports shows at how many sequences the ITL objective is reached, also while the load is far
below. The capacity follows from it and from the measured tokens per sequence and step. TTFT has no such law: it is
short until prompts queue. Throughput at which the TTFT objective was missed is therefore an upper bound, which is
tested again slowly.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from argosy.policy.smoothing import NO_MOMENTS, LineMoments, OnlineLinearFit, decay_factor

HALF_LIFE_REPORTS = 720
"""Number of reports in an hour, if there is one each 5 s."""
MIN_REPORTS = 6
MAX_MISSES = 0.05
"""Part of the replicas that may miss the TTFT objective, which is one of the 95th percentile."""
BOUND_STEP = 0.25
"""Part of the way to the observed throughput that the bound moves with each miss of the TTFT objective."""
BOUND_GROWTH = 1.001
"""Growth of the bound with each report without a miss: a tenth in about eight minutes."""
MIN_INTER_TOKEN_S = 1e-6
_DECAY = decay_factor(1.0 / HALF_LIFE_REPORTS)


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Means of one replica over the time since its previous report."""

    tokens_per_s: float
    """Tokens served, in the unit of the demand."""
    running: float
    """Sequences that ran at the same time."""
    max_running: float
    """Sequences that can run at the same time."""
    inter_token_s: float
    """Time between two tokens of a sequence."""
    ttft_s: float
    """Time to the first token that a new request would have, without the computation of its own prompt."""


class CapacityState(msgspec.Struct):
    """Memory of a `CapacityEstimator`, which can be stored."""

    line: LineMoments = NO_MOMENTS
    """Moments of the line of inter-token times over running sequences."""
    tokens_per_step: float = 0.0
    """Decayed sum of the tokens served for each step of a sequence."""
    max_running: float = 0.0
    """Decayed sum."""
    weight: float = 0.0
    """Decayed number of reports in these sums."""
    num_reports: int = 0
    bound: float | None = None
    """Tokens per second above which the TTFT objective was missed; None if it was not."""


class CapacityEstimator:
    """Learns the capacity of the replicas of one pool, which are alike.

    Args:
        ttft_s: Objective for the time to the first token; None if there is none.
        itl_s: Objective for the time between two tokens; None if there is none. A replica then serves as many sequences
            as fit.
        state: State of an earlier estimator.
    """

    def __init__(
        self, ttft_s: float | None, itl_s: float | None, state: CapacityState | None = None
    ) -> None:
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._state = CapacityState() if state is None else state
        self._line = OnlineLinearFit(HALF_LIFE_REPORTS, self._state.line)

    @property
    def state(self) -> CapacityState:
        """Current state."""
        self._state.line = self._line.moments
        return self._state

    def add(self, reports: Iterable[ReplicaReport]) -> None:
        """Record one report of each ready replica. Replicas without running sequences show nothing."""
        busy = [each for each in reports if each.running > 0.0 and each.inter_token_s > 0.0]
        if not busy:
            return
        state, count = self._state, len(busy)
        running = sum(each.running for each in busy) / count
        inter_token_s = sum(each.inter_token_s * each.running for each in busy) / (running * count)
        tokens_per_s = sum(each.tokens_per_s for each in busy) / count
        self._line.add(running, inter_token_s)
        state.tokens_per_step = (
            state.tokens_per_step * _DECAY + tokens_per_s * inter_token_s / running
        )
        state.max_running = (
            state.max_running * _DECAY + sum(each.max_running for each in busy) / count
        )
        state.weight = state.weight * _DECAY + 1.0
        state.num_reports += 1
        if self._ttft_s is not None:
            missed = [each.tokens_per_s for each in busy if each.ttft_s > self._ttft_s]
            self._move_bound(missed if len(missed) > MAX_MISSES * count else [], tokens_per_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Capacity of a replica; None before enough reports."""
        state = self._state
        if state.num_reports < MIN_REPORTS:
            return None
        running, inter_token_s = self._full_load(state.max_running / state.weight)
        capacity = state.tokens_per_step / state.weight * running / inter_token_s
        return capacity if state.bound is None else min(capacity, state.bound)

    def _full_load(self, max_running: float) -> tuple[float, float]:
        """Return how many sequences a replica serves within the ITL objective, and their inter-token time."""
        weight, running_sum, inter_token_sum, *_ = self._line.moments
        running, inter_token_s = running_sum / weight, inter_token_sum / weight
        slope = self._line.predict(running + 1.0) - inter_token_s
        at_max_s = inter_token_s + slope * (max_running - running)
        objective_s = self._itl_s
        if objective_s is None or at_max_s <= objective_s:
            return max_running, max(at_max_s, MIN_INTER_TOKEN_S)
        if slope <= 0.0:  # one load only, and it misses the objective
            return running * objective_s / inter_token_s, objective_s
        return max(1.0, running + (objective_s - inter_token_s) / slope), objective_s

    def _move_bound(self, missed: list[float], tokens_per_s: float) -> None:
        state = self._state
        if missed:
            missed_at = sum(missed) / len(missed)
            bound = missed_at if state.bound is None else state.bound
            state.bound = bound + BOUND_STEP * (min(bound, missed_at) - bound)
        elif state.bound is not None:
            state.bound = max(state.bound * BOUND_GROWTH, tokens_per_s)
