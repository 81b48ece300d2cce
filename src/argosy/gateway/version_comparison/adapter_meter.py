"""Meter of a gateway for adapters: recent requests of the version that answers, and those of a running comparison."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection

from argosy.gateway.request_context import RequestContext
from argosy.gateway.rollout_messages import PublishedVersions
from argosy.gateway.version_comparison.outcome_meter import ModelOutcomes
from argosy.policy.rollout import Arm, Comparison
from argosy.policy.traffic import PoolRoute, ShadowCopy
from argosy.store import Adapter
from argosy.telemetry import GatewayMetrics

MAX_MEASURED_ADAPTERS = 200
"""Adapters whose recent requests are kept, those of the latest requests."""
MAX_HISTORY = 400
"""Requests that are kept of each."""
MAX_COPIES_PER_S = 1.0
"""Copies for the candidate of one adapter, which its tenant adds and does not pay for."""


class AdapterMeter:
    """Measures the versions of adapters. Not thread-safe: use it from one event loop.

    Args:
        gateway_id: Id of the gateway's process.
        metrics: Counts copies and compared answers.
    """

    def __init__(self, gateway_id: str, metrics: GatewayMetrics) -> None:
        self.gateway_id = gateway_id
        self._metrics = metrics
        self._outcomes: OrderedDict[str, ModelOutcomes] = OrderedDict()
        """Measurements by id of the adapter."""

    def on_request_admitted(self, context: RequestContext) -> None:
        """Record that all filters have admitted a request for an adapter."""
        adapter, version = context.adapter, context.assigned_version
        if adapter is not None and version is not None:
            self.measure(adapter).on_admitted(context, version, time.monotonic())

    def find_copies(self, adapter: str) -> ShadowCopy | None:
        """Return which requests for an adapter are copied to its candidate. None if it has a share, or there is none.

        Args:
            adapter: Id of the adapter.
        """
        outcomes = self._outcomes.get(adapter)
        comparison = None if outcomes is None else outcomes.comparison
        if comparison is None or comparison.step:
            return None
        return ShadowCopy(
            pool=adapter,
            digest=comparison.candidate,
            fraction=comparison.share,
            max_requests_per_s=MAX_COPIES_PER_S,
            salt=comparison.rollout,
        )

    def count(self, context: RequestContext, arm: Arm, key: tuple[str, str]) -> None:
        """Count a request that is copied, or its copy."""
        outcomes = None if context.adapter is None else self._outcomes.get(context.adapter.id)
        if outcomes is not None:
            outcomes.count(context, arm, key, time.monotonic())

    def record_copy(self, model: str, outcome: str) -> None:
        """Count a request that was selected to be copied: the status of its copy, `capped` or `dropped`."""
        self._metrics.shadow_requests.add((model, outcome))

    def record_answers(self, model: str, *, are_equal: bool) -> None:
        """Count the comparison of the answers to a request without random sampling and to its copy."""
        self._metrics.shadow_answers.add((model, "true" if are_equal else "false"))

    def on_request_ended(self, context: RequestContext) -> None:
        """Record the end of a request, before its output is forgotten."""
        outcomes = None if context.adapter is None else self._outcomes.get(context.adapter.id)
        if outcomes is not None and context.placement is not None:
            outcomes.on_ended(context, context.assigned_version, time.monotonic())

    def measure(self, adapter: Adapter) -> ModelOutcomes:
        """Return the measurements of an adapter, and forget those of the adapter without requests for longest."""
        outcomes = self._outcomes.get(adapter.id)
        if outcomes is None:
            outcomes = ModelOutcomes(self.gateway_id, MAX_HISTORY, shares_replicas=True)
            self._outcomes[adapter.id] = outcomes
            if len(self._outcomes) > MAX_MEASURED_ADAPTERS:
                oldest = next(
                    (name for name, each in self._outcomes.items() if each.comparison is None), ""
                )
                self._outcomes.pop(oldest, None)
        self._outcomes.move_to_end(adapter.id)
        if adapter.digest not in {adapter.candidate, outcomes.stable}:
            outcomes.apply(publish_versions(adapter), time.time())
        return outcomes

    def end_comparisons(self, running: Collection[str]) -> None:
        """Forget the measurements of the comparisons that do not run any more."""
        for name, outcomes in tuple(self._outcomes.items()):
            if name not in running and outcomes.comparison is not None:
                del self._outcomes[name]


def publish_versions(adapter: Adapter, comparison: Comparison | None = None) -> PublishedVersions:
    """Return the versions of an adapter in the form in which a controller publishes those of a pool."""
    route = PoolRoute(pool=adapter.id, version=1, stable=adapter.digest, rollout=adapter.rollout)
    return PublishedVersions(model=adapter.id, route=route, comparison=comparison)
