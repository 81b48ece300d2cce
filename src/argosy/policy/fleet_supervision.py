"""Supervision of all replica processes of a fleet: events in, effects out.

The driver reports the observed runs of the processes with each tick, and performs the effects. A start or kill takes
time, so the driver reports its end too. Until then the replica gets no other action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from argosy.policy.supervision import (
    ProcessRun,
    RestartLimits,
    SupervisionAction,
    SupervisionPolicy,
)
from argosy.policy.wake_at import WakeAt

SUPERVISION_INTERVAL_S = 0.5


class StartReplica(NamedTuple):
    """Effect: start the replica's process, and report the end of the attempt by `on_action_ended`."""

    replica: str
    restart_reason: str = ""
    """Why the last process ended; empty for the first start."""


class KillReplica(NamedTuple):
    """Effect: kill the replica's process, and report the end by `on_action_ended`."""

    replica: str
    timeout_s: float
    """Time for which it did not respond."""


class GiveUpReplica(NamedTuple):
    """Effect: log that the replica is not restarted any more, at least not soon."""

    replica: str
    reason: str


class FailFleet(NamedTuple):
    """Effect: stop, because no replica is left that can be started."""

    reason: str


SupervisionEffect = StartReplica | KillReplica | GiveUpReplica | FailFleet | WakeAt


class FleetSupervision:
    """Decides about the processes of a set of replicas.

    Args:
        replicas: Names of the replicas that shall run.
        limits: Timeouts and limits for each replica.
    """

    def __init__(self, replicas: Iterable[str], limits: RestartLimits | None = None) -> None:
        self._policies = {name: SupervisionPolicy(limits) for name in replicas}
        self._kill_reasons: dict[str, str] = {}
        """Why a replica was killed, by name, until it is restarted."""
        self._pending: set[str] = set()
        """Replicas whose start or kill has not ended."""

    def on_tick(self, runs: Mapping[str, ProcessRun], now: float) -> list[SupervisionEffect]:
        """Return what to do now. Repeated calls start nothing twice.

        Args:
            runs: Latest run of each replica that was started, by name.
            now: Seconds on a monotonic clock.
        """
        effects = list[SupervisionEffect]()
        for name in self._policies:
            if name not in self._pending:
                effects += self._decide(name, runs.get(name), now)
        if all(policy.has_given_up for policy in self._policies.values()):
            errors = [run.start_error for run in runs.values() if run.start_error]
            unknown = "every replica exited before it was ready; see the log"
            effects.append(FailFleet(errors[0] if errors else unknown))
        return [*effects, WakeAt(now + SUPERVISION_INTERVAL_S)]

    def on_action_ended(self, replica: str) -> None:
        """Record that a start or kill has ended, successfully or not."""
        self._pending.discard(replica)

    def _decide(self, name: str, run: ProcessRun | None, now: float) -> list[SupervisionEffect]:
        policy = self._policies[name]
        match policy.decide(run, now):
            case SupervisionAction.START:
                reason = "" if run is None else self._kill_reasons.pop(name, run.exit_reason)
                self._pending.add(name)
                return [StartReplica(name, reason)]
            case SupervisionAction.KILL if run is not None:
                timeout_s = policy.hang_timeout_s(run)
                self._kill_reasons[name] = f"it did not respond for {timeout_s:g} s and was killed"
                self._pending.add(name)
                return [KillReplica(name, timeout_s)]
            case SupervisionAction.GIVE_UP if run is not None:
                exits = f"the process exits before it is ready: {run.exit_reason}"
                return [GiveUpReplica(name, run.start_error or exits)]
        return []
