"""Lessons of the console: each runs within its bounds, and its claim holds in its figures."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from argosy.gateway import LessonRun
from argosy.lessons import LESSONS, run_lesson

BY_NAME = {lesson.id: lesson for lesson in LESSONS}
CLAIMS = {
    "batching": ("TTFT, 95th percentile", -1),
    "kv-cache": ("TTFT, 95th percentile", -1),
    "chunked-prefill": ("Time per token, 99th", -1),
    "speculation": ("Speed with 64 in the batch", 0),
    "fairness": ("TTFT, 95th percentile", -1),
    "load-balancers": ("TTFT, 95th percentile", -1),
    "consistent-hashing": ("Prompt tokens from the cache", 1),
    "autoscaling": ("Cost", -1),
    "rollout": ("Slow answers", -1),
    "error-budget": ("Minutes until a person is paged", -1),
    "region-failure": ("TTFT, 95th percentile", -1),
    "spot": ("Cost", -1),
    "dashboard": ("Cost", 0),
}
"""Figure of each claim, and whether the last variant has less (-1), more (1), or may be equal (0)."""
SOLUTIONS = (
    {"replicas": 3, "spot": 60},
    {"replicas": 6, "cache": 1, "routing": 1},
    {"replicas": 10, "spot": 80, "routing": 1},
    {"slots": 3, "routing": 1},
)
"""Values that meet the goals of each challenge."""


def run(name: str, **values: int) -> LessonRun:
    """Run a lesson on its shortest scale, unless `values` name another."""
    shortest = {each.name: each.minimum for each in BY_NAME[name].controls if each.name == "scale"}
    return run_lesson(name, BY_NAME[name].complete_values(shortest | values))


def check(result: LessonRun) -> None:
    """Check that a result has the shape that the console draws, and runs again with its identity."""
    assert result.plots
    for plot in result.plots:
        assert [line.label for line in plot.lines] == [*result.variants]
        assert all(len(line.values) == len(plot.x) for line in plot.lines)
    assert all(len(figure.values) == len(result.variants) for figure in result.figures)
    assert len(msgspec.json.encode(result)) < 100_000
    assert all(label in result.finding for label in result.variants)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_claim_holds_at_the_start_of_the_shortest_scale(name: str) -> None:
    result = run(name)
    check(result)
    label, sign = CLAIMS[name]
    values = next(figure.values for figure in result.figures if figure.label == label)
    before, after = values[0], values[-1]
    if name == "error-budget":
        assert before is None or (after is not None and after < before)
        budgets = result.figures[0].values
        assert all(budget is not None and budget < 0 for budget in budgets)
        return
    assert before is not None
    assert after is not None
    assert sign == 0 or sign * (after - before) > 0, result.finding


def test_policy_for_drafts_never_loses_where_a_fixed_number_does() -> None:
    result = run("speculation")
    _, fixed, policy = (line.values for line in result.plots[0].lines)
    assert min(value or 0.0 for value in policy) > 0.95
    assert min(value or 0.0 for value in fixed) < 0.95
    assert max(value or 0.0 for value in policy) > 1.5


@pytest.mark.parametrize(("challenge", "solution"), list(enumerate(SOLUTIONS)))
def test_challenge_has_a_solution_that_the_start_is_not(
    challenge: int, solution: dict[str, int]
) -> None:
    assert not all(goal.is_met for goal in run("dashboard", challenge=challenge).goals)
    assert all(goal.is_met for goal in run("dashboard", challenge=challenge, **solution).goals)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bound", ["minimum", "maximum"])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_lesson_runs_at_its_bounds(name: str, bound: str) -> None:
    values = {control.name: getattr(control, bound) for control in BY_NAME[name].controls}
    check(run(name, **values))


def test_process_runs_the_lesson_alike() -> None:
    values = BY_NAME["speculation"].complete_values({"drafts": 6})
    printed = subprocess.run(
        [sys.executable, "-m", "argosy.lessons", "speculation"],
        input=msgspec.json.encode(values),
        capture_output=True,
        check=True,
    ).stdout
    assert msgspec.json.decode(printed, type=LessonRun) == run("speculation", drafts=6)


def test_values_out_of_bounds_are_named() -> None:
    lesson = BY_NAME["fairness"]
    for values, problem in (({"flood": 55}, "in steps of 10"), ({"floods": 1}, "no control")):
        with pytest.raises(ValueError, match=problem):
            lesson.complete_values(values)
