"""Route record of a pool: which version of it serves whom. A rollout is a sequence of such records."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from argosy.policy.traffic.shadow import ShadowCopy
from argosy.policy.traffic.sticky_hash import TrafficSubject, choose_weighted, sticky_key

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
