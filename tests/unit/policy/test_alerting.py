"""States of alerts under a virtual clock."""

from __future__ import annotations

import pytest

from argosy.policy.alerting import (
    Alert,
    AlertCondition,
    ConditionTimer,
    Severity,
    compute_fingerprint,
    update_alerts,
)

START = 1_790_000_000.0
Alerts = dict[str, Alert]


def condition(
    *, is_firing: bool | None, severity: Severity = "page", model: str = "chat"
) -> AlertCondition:
    return AlertCondition(
        name="NoReplica",
        labels={"model": model},
        severity=severity,
        is_firing=is_firing,
        summary="No replica",
        description="",
        runbook="noreplica",
    )


class Rounds:
    """Rounds of one condition, ten seconds apart unless the clock steps."""

    def __init__(self, severity: Severity = "page") -> None:
        self.severity = severity
        self.now = START
        self.alerts: Alerts = {}
        self.transitions: list[tuple[float, bool]] = []
        self.was_firing = False

    @property
    def is_firing(self) -> bool:
        return any(each.is_firing for each in self.alerts.values())

    def run(
        self,
        is_firing: bool | None,
        rounds: int = 1,
        *,
        step_s: float = 0.0,
        is_listed: bool = True,
        is_complete: bool = True,
    ) -> None:
        for _ in range(rounds):
            self.now += 10.0 + step_s
            self.alerts = update_alerts(
                self.alerts,
                [condition(is_firing=is_firing, severity=self.severity)] if is_listed else [],
                is_complete=is_complete,
                now=self.now,
                elapsed_s=10.0 + step_s,
            )
            if self.is_firing != self.was_firing:
                self.transitions.append((self.now - START, self.is_firing))
                self.was_firing = self.is_firing


@pytest.mark.parametrize(("severity", "keep_s"), [("page", 300.0), ("ticket", 1800.0)])
def test_fires_at_once_and_ends_after_the_quiet_time_of_its_severity(
    severity: Severity, keep_s: float
) -> None:
    rounds = Rounds(severity)
    rounds.run(False, 3)
    rounds.run(True, 6)
    rounds.run(False, 400)

    assert rounds.transitions == [(40.0, True), (90.0 + keep_s, False)]


@pytest.mark.parametrize(
    "silence",
    [
        {"is_firing": None, "rounds": 1000},
        {"is_firing": False, "rounds": 1000, "is_listed": False, "is_complete": False},
        {"is_firing": False, "rounds": 1, "step_s": 3600.0},
        {"is_firing": False, "rounds": 1, "step_s": -3600.0},
    ],
    ids=["no-data", "source-failed", "clock-forward", "clock-back"],
)
@pytest.mark.parametrize("is_firing", [False, True])
def test_missing_data_and_steps_of_the_clock_change_nothing(
    silence: dict[str, float], is_firing: bool
) -> None:
    rounds = Rounds()
    rounds.run(is_firing, 3)
    before = list(rounds.transitions)
    rounds.run(**silence)  # type: ignore[arg-type]

    assert rounds.transitions == before
    assert rounds.is_firing is is_firing


def test_ends_when_a_complete_round_leaves_its_condition_out() -> None:
    rounds = Rounds()
    rounds.run(True)
    rounds.run(False, 40, is_listed=False)

    assert [is_firing for _, is_firing in rounds.transitions] == [True, False]


def test_flapping_alert_keeps_firing_until_an_hour_was_quiet() -> None:
    rounds = Rounds()
    for _ in range(20):  # an hour and 40 minutes
        rounds.run(True, 1)
        rounds.run(False, 31)
    rounds.run(False, 400)

    assert [is_firing for _, is_firing in rounds.transitions] == [True, False, True, False]


def test_bounds_firing_alerts_and_forgets_ended_ones() -> None:
    alerts = update_alerts(
        {},
        [condition(is_firing=True, model=f"m{index}") for index in range(1500)],
        is_complete=True,
        now=START,
        elapsed_s=10.0,
    )
    assert len(alerts) == 1000

    for round_ in range(11):
        alerts = update_alerts(
            alerts, [], is_complete=True, now=START + round_ * 30, elapsed_s=30.0
        )
    assert len(alerts) == 200  # ended ones

    alerts = update_alerts(alerts, [], is_complete=True, now=START + 90_000, elapsed_s=30.0)
    assert not alerts


def test_fingerprint_is_that_of_alertmanager() -> None:
    assert compute_fingerprint({}) == "cbf29ce484222325"
    assert compute_fingerprint({"a": "b", "c": "d"}) == compute_fingerprint({"c": "d", "a": "b"})
    assert compute_fingerprint({"a": "b"}) != compute_fingerprint({"ab": ""})


def test_timer_counts_observed_time_only() -> None:
    timer = ConditionTimer()
    assert timer.observe("a", holds=True, now=0.0) == 0.0
    assert timer.observe("a", holds=True, now=20.0) == 20.0
    assert timer.observe("a", holds=True, now=3620.0) == 50.0
    assert timer.observe("a", holds=True, now=20.0) == 50.0
    assert timer.observe("a", holds=False, now=30.0) == 0.0
    assert timer.observe("a", holds=True, now=40.0) == 0.0


def test_timer_does_not_know_whether_what_it_never_saw_over_lasts_too_long() -> None:
    timer = ConditionTimer()
    judged = [timer.judge("old", holds=True, limit_s=30.0, now=now)[1] for now in (0, 15, 30)]
    assert judged == [None, None, True]
    values = [(True, 50), (False, 60), (True, 70), (True, 110)]
    judged = [timer.judge("old", holds=holds, limit_s=30.0, now=now)[1] for holds, now in values]
    assert judged == [True, False, False, True]
