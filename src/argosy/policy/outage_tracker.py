"""Grace period during which requests wait for a replica that is down.

A restarted replica is back within seconds, or within minutes for a large model. Requests that arrive meanwhile wait for
it as they would for a full replica. No request waits for a replica that was never up or has been down for longer.
While a replica is unreachable, one request per `RETRY_INTERVAL_S` is sent to it as a probe. More requests would fail
too, and would then be retried out of their order.
"""

from __future__ import annotations

import math

STARTING_GRACE_S = 300.0
"""Grace period of a replica that loads its model or restarts its engine, counted from when it was last up."""
RETRY_INTERVAL_S = 0.5
"""Seconds between the probing requests to a replica that is down."""


class OutageTracker:
    """Outage state of one replica, which counts as up until an observation says otherwise."""

    __slots__ = (
        "_current_grace_s",
        "_down_since",
        "_next_probe_at",
        "grace_s",
        "is_down",
        "was_ever_up",
    )

    def __init__(self, grace_s: float = 30.0) -> None:
        self.is_down = False
        self.was_ever_up = False
        """Whether the replica has ever responded."""
        self.grace_s = grace_s
        """Grace period of a replica that was up."""
        self._current_grace_s = grace_s
        self._down_since = -math.inf
        """Time when the replica was last up, or first reported that it starts."""
        self._next_probe_at = -math.inf

    @property
    def grace_ends_at(self) -> float:
        """Time until which requests wait for the replica; infinite while it is up."""
        return self._down_since + self._current_grace_s if self.is_down else math.inf

    def probe_budget(self, now: float) -> int:
        """Return how many more requests the replica gets while it is down (0 or 1)."""
        return int(now >= self._next_probe_at)

    def on_dispatched(self, now: float) -> None:
        """Record that a request was sent to the replica."""
        self._next_probe_at = now + RETRY_INTERVAL_S

    def mark_up(self) -> None:
        """Record that the replica accepts requests."""
        self.is_down, self.was_ever_up = False, True

    def mark_down(self, now: float) -> None:
        """Record that the replica is unreachable or reports that it shuts down."""
        if self.was_ever_up and not self.is_down:
            self._down_since = now
        self.is_down = True
        self._current_grace_s = self.grace_s

    def mark_starting(self, now: float) -> None:
        """Record that the replica reports that it will accept requests later."""
        if not self.is_down or self._down_since == -math.inf:
            self._down_since = now
        self.is_down = self.was_ever_up = True
        self._current_grace_s = max(STARTING_GRACE_S, self.grace_s)
