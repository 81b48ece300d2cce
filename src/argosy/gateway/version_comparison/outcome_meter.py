"""Meter of a gateway in a fleet: turns the ends of requests into measurements of the versions of their pools."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from argosy.gateway.request_context import AssignedVersion, RequestContext
from argosy.gateway.rollout_messages import OutcomeQuery, OutcomeReport, PublishedVersions
from argosy.gateway.version_comparison.request_outcome import build_outcome
from argosy.policy.rollout import (
    Arm,
    Comparison,
    OutcomeAggregator,
    OutcomeBatch,
    OutcomeStatus,
    RequestOutcome,
)
from argosy.telemetry import GatewayMetrics

MAX_HISTORY = 5000
"""Requests of the stable version that are kept."""
MAX_BATCHES = 600
"""Batches that are kept for a controller that does not read them. The oldest are dropped."""
MAX_REPORTED_BATCHES = 30
"""Batches per report. The controller asks for the next ones."""
TICK_INTERVAL_S = 1.0

OnBatch = Callable[[PublishedVersions, OutcomeBatch], None]
"""Called with each new batch and the versions that it compares."""


class _Counted(NamedTuple):
    """Request that counts in the comparison."""

    arm: Arm
    key: tuple[str, str]
    has_pool_failed: bool
    """Whether all replicas of the version had failed when the request arrived."""


class ModelOutcomes:
    """Outcomes for one model. Not thread-safe: use it from one event loop.

    Args:
        gateway_id: Id of the gateway's process.
        max_history: Requests of the stable version that are kept.
        shares_replicas: Whether both versions are served by the same replicas, as those of an adapter are.
    """

    def __init__(
        self, gateway_id: str, max_history: int = MAX_HISTORY, *, shares_replicas: bool = False
    ) -> None:
        self._gateway_id = gateway_id
        self._shares_replicas = shares_replicas
        self._history: deque[RequestOutcome] = deque(maxlen=max_history)
        self._stable = ""
        self._rollout = ""
        self._candidate_replicas: set[str] = set()
        """Names of all replicas that the candidate has had in this rollout."""
        self.comparison: Comparison | None = None
        """The running comparison."""
        self._aggregator: OutcomeAggregator | None = None
        self._compared_rollout = ""
        """Rollout of the aggregator and of the batches, also after its comparison."""
        self._batches: deque[OutcomeBatch] = deque(maxlen=MAX_BATCHES)
        self._compared_answers = self._equal_answers = 0
        self._running: dict[RequestContext, _Counted] = {}
        """Requests of this step that count when they end or reach the scoring age, in the order of their admission."""

    def apply(self, versions: PublishedVersions, wall_now: float) -> OutcomeBatch | None:
        """Follow what the controller has published.

        Args:
            versions: The versions and the comparison.
            wall_now: Seconds since the epoch.

        Returns:
            The last batch of the step that has ended; None if none has.
        """
        route, comparison = versions.route, versions.comparison
        if route.stable != self._stable:
            self._history.clear()
        if (route.stable, route.rollout) != (self._stable, self._rollout):
            self._candidate_replicas.clear()  # the candidate may have become the stable version
        self._stable, self._rollout = route.stable, route.rollout
        for replicas in versions.replicas.values():
            self._candidate_replicas.update(each.name or each.url for each in replicas)
        previous, self.comparison = self.comparison, comparison
        if _step_of(previous) == _step_of(comparison):
            return None
        batch = self.take_batch(wall_now, force=True)
        self._running.clear()
        if comparison is None:
            return batch
        if self._aggregator is None or comparison.rollout != self._compared_rollout:
            self._batches.clear()
            self._compared_answers = self._equal_answers = 0
            self._compared_rollout = comparison.rollout
            self._aggregator = OutcomeAggregator(
                comparison.rollout,
                comparison.step,
                self._gateway_id,
                comparison.baseline,
                comparison.rates,
            )
        self._aggregator.start_step(comparison.step)
        return batch

    @property
    def stable(self) -> str:
        """Digest of the stable version. Empty before `apply`."""
        return self._stable

    @property
    def history(self) -> tuple[RequestOutcome, ...]:
        """Recent requests of the stable version, oldest first."""
        return tuple(self._history)

    def on_admitted(self, context: RequestContext, version: AssignedVersion, now: float) -> None:
        """Count a request that was assigned at random, if a comparison runs."""
        comparison = self.comparison
        if comparison is not None and version.is_randomised:
            if version.digest == self._stable:
                self.count(context, Arm.STABLE, version.key, now)
            elif version.digest == comparison.candidate:
                self.count(context, Arm.CANDIDATE, version.key, now)

    def count(self, context: RequestContext, arm: Arm, key: tuple[str, str], now: float) -> None:
        """Count a request for one version when it ends or reaches the scoring age, if a comparison runs."""
        if self.comparison is not None:
            self._running[context] = _Counted(arm, key, context.pool.has_failed(now))

    def record_answers(self, *, are_equal: bool) -> None:
        """Count the comparison of two answers to a request without random sampling."""
        self._compared_answers += 1
        self._equal_answers += are_equal

    def on_ended(
        self, context: RequestContext, version: AssignedVersion | None, now: float
    ) -> None:
        """Record the end of a request.

        Args:
            context: The request.
            version: Version that it was assigned to; None for a copy.
            now: Monotonic time.
        """
        counted = self._running.pop(context, None)
        if counted is not None:
            outcome = self._record(context, counted, now, is_running=False)
        elif version is not None and version.digest == self._stable:
            outcome = self._build_outcome(context, Arm.STABLE, version.key, now)
        else:
            return
        if outcome is not None and outcome.arm is Arm.STABLE:
            self._history.append(outcome)

    def score_running(self, now: float) -> None:
        """Score the requests that have reached the scoring age, each of them once."""
        if self.comparison is None:
            return
        age_s = self.comparison.baseline.scoring_age_s
        for context, counted in tuple(self._running.items()):
            admitted_at = context.trace.admitted_at
            if admitted_at is None or now - admitted_at < age_s:
                return  # the others were admitted later
            attempts = context.trace.attempts
            if attempts and now - (attempts[0].sent_at or now) >= age_s:
                del self._running[context]
                self._record(context, counted, now, is_running=True)

    def take_batch(self, wall_now: float, *, force: bool = False) -> OutcomeBatch | None:
        """Return the batch that is complete now, if there is one, and keep it for the controller."""
        if self._aggregator is None or (self.comparison is None and not force):
            return None
        batch = self._aggregator.take_batch(wall_now, force=force)
        if batch is not None:
            self._batches.append(batch)
        return batch

    def build_report(self, query: OutcomeQuery) -> OutcomeReport:
        """Answer the controller, and forget the batches that it has stored."""
        batches: Sequence[OutcomeBatch] = ()
        if query.rollout in {"", self._compared_rollout}:
            while (
                query.gateway == self._gateway_id
                and self._batches
                and self._batches[0].sequence <= query.after
            ):
                self._batches.popleft()
            batches = tuple(self._batches)[:MAX_REPORTED_BATCHES]
        return OutcomeReport(
            gateway=self._gateway_id,
            batches=batches,
            history=self.history if query.wants_history else (),
            longest_request_s=max((each.age_s for each in self._history), default=0.0),
            compared_answers=self._compared_answers,
            equal_answers=self._equal_answers,
        )

    def _record(
        self, context: RequestContext, counted: _Counted, now: float, *, is_running: bool
    ) -> RequestOutcome | None:
        arm, key, has_pool_failed = counted
        outcome = self._build_outcome(context, arm, key, now, is_running=is_running)
        if outcome is None and has_pool_failed:
            # Otherwise a version that always fails would have few errors: the other one takes its requests over.
            outcome = RequestOutcome(arm=arm, key=key, status=OutcomeStatus.FAILED, age_s=0.0)
        comparison, aggregator = self.comparison, self._aggregator
        if outcome is not None and comparison is not None and aggregator is not None:
            outcome = outcome.judge_objective(
                comparison.max_ttft_s, comparison.max_time_per_token_s
            )
            aggregator.record(outcome)
        return outcome

    def _build_outcome(
        self,
        context: RequestContext,
        arm: Arm,
        key: tuple[str, str],
        now: float,
        *,
        is_running: bool = False,
    ) -> RequestOutcome | None:
        replicas = None if self._shares_replicas else self._candidate_replicas
        return build_outcome(context, arm, key, replicas, now, is_running=is_running)


def _step_of(comparison: Comparison | None) -> tuple[str, int] | None:
    return None if comparison is None else (comparison.rollout, comparison.step)


class OutcomeMeter:
    """Measures the versions of all pools with rollouts. Not thread-safe: use it from one event loop.

    Args:
        gateway_id: Id of the gateway's process.
        on_batch: Receives each batch as soon as it is complete.
        metrics: Counts copies and compared answers.
        clock: Returns monotonic seconds, as for the requests.
        wall_clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        gateway_id: str,
        on_batch: OnBatch,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._gateway_id = gateway_id
        self._on_batch = on_batch
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._models: dict[str, ModelOutcomes] = {}
        self._versions: dict[str, PublishedVersions] = {}

    def apply(self, versions: Sequence[PublishedVersions]) -> None:
        """Follow the versions that the controller has published, and forget other models."""
        wall_now = self._wall_clock()
        previous, self._versions = self._versions, {each.model: each for each in versions}
        self._models = {
            model: self._models.get(model) or ModelOutcomes(self._gateway_id)
            for model in self._versions
        }
        for model, published in self._versions.items():
            batch = self._models[model].apply(published, wall_now)
            if batch is not None:
                self._on_batch(previous.get(model, published), batch)

    def on_request_admitted(self, context: RequestContext) -> None:
        """Record that all filters have admitted a request, which is placed next."""
        version = context.assigned_version
        if version is not None and context.pool.model in self._models:
            self._models[context.pool.model].on_admitted(context, version, self._clock())

    def count(self, context: RequestContext, arm: Arm, key: tuple[str, str]) -> None:
        """Count a request that the route has not assigned at random: one that is copied, or its copy."""
        if context.pool.model in self._models:
            self._models[context.pool.model].count(context, arm, key, self._clock())

    def record_copy(self, model: str, outcome: str) -> None:
        """Count a request that was selected to be copied: the status of its copy, `capped` or `dropped`."""
        self._metrics.shadow_requests.add((model, outcome))

    def record_answers(self, model: str, *, are_equal: bool) -> None:
        """Count the comparison of the answers to a request without random sampling and to its copy."""
        self._metrics.shadow_answers.add((model, "true" if are_equal else "false"))
        if model in self._models:
            self._models[model].record_answers(are_equal=are_equal)

    def on_request_ended(self, context: RequestContext) -> None:
        """Record the end of a request, before its output is forgotten."""
        model = self._models.get(context.pool.model)
        if model is not None and context.placement is not None:
            model.on_ended(context, context.assigned_version, self._clock())

    def build_report(self, query: OutcomeQuery) -> OutcomeReport:
        """Answer the controller. The report is empty for a model without rollouts."""
        model = self._models.get(query.model)
        return (
            OutcomeReport(gateway=self._gateway_id) if model is None else model.build_report(query)
        )

    async def run(self) -> None:
        """Score old requests and complete batches every second, until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.tick()

    def tick(self) -> None:
        """Score old requests and complete batches."""
        now, wall_now = self._clock(), self._wall_clock()
        for model, outcomes in self._models.items():
            outcomes.score_running(now)
            batch = outcomes.take_batch(wall_now)
            if batch is not None:
                self._on_batch(self._versions[model], batch)
