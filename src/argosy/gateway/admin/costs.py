"""Endpoints about costs: what projects cause beside what they are billed, budgets, and outliers."""

from __future__ import annotations

import time

import msgspec

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    BudgetView,
    CostOutlierView,
    CostQuery,
    CostView,
    Page,
    build_page,
    to_view,
)
from argosy.store import compare_costs, list_budgets, list_outliers

endpoints = AdminEndpoints()

MAX_BUDGETS = 1000
_DEFAULT_PERIOD_S = 6 * 86_400
"""Time before now in which a comparison of costs begins by default: 7 days with that of today."""


@endpoints.register("GET", "/admin/costs", "viewer", "gateway", query_type=CostQuery)
def compare_billed_and_caused_costs(scope: AdminScope, request: AdminRequest) -> Page[CostView]:
    """Compare what projects were billed with the cost of the hardware that they used, by model.

    Idle time has rows of its own. The costs caused and those of idle time sum to the cost of the hardware.
    """
    query, now = request.query, time.time()
    since = now - _DEFAULT_PERIOD_S if query.since is None else query.since
    until = now if query.until is None else query.until
    rows = compare_costs(scope.ledger, scope.hardware_costs, since, until)
    return build_page([to_view(row, CostView) for row in rows])


@endpoints.register("GET", "/admin/budgets", "viewer")
def report_budgets(scope: AdminScope, request: AdminRequest) -> Page[BudgetView]:  # noqa: ARG001 - the same for all
    """Report the use of limits for a day or a month, and when they are used up at the present rate."""
    limits = scope.limits_and_prices.list_limits()
    budgets = list_budgets(scope.ledger, limits, time.time())
    views = [
        to_view(each.limit, BudgetView, **msgspec.structs.asdict(each.forecast))
        for each in budgets[:MAX_BUDGETS]
    ]
    return build_page(views, has_more=len(budgets) > MAX_BUDGETS)


@endpoints.register("GET", "/admin/usage/outliers", "viewer")
def list_cost_outliers(scope: AdminScope, request: AdminRequest) -> Page[CostOutlierView]:  # noqa: ARG001 - the same for all
    """List requests of the last 7 days that cost 10 times the 99th percentile of their project and model, or more."""
    found = list_outliers(scope.ledger, scope.accounts, scope.limits_and_prices, time.time())
    return build_page(
        [
            to_view(
                each.record,
                CostOutlierView,
                p99_nano_dollars=each.p99_nano_dollars,
                reason=each.reason,
            )
            for each in found
        ]
    )
