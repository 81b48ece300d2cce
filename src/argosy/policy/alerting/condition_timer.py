"""Durations for which conditions hold, in observed time."""

from __future__ import annotations

from collections.abc import Hashable

from argosy.policy.alerting.alert_states import MAX_OBSERVED_S

_FORGET_AFTER_S = 3600.0


class ConditionTimer:
    """Counts for how long each of several conditions has held. Steps of the clock count as at most 30 s."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[float, float]] = {}
        """Seconds, and time of the last observation."""

    def observe(self, key: Hashable, *, holds: bool, now: float) -> float:
        """Record whether a condition holds, and return for how many seconds it has held; 0.0 if it does not."""
        if not holds:
            self._held.pop(key, None)
            return 0.0
        held_s, observed_at = self._held.get(key, (0.0, now))
        held_s += min(max(now - observed_at, 0.0), MAX_OBSERVED_S)
        self._held[key] = held_s, now
        return held_s

    def forget_old(self, now: float) -> None:
        """Forget conditions that are no longer observed."""
        self._held = {
            key: held for key, held in self._held.items() if now - held[1] < _FORGET_AFTER_S
        }
