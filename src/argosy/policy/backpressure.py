"""Concurrency limit of a replica that answered 429 or 503 because it is full.

Servers seldom report how many requests they accept, and other clients may use them too. The limit is therefore found
as TCP finds its rate, by exceeding it now and then. A rejection sets the limit to the number of running requests.
Without further rejections the limit grows by 2 after one second, by 30 after five and by 240 after fifteen.

A rejected request waits in the queue like a new one. It costs the replica nothing until a slot is free, so it needs
no retry budget.
"""

from __future__ import annotations

import math

BASE_BACKOFF_S = 0.5
"""First backoff of a replica on which this gateway has no running request; doubled with each backoff in a row."""
MAX_BACKOFF_S = 4.0
"""Longest backoff unless the replica asks for a longer one with `Retry-After`."""
MAX_RETRY_AFTER_S = 60.0
"""Longest backoff of all, so that a replica that reports to be full for a day is still tried."""
MAX_REPORTED_WAIT_S = 86_400.0


class Backpressure:
    """Backoff and concurrency limit of one replica."""

    __slots__ = (
        "_backoff_until",
        "_base_limit",
        "_consecutive_backoffs",
        "_reported_full_until",
        "has_limit",
    )

    def __init__(self) -> None:
        self.has_limit = False
        """Whether the replica has ever rejected a request."""
        self._consecutive_backoffs = 0
        """Backoffs since the replica last accepted a request."""
        self._base_limit = math.inf
        """Concurrent requests allowed when the backoff ends; the limit grows from there."""
        self._backoff_until = -math.inf
        self._reported_full_until = -math.inf
        """Time until which the replica is full according to its `Retry-After`."""

    def is_backing_off(self, now: float) -> bool:
        """Whether the replica gets no requests at present."""
        return now < self._backoff_until

    def retry_after_s(self, now: float) -> float:
        """Seconds for which the replica reports to be full.

        Returns 0 if the replica gave no `Retry-After`, or if it gets requests again in any case.
        """
        return max(0.0, self._reported_full_until - now) if self.is_backing_off(now) else 0.0

    def concurrency_limit(self, now: float) -> float:
        """Return how many requests the replica may run at a time.

        The limit is infinite before the first rejection and 0 during a backoff.
        """
        since_s = now - self._backoff_until
        return self._base_limit + since_s * (1.0 + since_s) if since_s >= 0 else 0.0

    def on_rejected(
        self, other_running: int, now: float, retry_after_s: float | None = None
    ) -> None:
        """Record that the replica rejected a request as full.

        Args:
            other_running: Other requests of this gateway that run on the replica. Their ends make room.
            now: Seconds on any monotonic clock.
            retry_after_s: Value of the `Retry-After` header, if the response had one.
        """
        wait = 0.0
        if retry_after_s is not None or not other_running:
            if not self.is_backing_off(now):  # otherwise the request was sent before the backoff
                self._consecutive_backoffs += 1
            wait = min(BASE_BACKOFF_S * 2 ** min(self._consecutive_backoffs - 1, 30), MAX_BACKOFF_S)
            wait = min(max(wait, retry_after_s or 0.0), MAX_RETRY_AFTER_S)
        if not self.is_backing_off(now) or retry_after_s is not None:
            self._reported_full_until = now + min(retry_after_s or 0.0, MAX_REPORTED_WAIT_S)
        self.has_limit = True
        self._base_limit = max(1.0, other_running)
        self._backoff_until = max(self._backoff_until, now + wait)

    def on_accepted(self) -> None:
        """Record that the replica accepted a request."""
        self._consecutive_backoffs = 0
