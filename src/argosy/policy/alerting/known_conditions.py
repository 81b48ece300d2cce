"""Conditions that controllers and gateways both see, with their sentences."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.policy.alerting.alert import AlertCondition

NO_REPLICA_S = 30.0
"""Time without a ready replica from which a pool that had one is an alert."""
NOT_HEALED_S = 300.0
"""Time from which a replica that does not serve is an alert."""
_MAX_STATES = 5


def describe_no_replica(
    labels: dict[str, str], missing_s: float, *, is_firing: bool | None, states: Sequence[str]
) -> AlertCondition:
    """Return the condition of a model or pool that has had no ready replica for some time.

    `states` are sentences about its replicas.
    """
    scope = f"pool {labels['pool']}" if "pool" in labels else f"model {labels['model']}"
    shown = "; ".join(states[:_MAX_STATES]) or "It has no replicas"
    return AlertCondition(
        name="NoReplica",
        labels=labels,
        severity="page",
        is_firing=is_firing,
        summary=f"No replica of the {scope} is ready",
        description=f"For {missing_s:.0f} s no replica of the {scope} was ready. {shown}.",
        runbook="noreplica",
    )


def describe_not_healed(
    labels: dict[str, str], lost_s: float, *, is_firing: bool | None, state: str
) -> AlertCondition:
    """Return the condition of a replica that was lost and does not come back. `state` is a sentence."""
    return AlertCondition(
        name="ReplicaNotHealed",
        labels=labels,
        severity="ticket",
        is_firing=is_firing,
        summary=f"The replica {labels['replica']} does not come back",
        description=f"{labels['replica']} has not served for {lost_s:.0f} s. {state}.",
        runbook="replicanothealed",
    )
