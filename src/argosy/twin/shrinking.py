"""Shrinking: the fewest requests and faults with which a failing seed still breaks the same invariant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from argosy.twin.run import Plan, make_plan, run_scenario
from argosy.twin.scenario import RandomFaults, Scenario
from argosy.twin.workload import SimulatedRequest

T = TypeVar("T")
MAX_RUNS = 400
"""Runs of one shrinking."""
_VARIABLE = re.compile(r"\S*\d\S*")


def shrink(scenario: Scenario, seed: int) -> Scenario:
    """Return a scenario without anything random that breaks the same invariant as a seed of `scenario`.

    It has as few requests and faults as `MAX_RUNS` runs find: halves of them are dropped, then quarters, and so on
    (Zeller & Hildebrandt, delta debugging, 2002). A scenario that breaks none is returned with all of its requests.
    """
    plan = make_plan(scenario, seed)
    result = run_scenario(scenario, seed, plan)
    failure, ended_s = _classify(result.failure), result.simulated_s
    budget = iter(range(MAX_RUNS))

    def fails(plan: Plan) -> bool:
        return _classify(run_scenario(scenario, seed, plan).failure) == failure

    if failure:  # what was to come later had no part in it
        plan = Plan(
            tuple(each for each in plan.requests if (each.at_s or 0.0) <= ended_s),
            tuple(each for each in plan.faults if each.at_s <= ended_s),
        )
        faults = _reduce(plan.faults, lambda kept: fails(plan._replace(faults=kept)), budget)
        plan = plan._replace(faults=faults)
        requests = _reduce(
            plan.requests, lambda kept: fails(plan._replace(requests=_repair(kept))), budget
        )
        plan = plan._replace(requests=_repair(requests))
        faults = _reduce(plan.faults, lambda kept: fails(plan._replace(faults=kept)), budget)
        plan = plan._replace(faults=faults)
    ends = [each.at_s + each.duration_s for each in plan.faults]
    # When a turn begins that follows another one is known in the run only.
    ends += [scenario.duration_s if each.at_s is None else each.at_s for each in plan.requests]
    return msgspec.structs.replace(
        scenario,
        duration_s=min(scenario.duration_s, max(ends, default=0.0) + 1.0),
        requests=plan.requests,
        faults=plan.faults,
        random_faults=RandomFaults(),
    )


def _classify(failure: str) -> str:
    """Return what was broken, without the names and numbers of what broke it."""
    return _VARIABLE.sub("#", failure)


def _repair(requests: tuple[SimulatedRequest, ...]) -> tuple[SimulatedRequest, ...]:
    """Leave out turns whose earlier turn is not there."""
    numbers: set[int] = set()
    kept = []
    for request in requests:
        if request.after is None or request.after in numbers:
            numbers.add(request.number)
            kept.append(request)
    return tuple(kept)


def _reduce(
    items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool], budget: Iterator[int]
) -> tuple[T, ...]:
    """Return the items without those that are not needed for a failure."""
    size = max(1, len(items) // 2)
    while items:
        start = 0
        while start < len(items):
            if next(budget, None) is None:
                return items
            kept = items[:start] + items[start + size :]
            if fails(kept):
                items = kept
            else:
                start += size
        if size == 1:
            return items
        size = max(1, size // 2)
    return items
