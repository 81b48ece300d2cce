"""Limit on failed authentication attempts per address, which slows down guessing and keeps the log short."""

from __future__ import annotations

from argosy.gateway.auth.client_address import IpAddress

MAX_FAILURES = 20
"""Failures per window after which an address is blocked. Valid keys and tokens are accepted even then."""
FAILURE_WINDOW_S = 30.0
MAX_TRACKED_ADDRESSES = 4096
"""Maximum number of addresses with a counter. Beyond it, the oldest counter is dropped."""


class AuthFailureLimiter:
    """Counts failed attempts per address in windows that begin with the first failure.

    Args:
        max_failures: Failures per window after which an address is blocked.
        window_s: Length of the window.
    """

    def __init__(
        self, max_failures: int = MAX_FAILURES, window_s: float = FAILURE_WINDOW_S
    ) -> None:
        self._max_failures = max_failures
        self._window_s = window_s
        self._counts: dict[str, tuple[int, float]] = {}
        """Failures and the end of the window by source, oldest first."""

    def record_failure(self, address: IpAddress | None, now: float) -> int:
        """Count a failure and return the number of failures in the window."""
        source = _source_key(address)
        count, until = self._counts.get(source, (0, 0.0))
        if until <= now:
            self._counts.pop(source, None)
            count, until = 0, now + self._window_s
            if len(self._counts) >= MAX_TRACKED_ADDRESSES:
                del self._counts[next(iter(self._counts))]
        self._counts[source] = (count + 1, until)
        return count + 1

    def retry_after_s(self, address: IpAddress | None, now: float) -> float:
        """Return the seconds until the address may fail again, or 0 if it may now."""
        count, until = self._counts.get(_source_key(address), (0, 0.0))
        return max(0.0, until - now) if count >= self._max_failures else 0.0


def _source_key(address: IpAddress | None) -> str:
    """Return the counter key: an IPv4 address or an IPv6 /64 network, since a client usually has the whole /64."""
    if address is None:
        return ""
    return str(address) if address.version == 4 else address.exploded[:19]
