"""Meter of a gateway in a fleet: turns the ends of requests into measurements of the versions of their pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from argosy.gateway.request_context import RequestContext
from argosy.gateway.rollout_messages import OutcomeQuery, OutcomeReport, PublishedVersions
from argosy.gateway.version_comparison.model_outcomes import ModelOutcomes
from argosy.policy.rollout import Arm, OutcomeBatch
from argosy.telemetry import GatewayMetrics

TICK_INTERVAL_S = 1.0

OnBatch = Callable[[PublishedVersions, OutcomeBatch], None]
"""Called with each new batch and the versions that it compares."""


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
            batches = self._models[model].apply(published, wall_now)
            self._report(previous.get(model, published), batches)

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
            self._report(self._versions[model], outcomes.take_batches(wall_now))

    def _report(self, versions: PublishedVersions, batches: Sequence[OutcomeBatch]) -> None:
        for batch in batches:
            self._on_batch(versions, batch)
