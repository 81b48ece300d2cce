"""Durations for which conditions hold, in observed time."""

from __future__ import annotations

from collections.abc import Hashable

from argosy.policy.alerting.alert_states import MAX_OBSERVED_S

_FORGET_AFTER_S = 3600.0


class ConditionTimer:
    """Counts for how long each of several conditions has held. Steps of the clock count as at most 30 s."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[float | None, float, bool]] = {}
        """Seconds (None if it does not hold), time of the last observation, and whether it was ever over."""

    def observe(self, key: Hashable, *, holds: bool, now: float) -> float:
        """Record whether a condition holds, and return for how many seconds it has held; 0.0 if it does not."""
        before_s, observed_at, was_over = self._held.get(key, (None, now, False))
        if not holds:
            self._held[key] = None, now, True
            return 0.0
        held_s = 0.0
        if before_s is not None:
            held_s = before_s + min(max(now - observed_at, 0.0), MAX_OBSERVED_S)
        self._held[key] = held_s, now, was_over
        return held_s

    def judge(
        self, key: Hashable, *, holds: bool, limit_s: float, now: float
    ) -> tuple[float, bool | None]:
        """Record whether a condition holds, and return for how long it has, and whether that is too long.

        The latter is None while it is not known, because the condition has held since the first observation. So an
        alert does not end when a process that has observed it for long gives way to another one.
        """
        held_s = self.observe(key, holds=holds, now=now)
        if held_s >= limit_s and holds:
            return held_s, True
        return held_s, None if holds and not self._held[key][2] else False

    def forget_old(self, now: float) -> None:
        """Forget conditions that are no longer observed."""
        self._held = {
            key: held for key, held in self._held.items() if now - held[1] < _FORGET_AFTER_S
        }
