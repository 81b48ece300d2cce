"""Watch over costs: when a budget is used up at the present rate, and why a request is an outlier."""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from argosy.policy.reservation import Rates
from argosy.protocol import TokenUsage

BUDGET_STEPS_PERCENT = (50, 80, 100)
"""Used shares of a budget at which people are notified."""
DAY_S = 86_400
MONTH_MEAN_DAYS = 7
"""Days whose mean is expected of the rest of a month."""
MIN_ELAPSED_FRACTION = 0.01
"""Part of a period before which its rate says nothing."""
OUTLIER_PERIOD_S = 7 * 86_400
OUTLIER_FACTOR = 10
"""Multiple of the 99th percentile of its project and model from which the cost of a request is an outlier."""
OUTLIER_FLOOR_NANO_DOLLARS = 10_000_000
"""Smallest cost of an outlier, one cent."""
OUTLIER_MIN_REQUESTS = 100
"""Requests of a project and model without which there is no 99th percentile."""
MAX_OUTLIERS_PER_DAY = 20
_CACHED_SHARE = 0.5


class BudgetForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a budget in its present period. Times are in seconds since the epoch."""

    used: int
    starts_at: float
    ends_at: float
    expected: int
    """Use at the end of the period if the rate stays as it is."""
    exhausted_at: float | None = None
    """When the budget is used up at this rate. None if the period ends first, or has just begun."""
    step_percent: int = 0
    """Highest of `BUDGET_STEPS_PERCENT` that is reached; 0 if none is."""


def forecast_budget(
    used: int, amount: int, period: tuple[float, float], now: float
) -> BudgetForecast:
    """Return the use of a budget of `amount` units, and when it is used up at the rate since the period began."""
    starts_at, ends_at = period
    elapsed_s, length_s = now - starts_at, ends_at - starts_at
    expected, exhausted_at = used, None
    if used >= amount:
        exhausted_at = now
    if elapsed_s >= MIN_ELAPSED_FRACTION * length_s:
        expected = round(used * length_s / elapsed_s)
        if amount > used and expected > amount:
            exhausted_at = starts_at + elapsed_s * amount / used
    reached = [step for step in BUDGET_STEPS_PERCENT if used * 100 >= step * amount]
    return BudgetForecast(
        used=used,
        starts_at=starts_at,
        ends_at=ends_at,
        expected=expected,
        exhausted_at=exhausted_at,
        step_percent=max(reached, default=0),
    )


def forecast_month(days: Mapping[int, int], now: float) -> tuple[int, int]:
    """Return what this month (UTC) has cost, and what it will at the mean of the last complete days, at most 7.

    Args:
        days: Cost by day since the epoch.
        now: Seconds since the epoch.
    """
    today = int(now // DAY_S)
    date = datetime.fromtimestamp(now, UTC)
    first = today - date.day + 1
    spent = sum(cost for day, cost in days.items() if day >= first)
    recent = [days[day] for day in range(today - MONTH_MEAN_DAYS, today) if day in days]
    if not recent:
        return spent, spent
    left_s = (first + monthrange(date.year, date.month)[1]) * DAY_S - now
    return spent, spent + round(sum(recent) / len(recent) * left_s / DAY_S)


def explain_outlier(usage: TokenUsage, typical: TokenUsage, rates: Rates) -> str:
    """Return what makes a request expensive, as the kind of token whose cost exceeds the typical one the most.

    Args:
        usage: Tokens of the request.
        typical: Mean tokens of the requests of its project and model.
        rates: Prices when it ended.
    """
    uncached = usage.prompt_tokens - usage.cached_tokens
    typical_uncached = typical.prompt_tokens - typical.cached_tokens
    output_excess = (usage.output_tokens - typical.output_tokens) * rates.output
    if output_excess >= (uncached - typical_uncached) * rates.input:
        return f"long output: {usage.output_tokens:,} tokens, {typical.output_tokens:,} on average"
    usual_share = typical.cached_tokens / max(1, typical.prompt_tokens)
    share = usage.cached_tokens / max(1, usage.prompt_tokens)
    if usual_share >= _CACHED_SHARE > share:
        return f"no cache: {share:.0%} of the prompt was cached, {usual_share:.0%} on average"
    return f"long prompt: {usage.prompt_tokens:,} tokens, {typical.prompt_tokens:,} on average"
