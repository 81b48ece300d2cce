"""Service level objectives as rules for Prometheus, and as documents of sloth, Pyrra and OpenSLO.

All formats read the two counters of a gateway, so that they agree with the evaluation by the fleet itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from argosy.policy.objectives.burn_rates import BURN_WINDOWS, OUTAGE_WINDOW, BurnWindow
from argosy.policy.objectives.objective import Objective

REQUESTS = "argosy_objective_requests_total"
MISSES = "argosy_objective_misses_total"
SERVICE = "argosy"
_DAY_S = 86_400
_UNITS = ((_DAY_S, "d"), (3600, "h"), (60, "m"))
Document = dict[str, Any]


def build_prometheus_rules(objectives: Sequence[Objective]) -> list[Document]:
    """Return a file of alerting rules for Prometheus 2.42 or later."""
    groups = []
    for objective in objectives:
        selector = f'{{objective="{objective.name}"}}'
        pages, tickets = (
            " or ".join(
                _burn_expression(each, objective)
                for each in BURN_WINDOWS
                if each.severity == severity
            )
            for severity in ("page", "ticket")
        )
        rules = [
            _rule("BudgetBurnsFast", pages, "page", objective),
            _rule("BudgetBurnsSlowly", tickets, "ticket", objective),
            _rule("ObjectiveOutage", _burn_expression(OUTAGE_WINDOW, objective), "page", objective),
            _rule("ObjectiveUnknown", f"absent({REQUESTS}{selector})", "ticket", objective)
            | {"for": "10m"},
        ]
        groups.append({"name": f"argosy-objective-{objective.name}", "rules": rules})
    return [{"groups": groups}]


def build_sloth(objectives: Sequence[Objective]) -> list[Document]:
    """Return a specification for `sloth generate`."""
    slos = [
        {
            "name": each.name,
            "objective": each.target_percent,
            "description": each.description,
            "sli": {
                "events": {
                    "error_query": f"sum(rate({MISSES}{_selector(each)}[{{{{.window}}}}]))",
                    "total_query": f"sum(rate({REQUESTS}{_selector(each)}[{{{{.window}}}}]))",
                }
            },
            "alerting": {
                "name": f"ArgosyObjective-{each.name}",
                "labels": each.labels,
                "page_alert": {"labels": {"severity": "page"}},
                "ticket_alert": {"labels": {"severity": "ticket"}},
            },
        }
        for each in objectives
    ]
    return [{"version": "prometheus/v1", "service": SERVICE, "slos": slos}]


def build_pyrra(objectives: Sequence[Objective]) -> list[Document]:
    """Return an object of Pyrra for each objective."""
    return [
        {
            "apiVersion": "pyrra.dev/v1alpha1",
            "kind": "ServiceLevelObjective",
            "metadata": {"name": each.name},
            "spec": {
                "target": f"{each.target_percent:g}",
                "window": _duration(each.window_s),
                "description": each.description,
                "indicator": {
                    "ratio": {
                        "errors": {"metric": f"{MISSES}{_selector(each)}"},
                        "total": {"metric": f"{REQUESTS}{_selector(each)}"},
                    }
                },
            },
        }
        for each in objectives
    ]


def build_openslo(objectives: Sequence[Objective]) -> list[Document]:
    """Return an SLO of OpenSLO v1 for each objective."""

    def source(metric: str, objective: Objective) -> Document:
        query = f"sum({metric}{_selector(objective)})"
        return {"metricSource": {"type": "Prometheus", "spec": {"query": query}}}

    return [
        {
            "apiVersion": "openslo/v1",
            "kind": "SLO",
            "metadata": {"name": each.name},
            "spec": {
                "service": SERVICE,
                "description": each.description,
                "indicator": {
                    "metadata": {"name": each.name},
                    "spec": {
                        "ratioMetric": {
                            "counter": True,
                            "bad": source(MISSES, each),
                            "total": source(REQUESTS, each),
                        }
                    },
                },
                "timeWindow": [{"duration": _duration(each.window_s), "isRolling": True}],
                "budgetingMethod": "Occurrences",
                "objectives": [{"displayName": each.name, "target": each.target_percent / 100}],
            },
        }
        for each in objectives
    ]


RULE_FORMATS: dict[str, Callable[[Sequence[Objective]], list[Document]]] = {
    "prometheus": build_prometheus_rules,
    "sloth": build_sloth,
    "pyrra": build_pyrra,
    "openslo": build_openslo,
}


def _rule(name: str, expression: str, severity: str, objective: Objective) -> Document:
    return {
        "alert": name,
        "expr": expression,
        "labels": {"severity": severity, **objective.labels},
        "annotations": {"summary": f"{objective.name}: {objective.description}"},
    }


def _burn_expression(window: BurnWindow, objective: Objective) -> str:
    """Return when both windows exceed the rate. 0/0 without requests is no number, and exceeds nothing."""
    threshold = f"{window.max_miss_rate(objective.budget_share):.9g}"
    selector = _selector(objective)
    conditions = [
        f"sum(rate({MISSES}{selector}[{each}])) / sum(rate({REQUESTS}{selector}[{each}])) > {threshold}"
        for each in (_duration(window.long_s), _duration(window.short_s))
    ]
    # `increase` extrapolates, so a whole number of misses is not one any more.
    least = window.min_misses - 0.5
    long = _duration(window.long_s)
    conditions.append(f"sum(increase({MISSES}{selector}[{long}])) > {least}")
    return f"({' and '.join(conditions)})"


def _selector(objective: Objective) -> str:
    return f'{{objective="{objective.name}"}}'


def _duration(seconds: float) -> str:
    size, unit = next(each for each in _UNITS if seconds % each[0] == 0)
    return f"{seconds / size:.0f}{unit}"
