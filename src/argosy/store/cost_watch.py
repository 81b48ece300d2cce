"""Budgets with their use and forecast, and requests whose cost is an outlier."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.policy import BudgetForecast, calendar_bounds, explain_outlier, forecast_budget
from argosy.protocol import TokenUsage
from argosy.store.accounts import Accounts
from argosy.store.ledger import Ledger, UsageReportRow
from argosy.store.limits_and_prices import LimitsAndPrices, PriceList
from argosy.store.records import Limit, LimitUnit, OwnerKind, UsageRecord

_USED: dict[LimitUnit, tuple[str, ...]] = {
    "nano_dollars": ("nano_dollars",),
    "tokens": ("input_tokens", "output_tokens"),
    "input_tokens": ("input_tokens",),
    "output_tokens": ("output_tokens",),
    "requests": ("requests",),
}
"""Fields of a report that count against a limit, by its unit."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Limit for a calendar period, with its use."""

    limit: Limit
    forecast: BudgetForecast

    @property
    def used_fraction(self) -> float:
        """Used share of the budget."""
        return self.forecast.used / self.limit.amount if self.limit.amount else 1.0


class CostOutlier(msgspec.Struct, frozen=True, kw_only=True):
    """Request that cost far more than others of its project and model."""

    record: UsageRecord
    p99_nano_dollars: int
    """99th percentile of the cost of these."""
    reason: str


def list_budgets(ledger: Ledger, limits: Sequence[Limit], now: float) -> list[Budget]:
    """Return the limits for a day or a month among `limits`, those with the largest used share first.

    Usage counts as it counts against limits. `now` is in seconds since the epoch.
    """
    shown = [each for each in limits if each.unit in _USED and each.window in {"day", "month"}]
    owners: dict[tuple[OwnerKind, float], set[str]] = {}
    periods = {
        limit.id: calendar_bounds("day" if limit.window == "day" else "month", now)
        for limit in shown
    }
    for limit in shown:
        owners.setdefault((limit.owner_kind, periods[limit.id][0]), set()).add(limit.owner)
    sums = {
        key: ledger.sum_by_owner(key[0], sorted(names), key[1]) for key, names in owners.items()
    }
    budgets = []
    for limit in shown:
        period = periods[limit.id]
        rows = sums[limit.owner_kind, period[0]].get(limit.owner, [])
        used = sum(_count(row, limit.unit) for row in rows if limit.model in {None, row.model})
        forecast = forecast_budget(used, limit.amount, period, now)
        budgets.append(Budget(limit=limit, forecast=forecast))
    return sorted(budgets, key=lambda each: (-each.used_fraction, each.limit.id))


def list_outliers(
    ledger: Ledger, accounts: Accounts, prices: LimitsAndPrices, now: float
) -> list[CostOutlier]:
    """Return the outliers of the last 7 days, latest day first and the most expensive ones of a day first.

    Only the latest records are searched, as many as `Ledger.list_latest` searches.
    """
    found = ledger.find_cost_outliers(now)
    price_list = PriceList(prices.list_prices())
    tiers = accounts.find_tiers({record.project for record, _, _ in found})
    outliers = []
    for record, p99, typical in found:
        usage = TokenUsage(record.input_tokens, record.cached_tokens, record.output_tokens)
        rates = price_list.rates_at(record.model, tiers.get(record.project, ""), record.ended_at)
        reason = explain_outlier(usage, typical, rates)
        outliers.append(CostOutlier(record=record, p99_nano_dollars=p99, reason=reason))
    return outliers


def _count(row: UsageReportRow, unit: LimitUnit) -> int:
    return sum(getattr(row, name) for name in _USED[unit])
