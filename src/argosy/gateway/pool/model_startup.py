"""How far the start of a model is that the fleet had scaled to zero."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

MIN_ETA_S = 5.0
"""Shortest time that is announced, also when a start takes longer than expected."""
MAX_PROGRESS = 0.99
"""Progress of a start that takes longer than expected."""


class ModelStartup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a model without replicas, as its controller publishes it. Times are seconds since the epoch.

    It changes only with the state, so that the progress costs no messages between controller and gateways.
    """

    state: Literal["stopped", "starting", "failing"]
    """`stopped` until a request arrives. `failing` while no replica starts."""
    expected_s: float | None = None
    """How long the start takes by what earlier ones took; None before the first."""
    started_at: float | None = None
    """When the first replica was started; None while it waits for a machine."""

    @property
    def is_failing(self) -> bool:
        """Whether requests should not wait, because no replica starts at the moment."""
        return self.state == "failing"

    def eta_s(self, wall_now: float) -> float | None:
        """Return the expected seconds until the model serves; None if no start was measured yet."""
        if self.expected_s is None:
            return None
        return max(MIN_ETA_S, self.expected_s - self._elapsed_s(wall_now))

    def progress(self, wall_now: float) -> float | None:
        """Return the part of the start that is over, from 0 to 1; None if no start was measured yet."""
        if not self.expected_s:
            return None
        return min(MAX_PROGRESS, self._elapsed_s(wall_now) / self.expected_s)

    def describe(self, wall_now: float) -> dict[str, str | float | None]:
        """Return the fields by which clients learn how long they have to wait."""
        eta_s, progress = self.eta_s(wall_now), self.progress(wall_now)
        return {
            "state": self.state,
            "progress": None if progress is None else round(progress, 2),
            "eta_s": None if eta_s is None else math.ceil(eta_s),
        }

    def _elapsed_s(self, wall_now: float) -> float:
        return 0.0 if self.started_at is None else max(0.0, wall_now - self.started_at)
