"""Service level objectives: classification of errors, burn rates, missing data, and agreement with Prometheus."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest

from argosy.policy.objectives import (
    CODE_CLASSES,
    HOUR_S,
    RULE_FORMATS,
    SLOT_S,
    SLOW,
    Budget,
    CountHistory,
    Counts,
    EndedRequest,
    Evaluation,
    HourCounts,
    Objective,
    ReportCoverage,
    evaluate,
    explain,
    judge_request,
)
from argosy.protocol import ERROR_CODES
from argosy.settings import dump_yaml

DAY_S = 24 * HOUR_S
START = 1_700_000_000 // HOUR_S * HOUR_S
STRICT = Objective(name="strict", sli="availability", target=0.999)
ORDINARY = Objective(name="ordinary", sli="availability", target=0.99)
LAX = Objective(name="lax", sli="availability", target=0.95)
TTFT = Objective(name="fast", sli="ttft", target=0.95, below_s=0.8)
NO_BUDGET = Budget(Counts())
COMPLETED = EndedRequest("completed", "", False, True, 0.5, 2.0)

Slots = Mapping[int, Counts]
"""Counts by the start of their slot."""


class FullCoverage(ReportCoverage):
    """Reports without a gap."""

    def __init__(self) -> None:
        super().__init__({})

    def covers(self, start: int, end: int) -> bool:
        return end > start


def build_history(slots: Slots) -> CountHistory:
    hours: dict[int, list[tuple[int, int, int]]] = {}
    for start, counts in sorted(slots.items()):
        hours.setdefault(start - start % HOUR_S, []).append((start % HOUR_S // SLOT_S, *counts))
    history = CountHistory()
    for hour, rows in hours.items():
        history.replace_hour(hour, [HourCounts(*zip(*rows, strict=True))])
    return history


def evaluate_all(objective: Objective, slots: Slots, ends: Iterable[int]) -> dict[int, Evaluation]:
    history, coverage = build_history(slots), FullCoverage()
    return {end: evaluate(objective, history, coverage, NO_BUDGET, end) for end in ends}


def simulate(duration_s: int, requests: int, miss_share: Callable[[int], float]) -> Slots:
    """Return the same number of requests in each slot, and the share of misses at each second, rounded over time."""
    slots, due = {}, 0.0
    for start in range(0, duration_s, SLOT_S):
        due += requests * miss_share(start)
        misses, due = int(due), due - int(due)
        slots[START + start] = Counts(requests, misses)
    return slots


def test_every_error_code_is_classified() -> None:
    codes = {each.code for each in ERROR_CODES} | {"refused_by_replica"}
    assert codes == set(CODE_CLASSES)


@pytest.mark.parametrize(
    ("changes", "availability", "ttft"),
    [
        pytest.param({}, "", "", id="good"),
        pytest.param({"first_token_s": 0.9}, "", SLOW, id="slow"),
        pytest.param(
            {"status": "refused", "code": "overloaded", "first_token_s": None},
            *("overloaded", None),
            id="overload",
        ),
        pytest.param(
            {"status": "refused", "code": "rate_limit_exceeded", "first_token_s": None},
            *(None, None),
            id="own_limit",
        ),
        pytest.param(
            {"status": "failed", "code": "upstream_failed", "first_token_s": None},
            *("upstream_failed", SLOW),
            id="failed_late",
        ),
        pytest.param({"status": "failed"}, "failed", "", id="broken_stream"),
        pytest.param(
            {"status": "stopped", "code": "deadline_exceeded", "first_token_s": None},
            *("deadline_exceeded", SLOW),
            id="deadline_of_the_server",
        ),
        pytest.param(
            {
                "status": "stopped",
                "code": "deadline_exceeded",
                "has_own_deadline": True,
                "first_token_s": None,
                "duration_s": 0.5,
            },
            *(None, None),
            id="deadline_of_the_client",
        ),
        pytest.param(
            {"status": "cancelled", "first_token_s": None, "duration_s": 0.5},
            *(None, None),
            id="left_early",
        ),
        pytest.param(
            {"status": "cancelled", "first_token_s": None}, None, SLOW, id="left_after_a_long_wait"
        ),
        pytest.param({"status": "cancelled"}, "", "", id="left_during_the_answer"),
        pytest.param({"is_stream": False}, "", None, id="in_one_piece"),
    ],
)
def test_requests_count_by_error_code_and_by_wait(
    changes: dict[str, object], availability: str | None, ttft: str | None
) -> None:
    request = msgspec.structs.replace(COMPLETED, **changes)
    assert judge_request(STRICT, request) == availability
    assert judge_request(TTFT, request) == ttft


@pytest.mark.parametrize(
    ("objective", "miss_share", "requests", "limit_s"),
    [
        pytest.param(STRICT, 1.0, 20, 52, id="outage_at_99.9"),
        pytest.param(STRICT, 0.1, 20, 519, id="a_tenth_at_99.9"),
        pytest.param(ORDINARY, 1.0, 20, 150, id="outage_at_99"),
        pytest.param(ORDINARY, 0.2, 20, 2592, id="a_fifth_at_99"),
        pytest.param(LAX, 1.0, 20, 150, id="outage_at_95"),
    ],
)
def test_pages_in_time_and_stops_after_the_fault(
    objective: Objective, miss_share: float, requests: int, limit_s: int
) -> None:
    fault_at, lasts_s = 6 * HOUR_S, limit_s + 600
    slots = simulate(
        fault_at + lasts_s + 2 * HOUR_S,
        requests,
        lambda at: miss_share if fault_at <= at < fault_at + lasts_s else 0.0,
    )
    results = evaluate_all(objective, slots, [each + SLOT_S for each in slots])
    paged = [
        end - START - fault_at for end, each in results.items() if each.is_paging or each.is_outage
    ]
    assert 0 < paged[0] <= limit_s + 20
    assert paged[-1] <= lasts_s + 1800  # the longest of the short windows of pages


def test_lost_reports_decide_nothing() -> None:
    """A gateway that is silent, gone, stopped or ahead, and a gap after a restart."""
    end = START + HOUR_S
    steady = dict.fromkeys(range(START, end, SLOT_S), False)
    late = dict.fromkeys(range(START, end - 60, SLOT_S), False)
    gone = dict.fromkeys(range(START, end - 600, SLOT_S), False)
    stopped = late | {end - 60: True}
    ahead = steady | {end + HOUR_S: False}
    assert not ReportCoverage({"a": steady}).find_problem(end)
    assert not ReportCoverage({"a": steady, "b": gone, "c": stopped}).find_problem(end)
    assert "b has reported no counts for 70 s" in ReportCoverage(
        {"a": steady, "b": late}
    ).find_problem(end)
    assert "clock of gateway b" in ReportCoverage({"a": steady, "b": ahead}).find_problem(end)
    assert ReportCoverage({}).find_problem(end) == "no gateway reports counts"

    history = build_history(simulate(HOUR_S, 20, lambda _: 1.0))
    recent = {end - 10: False, end - 20: False}
    after_gap = ReportCoverage({"a": recent})
    result = evaluate(STRICT, history, after_gap, NO_BUDGET, end)
    assert (result.is_paging, result.is_outage, result.is_ticketing) == (None, None, None)


def test_sentences_explain_budget_and_rate() -> None:
    history = build_history(simulate(HOUR_S, 10, lambda _: 1 / 64))
    budget = Budget(Counts(1_000_000, 700), {"overloaded": 600, SLOW: 100})
    result = evaluate(STRICT, history, FullCoverage(), budget, START + HOUR_S)
    assert explain(STRICT, result, budget) == (
        "56 of 3,600 requests missed in the last hour, 15.6 times the rate that the budget permits."
        " At this rate the 30-day budget (30% left) is gone in 13 h 54 min."
        " 86% of its misses ended with overloaded."
    )
    spent = Budget(Counts(1_000_000, 1400))
    assert "is spent (-40% left)" in explain(STRICT, result, spent)
    assert "is spent 3 times over" in explain(STRICT, result, Budget(Counts(1_000_000, 3000)))
    assert Budget(Counts(99, 99)).remaining(STRICT) is None


QUIET_RATES = (1 / 60, 0.1, 1.0, 10.0)
"""Requests per second."""


@pytest.mark.parametrize("days", [3, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_quiet_days_page_nobody(days: int) -> None:
    """Random errors at a third of what the objective permits, at four levels of traffic with a daily swing."""
    generator = random.Random(49)
    for rate in QUIET_RATES:
        slots = {}
        for start in range(START, START + days * DAY_S, SLOT_S):
            mean = rate * SLOT_S * (1 + 0.5 * (start % DAY_S > DAY_S / 2) - 0.25)
            requests = int(generator.expovariate(1 / mean) + 0.5)
            misses = sum(generator.random() < 0.0003 for _ in range(requests))
            if requests:
                slots[start] = Counts(requests, misses)
        ends = range(START + HOUR_S, START + days * DAY_S, 60)
        results = evaluate_all(STRICT, slots, ends)
        assert not [end for end, each in results.items() if each.is_paging or each.is_outage]


def burst(at: int) -> float:
    """Errors of several strengths and lengths within some hours."""
    minute = at // 60
    if 60 <= minute < 70:
        return 1.0
    if 130 <= minute < 190:
        return 0.012
    return 0.4 if 300 <= minute < 330 else 0.0


def slow_burn(at: int) -> float:
    """Errors that only tickets notice."""
    return 0.0045 if DAY_S <= at < DAY_S + 12 * HOUR_S else 0.0


@pytest.mark.parametrize(
    ("objective", "profile", "interval_s", "duration_s"),
    [
        pytest.param(STRICT, burst, 10, 10 * HOUR_S, id="pages"),
        pytest.param(LAX, burst, 10, 2 * HOUR_S, id="outage"),
        pytest.param(STRICT, slow_burn, 300, 3 * DAY_S, id="tickets"),
    ],
)
def test_rendered_rules_agree_with_the_evaluation(
    tmp_path: Path,
    objective: Objective,
    profile: Callable[[int], float],
    interval_s: int,
    duration_s: int,
) -> None:
    """Prometheus gets the counters as a gateway exposes them, and fires in the same minutes, give or take one."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    slots = simulate(duration_s, 40, profile)
    step_s = 6 * interval_s
    results = evaluate_all(objective, slots, range(START + step_s, START + duration_s, step_s))
    fields = {
        "BudgetBurnsFast": "is_paging",
        "BudgetBurnsSlowly": "is_ticketing",
        "ObjectiveOutage": "is_outage",
    }
    (rules,) = RULE_FORMATS["prometheus"]([objective])
    by_name = {rule["alert"]: rule for rule in rules["groups"][0]["rules"]}
    tests, num_firing, num_changes = [], 0, 0
    for name, field in fields.items():
        states = {end - START: getattr(each, field) for end, each in results.items()}
        for at, fires in states.items():
            neighbours = {states.get(at - step_s, fires), states.get(at + step_s, fires)}
            if neighbours != {fires}:
                num_changes += 1
                continue
            num_firing += fires
            expected = {
                "exp_labels": by_name[name]["labels"],
                "exp_annotations": by_name[name]["annotations"],
            }
            tests.append(
                {
                    "eval_time": f"{at}s",
                    "alertname": name,
                    "exp_alerts": [expected] if fires else [],
                }
            )
    assert num_firing > 5
    assert num_changes < 30
    series = []
    for metric, field in (("requests", "requests"), ("misses", "misses")):
        total, values = 0, []
        for at in range(0, duration_s + interval_s, interval_s):
            values.append(str(total))
            total += sum(
                getattr(slots.get(START + each, Counts()), field)
                for each in range(at, at + interval_s, SLOT_S)
            )
        name = f'argosy_objective_{metric}_total{{objective="{objective.name}"}}'
        series.append({"series": name, "values": " ".join(values)})
    (tmp_path / "rules.yml").write_text(dump_yaml(rules))
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": f"{step_s}s",
        "tests": [{"interval": f"{interval_s}s", "input_series": series, "alert_rule_test": tests}],
    }
    (tmp_path / "test.yml").write_text(dump_yaml(document))
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "test.yml"]):
        done = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[:3000]
