"""Conditions of alerts about service level objectives: budgets that burn, and outages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from argosy.deployment import ObjectiveReader, ObjectiveStatus
from argosy.policy.alerting import AlertCondition, ConditionTimer
from argosy.policy.objectives import BudgetImpact, Objective
from argosy.process import run_in_daemon_thread

MAX_UNKNOWN_S = 300.0
"""Time for which counts may be incomplete before that is an alert."""


class ObjectiveAlerts:
    """Source of conditions about objectives. Use it from one event loop.

    While the reports of gateways are not complete, the conditions are unknown, so that alerts keep their state.
    """

    def __init__(
        self, reader: ObjectiveReader, list_objectives: Callable[[], Sequence[Objective]]
    ) -> None:
        self._reader = reader
        self._list_objectives = list_objectives
        self._timer = ConditionTimer()

    async def read_impact(self, model: str | None, since: float, now: float) -> list[BudgetImpact]:
        """Return what the objectives of a model have lost since a time; of all models for None.

        Raises:
            StoreError: The store cannot be used.
        """
        objectives = [
            each for each in self._list_objectives() if model is None or each.model in {None, model}
        ]
        return await run_in_daemon_thread(self._reader.read_impact, objectives, since, now)

    async def read(self, now: float) -> list[AlertCondition]:
        """Return the conditions at a time in seconds since the epoch.

        Raises:
            StoreError: The store cannot be used.
        """
        objectives = self._list_objectives()
        if not objectives:
            return []
        statuses = await run_in_daemon_thread(self._reader.read, objectives, now)
        problem = statuses[0].problem
        unknown_s = self._timer.observe("unknown", holds=bool(problem), now=now)
        conditions = [
            AlertCondition(
                name="ObjectivesUnknown",
                labels={},
                severity="ticket",
                is_firing=unknown_s >= MAX_UNKNOWN_S,
                summary="The counts of service level objectives are not complete",
                description=f"For {unknown_s:.0f} s: {problem}. Alerts of objectives keep their state.",
                runbook="objectivesunknown",
            )
        ]
        for status in statuses:
            conditions += _describe(status)
        return conditions


def _describe(status: ObjectiveStatus) -> list[AlertCondition]:
    objective, evaluation = status.objective, status.evaluation
    conditions: tuple[tuple[str, str, bool | None, str], ...] = (
        ("BudgetBurnsFast", "page", evaluation.is_paging, "burns its error budget fast"),
        ("BudgetBurnsSlowly", "ticket", evaluation.is_ticketing, "burns its error budget"),
        ("ObjectiveOutage", "page", evaluation.is_outage, "misses with half of all requests"),
    )
    return [
        AlertCondition(
            name=name,
            labels=objective.labels,
            severity="page" if severity == "page" else "ticket",
            is_firing=None if status.problem else is_firing,
            summary=f"The objective {objective.name} {summary}",
            description=f"The objective: {objective.description}. {status.explanation}",
            runbook=name.lower(),
        )
        for name, severity, is_firing, summary in conditions
    ]
