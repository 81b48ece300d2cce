"""Requests that replicas were lost with, remembered for a while: sent again, each would cost as many once more.

Such a request may only have been there when another one killed them. So none is turned away for long: for `WAIT_S`
it is, and until it is forgotten it is given up with the first replica that is lost with it.
"""

from __future__ import annotations

from collections import OrderedDict

WAIT_S = 5.0
REMEMBERED_S = 60.0
MOST = 1000
"""Requests that are remembered, those that were given up last."""


class Suspects:
    """One pool's, by what tells one request from another. Pure: the time is an argument."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def given_up(self, key: bytes, now: float) -> None:
        """Too many replicas were lost with it."""
        self._since[key] = now
        self._since.move_to_end(key)
        if len(self._since) > MOST:
            self._since.popitem(last=False)

    def knows(self, key: bytes, now: float) -> bool:
        """Whether that was not long ago."""
        while self._since and next(iter(self._since.values())) + REMEMBERED_S <= now:
            self._since.popitem(last=False)
        return key in self._since

    def wait_s(self, key: bytes, now: float) -> float:
        """Seconds for which it is turned away yet; 0: it may be tried."""
        return max(0.0, self._since[key] + WAIT_S - now) if self.knows(key, now) else 0.0

    def cleared(self, key: bytes) -> None:
        """It was answered."""
        self._since.pop(key, None)
