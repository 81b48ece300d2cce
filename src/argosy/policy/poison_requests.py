"""Requests that replicas were lost with, remembered for a while: sent again, each would cost as many once more.

Such a request may only have been there when another one killed them. So none is turned away for long: for `WAIT_S`
it is, and until it is forgotten it is given up with the first replica that is lost with it.
"""

from __future__ import annotations

from collections import OrderedDict

REJECTION_S = 5.0
QUARANTINE_S = 60.0
MAX_QUARANTINED = 1000
"""Requests that are remembered, those that were given up last."""


class PoisonRequestTracker:
    """One pool's, by what tells one request from another. Pure: the time is an argument."""

    __slots__ = ("_quarantined_at",)

    def __init__(self) -> None:
        self._quarantined_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._quarantined_at)

    def quarantine(self, key: bytes, now: float) -> None:
        """Too many replicas were lost with it."""
        self._quarantined_at[key] = now
        self._quarantined_at.move_to_end(key)
        if len(self._quarantined_at) > MAX_QUARANTINED:
            self._quarantined_at.popitem(last=False)

    def is_quarantined(self, key: bytes, now: float) -> bool:
        """Whether that was not long ago."""
        while (
            self._quarantined_at and next(iter(self._quarantined_at.values())) + QUARANTINE_S <= now
        ):
            self._quarantined_at.popitem(last=False)
        return key in self._quarantined_at

    def retry_after_s(self, key: bytes, now: float) -> float:
        """Seconds for which it is turned away yet; 0: it may be tried."""
        return (
            max(0.0, self._quarantined_at[key] + REJECTION_S - now)
            if self.is_quarantined(key, now)
            else 0.0
        )

    def clear(self, key: bytes) -> None:
        """It was answered."""
        self._quarantined_at.pop(key, None)
