"""Conditions of alerts about budgets: 50, 80 or 100 % of a limit for a day or a month are used."""

from __future__ import annotations

import time
from collections.abc import Sequence

from argosy.policy import BUDGET_STEPS_PERCENT
from argosy.policy.alerting import AlertCondition
from argosy.process import run_in_daemon_thread
from argosy.store import Budget, Ledger, LimitsAndPrices, list_budgets

READ_INTERVAL_S = 60.0
"""Interval at which the ledger is summed. Between two readings conditions stay as they are."""
MAX_CONDITIONS = 1000


class BudgetAlerts:
    """Source of conditions about budgets. Use it from one event loop. They name owners by their ids."""

    def __init__(self, ledger: Ledger, limits: LimitsAndPrices) -> None:
        self._ledger = ledger
        self._limits = limits
        self._read_at = float("-inf")
        self._conditions: list[AlertCondition] = []

    async def read(self, now: float) -> list[AlertCondition]:
        """Return the conditions of the budgets with the largest used shares.

        Raises:
            StoreError: The store cannot be used, so there are no data.
        """
        if not 0 <= now - self._read_at < READ_INTERVAL_S:
            budgets = await run_in_daemon_thread(self._list_budgets, now)
            self._conditions = [
                _describe_step(budget, step)
                for budget in budgets
                if budget.forecast.step_percent
                for step in BUDGET_STEPS_PERCENT
            ][:MAX_CONDITIONS]
            self._read_at = now
        return self._conditions

    def _list_budgets(self, now: float) -> Sequence[Budget]:
        return list_budgets(self._ledger, self._limits.list_limits(), now)


def _describe_step(budget: Budget, step: int) -> AlertCondition:
    """Return the condition that a step is the highest that is reached."""
    limit, forecast = budget.limit, budget.forecast
    unit = "dollars" if limit.unit == "nano_dollars" else limit.unit
    scope = f"the {limit.owner_kind} {limit.owner}" + (f" for {limit.model}" if limit.model else "")
    if forecast.used >= limit.amount:
        outlook = "Further requests are refused until the period ends."
    elif forecast.exhausted_at is None:
        outlook = "At the present rate it lasts until the period ends."
    else:
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(forecast.exhausted_at))
        outlook = f"At the present rate it is used up on {at}."
    return AlertCondition(
        name="BudgetUsed",
        labels={
            "limit": limit.id,
            "owner_kind": limit.owner_kind,
            "owner": limit.owner,
            "percent": str(step),
        },
        severity="ticket",
        is_firing=forecast.step_percent == step,
        summary=f"{step} % of the limit of {unit} a {limit.window} of {scope} are used",
        description=f"{budget.used_fraction:.0%} are used. {outlook}",
        runbook="budgetused",
    )
