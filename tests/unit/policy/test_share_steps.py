"""Shares of a candidate on the replicas of the stable version, by the verdict of the gate."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from argosy.policy.rollout import GateResult, GateVerdict, ShareAction, decide_share

PROMOTE, WAIT, WORSE = GateResult.PROMOTE, GateResult.INCONCLUSIVE, GateResult.ROLL_BACK


class Case(NamedTuple):
    percent: int
    step_s: float | None
    result: GateResult
    step: int | None
    elapsed_s: float
    blocker: str
    action: ShareAction
    following: int


@pytest.mark.parametrize(
    "case",
    [
        Case(0, 60.0, WAIT, None, 0.0, "not loaded", ShareAction.WAIT, 0),
        Case(0, 60.0, PROMOTE, 0, 59.0, "", ShareAction.WAIT, 0),
        Case(0, 60.0, WAIT, 0, 60.0, "", ShareAction.RAISE, 5),
        Case(0, 60.0, WORSE, 0, 1.0, "", ShareAction.ROLL_BACK, 0),
        Case(0, None, WAIT, None, 999.0, "", ShareAction.WAIT, 0),
        Case(5, 60.0, PROMOTE, 5, 59.0, "", ShareAction.WAIT, 5),
        Case(5, 60.0, WAIT, 5, 999.0, "", ShareAction.WAIT, 5),
        Case(5, 60.0, PROMOTE, 5, 60.0, "", ShareAction.RAISE, 25),
        Case(30, 60.0, PROMOTE, 30, 60.0, "", ShareAction.RAISE, 50),
        Case(30, 60.0, PROMOTE, 25, 60.0, "", ShareAction.WAIT, 30),
        Case(50, None, PROMOTE, 50, 999.0, "", ShareAction.WAIT, 50),
        Case(100, 60.0, PROMOTE, 100, 60.0, "", ShareAction.PROMOTE, 100),
        Case(100, None, WORSE, 100, 1.0, "", ShareAction.ROLL_BACK, 0),
        Case(5, 60.0, WORSE, 5, 1.0, "", ShareAction.ROLL_BACK, 0),
    ],
)
def test_share_follows_the_verdict_and_the_person(case: Case) -> None:
    verdict = GateVerdict(case.result, "reason", "r", case.step, 1.0, ())
    known = case.percent, case.step_s, verdict
    decision = decide_share(*known, "r", case.elapsed_s, case.blocker)
    assert (decision.action, decision.percent) == (case.action, case.following)
    if case.result is WORSE:
        later = decide_share(*known, "later", case.elapsed_s, case.blocker)
        assert later.action is ShareAction.WAIT
