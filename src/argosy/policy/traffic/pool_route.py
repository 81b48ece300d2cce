"""Route record of a pool: which version of it serves whom, as far as its replicas can, and which requests are copied.

A rollout is a sequence of such records. Copies are a capped sample of the requests, compared and never billed.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from argosy.policy.traffic.sticky_hash import (
    TrafficSubject,
    choose_weighted,
    hash_point,
    sticky_key,
)


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


def clamp_share(
    wanted: float, *, stable_ready: int, candidate_ready: int, needed: int, may_exceed: bool
) -> float:
    """Return the share of the candidate that both versions have the ready replicas for.

    If the stable version is short of replicas, the candidate takes what it has capacity for. What fits on neither
    stays with the stable version, where the queue or a fallback pool deals with it.

    Args:
        wanted: Share that the rollout asks for.
        stable_ready: Ready replicas of the stable version.
        candidate_ready: Ready replicas of the candidate.
        needed: Replicas that the whole demand needs.
        may_exceed: Whether the candidate may get more than `wanted`. False if it must not serve, because it was
            rejected or has not been checked.
    """
    if needed <= 0:
        return wanted if candidate_ready or not wanted else 0.0
    limit = min(1.0, candidate_ready / needed)
    if may_exceed:
        wanted = max(wanted, 1.0 - stable_ready / needed)
    return min(wanted, limit)


ROUTE_SCHEMA = 1
"""Version of the record's fields. Later versions only add fields with defaults."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Version of a pool, by the content digest of its settings, with its share of the users."""

    digest: str
    share: float


class RouteRollback(msgspec.Struct, frozen=True, kw_only=True):
    """Mark of a rollback: no later route of the same rollout may contain the version again."""

    digest: str
    reason: str
    at: float
    """Seconds since the epoch."""


class VersionChoice(NamedTuple):
    """Version for a request."""

    digest: str
    is_randomised: bool
    """Whether the hash assigned it, so that it counts in the comparison of versions."""


class PoolRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Record that a rollout writes and that all gateways follow. Store it with compare-and-set on `version`.

    Raises:
        ValueError: The shares are not a part of 1, or a version is named twice.
    """

    schema: int = ROUTE_SCHEMA
    pool: str
    version: int
    stable: str
    """Digest of the version that serves all users who have no variant."""
    variants: tuple[Variant, ...] = ()
    salt: str = ""
    """Salt of the assignment. It differs between rollouts, so that not always the same users get new versions."""
    per_session_tenants: tuple[str, ...] = ()
    """Tenants whose sessions are assigned instead of their users, or `ALL_TENANTS`. Fixed during a rollout, so that no
    session moves."""
    shadow: ShadowCopy | None = None
    rollback: RouteRollback | None = None
    """Set if the last rollout ended by a rollback."""
    rollout: str = ""
    """Id of the rollout that wrote the record."""

    def __post_init__(self) -> None:
        digests = [self.stable, *(each.digest for each in self.variants)]
        if len({*digests}) < len(digests):
            raise ValueError(f"route of pool {self.pool}: a version is named twice")
        shares = [each.share for each in self.variants]
        if not all(0.0 <= share <= 1.0 for share in shares) or sum(shares) > 1.0 + 1e-9:
            raise ValueError(f"route of pool {self.pool}: shares must be between 0 and 1 in sum")

    def share_of(self, digest: str) -> float:
        """Return the share of a version."""
        shares = {each.digest: each.share for each in self.variants}
        if digest == self.stable:
            return max(0.0, 1.0 - sum(shares.values()))
        return shares.get(digest, 0.0)

    def select_version(
        self, subject: TrafficSubject, *, prefers_candidate: bool = False
    ) -> VersionChoice:
        """Select the version for the sender of a request.

        Args:
            subject: Sender of the request.
            prefers_candidate: Whether a rule sends the request to the first variant with a share.
        """
        serving = [(each.digest, each.share) for each in self.variants if each.share > 0.0]
        if serving and prefers_candidate:
            return VersionChoice(serving[0][0], is_randomised=False)
        key = sticky_key(subject, self.per_session_tenants)
        digest = choose_weighted(self.salt, key, serving)
        return VersionChoice(digest or self.stable, is_randomised=bool(serving))

    def roll_back(self, reason: str, at: float) -> PoolRoute:
        """Return the record that sends all users to the stable version.

        Any process may write it: it needs no candidate, no measurement and no controller. The same record is
        returned if it serves no variant, so that a second rollback writes nothing.
        """
        if not (self.variants or self.shadow):
            return self
        digest = self.variants[0].digest if self.variants else ""
        if self.shadow is not None:
            digest = digest or self.shadow.digest
        return msgspec.structs.replace(
            self,
            version=self.version + 1,
            variants=(),
            shadow=None,
            rollback=RouteRollback(digest=digest, reason=reason, at=at),
        )
