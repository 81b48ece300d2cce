"""Endpoints of service level objectives: their error budgets, how fast these burn, and what the misses have in common.

Viewers of the whole gateway may send the requests. There are at most 200 objectives, and a read of the store's sums is
reused for 30 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from argosy.deployment import ObjectiveStatus
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import Page, build_page
from argosy.policy.objectives import Sli
from argosy.store import NotFoundError

endpoints = AdminEndpoints()


class ObjectiveView(msgspec.Struct, frozen=True, kw_only=True):
    """State of an objective."""

    name: str
    target: str
    """Target and scope in words."""
    sli: Sli
    model: str | None
    tier: str | None
    tenant: str | None
    window_s: float
    requests: int
    """Requests, or tokens for `itl`, within the window."""
    misses: int
    remaining: float | None
    """Part of the budget that is left, from 1 to below 0. Null with fewer than 100 requests."""
    burn_rate: float
    """Multiple of the rate at which the budget lasts for its window, over the last hour."""
    empty_in_s: float | None
    """Seconds until the budget is spent at this rate. Null if it is not, or if the budget is not known."""
    is_paging: bool | None
    """Whether an alert for a page fires. Null if too few reports of gateways are there to decide."""
    is_ticketing: bool | None
    is_outage: bool | None
    explanation: str
    problem: str
    """Why nothing can be decided now; empty if it can."""


class ObjectiveDetailView(msgspec.Struct, frozen=True, kw_only=True):
    """State of an objective, and its misses by what they have in common."""

    objective: ObjectiveView
    causes: Mapping[str, int]
    """Misses by error code, or `slow`."""
    replicas: Mapping[str, int]
    versions: Mapping[str, int]
    tenants: Mapping[str, int]
    recent: Sequence[str]
    """Ids of recent responses that missed it, which can be explained for an hour."""


@endpoints.register("GET", "/admin/objectives", "viewer", "gateway")
def list_objectives(scope: AdminScope, request: AdminRequest) -> Page[ObjectiveView]:  # noqa: ARG001 - lists all
    """List the service level objectives with their error budgets."""
    statuses = scope.objective_counts.read(scope.objectives(), time.time())
    return build_page([_to_view(each) for each in statuses])


@endpoints.register("GET", "/admin/objectives/{id}", "viewer", "gateway")
def get_objective(scope: AdminScope, request: AdminRequest) -> ObjectiveDetailView:
    """Get an objective, and what its misses have in common."""
    name, now = request.resource_id, time.time()
    reader = scope.objective_counts
    for status in reader.read(scope.objectives(), now):
        if status.objective.name == name:
            details = reader.read_details(status.objective, now)
            return ObjectiveDetailView(
                objective=_to_view(status),
                causes=details.causes,
                replicas=details.replicas,
                versions=details.versions,
                tenants=details.tenants,
                recent=details.requests[::-1],
            )
    raise NotFoundError(f"No objective of the settings has the name {name!r}.")


def _to_view(status: ObjectiveStatus) -> ObjectiveView:
    objective, evaluation, counts = status.objective, status.evaluation, status.budget.counts
    return ObjectiveView(
        name=objective.name,
        target=objective.description,
        sli=objective.sli,
        model=objective.model,
        tier=objective.tier,
        tenant=objective.tenant,
        window_s=objective.window_s,
        requests=counts.requests,
        misses=counts.misses,
        remaining=status.remaining,
        burn_rate=evaluation.burn_rate,
        empty_in_s=evaluation.empty_in_s,
        is_paging=evaluation.is_paging,
        is_ticketing=evaluation.is_ticketing,
        is_outage=evaluation.is_outage,
        explanation=status.explanation,
        problem=status.problem,
    )
