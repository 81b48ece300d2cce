"""Shadow traffic: a capped sample of requests is copied to another version, compared, and never billed."""

from __future__ import annotations

import msgspec

from argosy.policy.traffic.sticky_hash import hash_point


class ShadowCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests are copied where.

    Raises:
        ValueError: The fraction is not between 0 and 1, or the cap is not positive.
    """

    pool: str
    digest: str = ""
    """Version within the pool. Empty for the version that serves there."""
    fraction: float
    """Part of the requests that is copied."""
    max_requests_per_s: float = 10.0
    """Copies per second of each gateway. Requests beyond are not copied."""
    salt: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise ValueError("fraction of shadowed requests must be between 0 and 1")
        if not self.max_requests_per_s > 0.0:
            raise ValueError("max_requests_per_s must be positive; set fraction to 0 for no copies")


class ShadowSampler:
    """Selects the requests of one gateway that are copied. Its cap is a token bucket of one second."""

    __slots__ = ("_at", "_tokens", "num_capped", "num_copied")

    def __init__(self) -> None:
        self._at = float("-inf")
        self._tokens = 0.0
        self.num_copied = 0
        self.num_capped = 0
        """Requests that were sampled, but exceeded the cap."""

    def should_copy(self, shadow: ShadowCopy, request: str, now: float) -> bool:
        """Return whether a request is copied, and count it.

        Args:
            shadow: What the route declares.
            request: Id of the request.
            now: Seconds on a monotonic clock.
        """
        if hash_point(shadow.salt, shadow.digest, request) >= shadow.fraction:
            return False
        rate = shadow.max_requests_per_s
        elapsed_s = max(0.0, now - self._at)
        self._tokens = min(max(1.0, rate), self._tokens + elapsed_s * rate)
        self._at = now
        if self._tokens < 1.0:
            self.num_capped += 1
            return False
        self._tokens -= 1.0
        self.num_copied += 1
        return True
