"""Rollout of a candidate beside the stable version on the same replicas: only its share of the users changes."""

from __future__ import annotations

import enum
from typing import NamedTuple

from argosy.policy.rollout.gate import GateResult, GateVerdict

SHARE_STEPS = (5, 25, 50, 100)
"""Shares of the candidate in percent. After the last step it is the stable version."""
SHADOW_FRACTION = 0.1
"""Part of the requests that is copied to the candidate before it has a share."""


class ShareAction(enum.StrEnum):
    """Next change of a candidate's share."""

    WAIT = "wait"
    RAISE = "raise"
    PROMOTE = "promote"
    """The candidate becomes the stable version."""
    ROLL_BACK = "roll_back"


class ShareDecision(NamedTuple):
    """Change of a share, and why."""

    action: ShareAction
    reason: str
    percent: int = 0
    """Share after the change."""


def decide_share(
    percent: int,
    step_s: float | None,
    verdict: GateVerdict,
    rollout: str,
    elapsed_s: float,
    blocker: str = "",
) -> ShareDecision:
    """Decide about the share of a candidate.

    Args:
        percent: Share of the users whom it answers now.
        step_s: Shortest time of a step. None if a person sets the share, so that it is only rolled back.
        verdict: Verdict of the gate.
        rollout: Id of the comparison.
        elapsed_s: Time since the share was set, or since the first copies of requests.
        blocker: Why the candidate cannot answer copies yet. Empty if it can.
    """
    if verdict.rejects(rollout):
        return ShareDecision(ShareAction.ROLL_BACK, verdict.reason)
    if step_s is None:
        reason = "a person sets its share" + (f"; {verdict.reason}" if percent else "")
        return ShareDecision(ShareAction.WAIT, reason, percent)
    if blocker:
        return ShareDecision(ShareAction.WAIT, blocker, percent)
    if elapsed_s < step_s:
        reason = f"the step lasts {step_s - elapsed_s:.0f} s longer"
        return ShareDecision(ShareAction.WAIT, reason, percent)
    if not percent:  # an adapter with few requests has no copies to wait for
        return ShareDecision(
            ShareAction.RAISE, "no copy of a request speaks against it", SHARE_STEPS[0]
        )
    if verdict.result is not GateResult.PROMOTE or verdict.step != percent:
        return ShareDecision(ShareAction.WAIT, verdict.reason, percent)
    following = next((step for step in SHARE_STEPS if step > percent), None)
    if following is None:
        return ShareDecision(ShareAction.PROMOTE, verdict.reason, percent)
    return ShareDecision(ShareAction.RAISE, verdict.reason, following)
