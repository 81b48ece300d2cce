"""Quarantine of requests that made replicas crash, because each retry would cost as many replicas again.

Such a request may only have been running when another one crashed the replica. Therefore it is rejected for
`REJECTION_S` only. Afterwards it may be tried, but until `QUARANTINE_S` have passed the first crash ends it.
"""

from __future__ import annotations

from collections import OrderedDict

REJECTION_S = 5.0
QUARANTINE_S = 60.0
MAX_QUARANTINED = 1000
"""Largest number of quarantined requests; the oldest are dropped first."""


class PoisonRequestTracker:
    """Quarantined requests of one pool, by a key that identifies the request."""

    __slots__ = ("_quarantined_at",)

    def __init__(self) -> None:
        self._quarantined_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._quarantined_at)

    def quarantine(self, key: bytes, now: float) -> None:
        """Quarantine a request that crashed too many replicas."""
        self._quarantined_at[key] = now
        self._quarantined_at.move_to_end(key)
        if len(self._quarantined_at) > MAX_QUARANTINED:
            self._quarantined_at.popitem(last=False)

    def is_quarantined(self, key: bytes, now: float) -> bool:
        """Return whether the request was quarantined within the last `QUARANTINE_S`."""
        while (
            self._quarantined_at and next(iter(self._quarantined_at.values())) + QUARANTINE_S <= now
        ):
            self._quarantined_at.popitem(last=False)
        return key in self._quarantined_at

    def retry_after_s(self, key: bytes, now: float) -> float:
        """Return the seconds for which the request is still rejected; 0 if it may be tried."""
        return (
            max(0.0, self._quarantined_at[key] + REJECTION_S - now)
            if self.is_quarantined(key, now)
            else 0.0
        )

    def clear(self, key: bytes) -> None:
        """Release a request that was answered."""
        self._quarantined_at.pop(key, None)
