"""Wrong keys and tokens, counted by address, so that guessing is slow and the log stays short."""

from __future__ import annotations

from argosy.gateway.auth.client_address import IpAddress

MAX_FAILURES = 20
"""Failures of one address before it has to wait; a good key or token of it never has to."""
FAILURE_WINDOW_S = 30.0
MAX_TRACKED_ADDRESSES = 4096
"""Most addresses remembered; the one whose count is oldest is forgotten first."""


class AuthFailureLimiter:
    """Counts from the first failure of an address for `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, float]] = {}
        """Source -> failures and the time when they are forgotten, oldest first."""

    def record_failure(self, address: IpAddress | None, now: float) -> int:
        """Count one more; how many there are now."""
        source = _source_key(address)
        count, until = self._counts.get(source, (0, 0.0))
        if until <= now:
            self._counts.pop(source, None)
            count, until = 0, now + FAILURE_WINDOW_S
            if len(self._counts) >= MAX_TRACKED_ADDRESSES:
                del self._counts[next(iter(self._counts))]
        self._counts[source] = (count + 1, until)
        return count + 1

    def retry_after_s(self, address: IpAddress | None, now: float) -> float:
        """Seconds until the address may fail again; 0 when it may now."""
        count, until = self._counts.get(_source_key(address), (0, 0.0))
        return max(0.0, until - now) if count >= MAX_FAILURES else 0.0


def _source_key(address: IpAddress | None) -> str:
    """IPv6 clients have a whole /64 to ask from: it counts as one."""
    if address is None:
        return ""
    return str(address) if address.version == 4 else address.exploded[:19]
