"""Endpoints about costs: what projects cause beside what they are billed, budgets, outliers, and idle replicas."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from argosy.deployment import PoolConfig
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import (
    BudgetView,
    CostAdviceView,
    CostOutlierView,
    CostQuery,
    CostView,
    Page,
    build_page,
    to_view,
)
from argosy.gateway.series_queries import SeriesAnswer
from argosy.policy import ReplicaStatus, SizeVerdict, advise_size, forecast_month
from argosy.process import run_in_daemon_thread
from argosy.store import HardwareDay, compare_costs, list_budgets, list_outliers

endpoints = AdminEndpoints()

MAX_BUDGETS = 1000
MAX_ADVISED_MODELS = 200
ADVICE_PERIOD_S = 14 * 86_400
ADVICE_STEP_S = 900
ADVICE_METRICS = ("running", "queued")
MONTH_HOURS = 730
_MONTH_S = 31 * 86_400
_SERVING = {ReplicaStatus.READY, ReplicaStatus.BACKOFF, ReplicaStatus.SLEEPING}
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


@endpoints.register("GET", "/admin/costs/advice", "viewer", "gateway", is_nonblocking=True)
async def advise_replicas(scope: AdminScope, request: AdminRequest) -> Page[CostAdviceView]:
    """Advise how many replicas each model needs, from its requests of the last 14 days, and what that saves.

    Models whose replicas are idle or too many come first. At most 200 models have advice.
    """
    slots: defaultdict[str, list[int]] = defaultdict(list)
    now, monotonic_now = time.time(), time.monotonic()
    for pool, replica in scope.replicas.replicas():
        if replica.health.status(monotonic_now) in _SERVING:
            slots[pool.model].append(replica.slots)
    models = sorted(slots)[:MAX_ADVISED_MODELS]
    async with scope.limiter.slot(request.principal):
        pools, days = await run_in_daemon_thread(lambda: _read_hardware(scope, now))
        views = []
        for model in models:  # one at a time, since each reads 14 days
            answer = await scope.series.query(
                f"model:{model}", ADVICE_METRICS, now - ADVICE_PERIOD_S, None, ADVICE_STEP_S
            )
            mine = [pool for pool in pools if pool.model == model]
            views.append(_build_advice(model, slots[model], mine, answer, days, now))
    order = list(SizeVerdict)
    views.sort(key=lambda view: (order.index(view.verdict), -view.saved_nano_dollars, view.model))
    return build_page(views, has_more=len(slots) > len(models))


def _build_advice(
    model: str,
    slots: Sequence[int],
    pools: Sequence[PoolConfig],
    answer: SeriesAnswer,
    days: Sequence[HardwareDay],
    now: float,
) -> CostAdviceView:
    """Return the advice for a model whose replicas have these slots."""
    concurrency = [
        None if running is None else running + (queued or 0.0)
        for running, queued in zip(*(answer.metrics[name] for name in ADVICE_METRICS), strict=True)
    ]
    advice = advise_size(len(slots), sum(slots), concurrency, answer.step_s)
    if advice.verdict is SizeVerdict.IDLE and any(pool.keep_idle for pool in pools):
        advice = msgspec.structs.replace(
            advice,
            verdict=SizeVerdict.FITS,
            advised_replicas=len(slots),
            reason=f"{advice.reason} `keep_idle` of the fleet file keeps them.",
        )
    by_day = Counter[int]()
    for each in days:
        by_day[each.day] += each.nano_dollars if each.model == model else 0
    spent, expected = forecast_month(by_day, now)
    price = max((pool.dollars_per_hour for pool in pools), default=0.0)
    saved = (len(slots) - advice.advised_replicas) * price * MONTH_HOURS
    return to_view(
        advice,
        CostAdviceView,
        model=model,
        replicas=len(slots),
        pools=[pool.name for pool in pools],
        owners=sorted({pool.owner for pool in pools if pool.owner}),
        saved_nano_dollars=round(saved * 10**9),
        month_nano_dollars=spent,
        expected_nano_dollars=expected,
    )


def _read_hardware(scope: AdminScope, now: float) -> tuple[Sequence[PoolConfig], list[HardwareDay]]:
    """Return the declared pools and the costs of this month and the days before, as far as there are such records."""
    pools = () if scope.fleet_control is None else scope.fleet_control.read_pools()
    days = [] if scope.store is None else scope.hardware_costs.list_days(now - _MONTH_S, now)
    return pools, days
