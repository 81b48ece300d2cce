"""Sticky assignment: a salted hash places each user or session at a fixed point of the unit interval.

The salt is chosen so that it divides the known traffic evenly, whatever the few heaviest users do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

ALL_TENANTS = "*"
"""Stands for every tenant in `sticky_key`."""
_FRACTION_BITS = 53
"""Bits of a float's mantissa, so that a point is exact."""


class TrafficSubject(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of a request. The id of the request is used only if nothing else distinguishes it from others."""

    tenant: str
    user: str = ""
    """End user, as named by the client. Empty if it names none."""
    session: str = ""
    """Session or conversation. Empty if the client names none."""
    request: str = ""


def sticky_key(subject: TrafficSubject, per_session_tenants: Collection[str]) -> tuple[str, str]:
    """Return what is assigned as one: the user, or the session for the tenants given.

    A tenant that sends a large part of the traffic is divided into its sessions. Otherwise its requests would all go
    to one version, and one tenant would decide the comparison.
    """
    user, session = subject.user, subject.session
    if subject.tenant in per_session_tenants or ALL_TENANTS in per_session_tenants:
        return subject.tenant, session or user or subject.request
    return subject.tenant, user or session or subject.request


def hash_point(salt: str, *parts: str) -> float:
    """Return a point in [0, 1) that is uniform over salts and parts."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in (salt, *parts):
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return (int.from_bytes(hashed.digest(), "big") >> (64 - _FRACTION_BITS)) / (1 << _FRACTION_BITS)


def choose_weighted(
    salt: str, key: Sequence[str], shares: Sequence[tuple[str, float]]
) -> str | None:
    """Return the name whose share contains the key; None for the rest if the shares sum to less than 1.

    Each name has a hash of its own. So a key that a share contains stays with the name when the share grows.
    """
    rest = 1.0
    for name, share in shares:
        if share > 0.0 and hash_point(salt, name, *key) * rest < share:
            return name
        rest -= share
    return None


NUM_SALTS = 60


class UserTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """History of one sticky key."""

    key: tuple[str, str]
    """By `sticky_key`."""
    weights: tuple[float, ...]
    """Requests first, then the expected events of each metric that shall be balanced too."""


class SaltChoice(NamedTuple):
    """A salt, and how evenly it divides the traffic."""

    salt: str
    imbalance: float
    """Largest relative deviation of a share of traffic from the share of a step."""
    effective_users: float
    """Number of equally heavy users that would make the same comparison, on the candidate's side at the first step."""


def choose_salt(
    rollout: str,
    candidate: str,
    history: Sequence[UserTraffic],
    shares: Sequence[float],
    num_salts: int = NUM_SALTS,
) -> SaltChoice:
    """Return the best of some salts for a rollout. Without history it is the first.

    Args:
        rollout: Id of the rollout. Salts of different rollouts differ.
        candidate: Digest of the version that gets the shares.
        history: Recent traffic by sticky key. A few thousand of the heaviest keys suffice.
        shares: Shares of the steps.
        num_salts: Number of salts to compare.
    """
    salts = (f"{rollout}/{number}" for number in range(num_salts if history else 1))
    choices = [_assess(salt, candidate, history, shares) for salt in salts]
    return min(choices, key=lambda choice: choice.imbalance)


def _assess(
    salt: str, candidate: str, history: Sequence[UserTraffic], shares: Sequence[float]
) -> SaltChoice:
    worst = 0.0
    users = 0.0
    totals = [sum(column) for column in zip(*(user.weights for user in history), strict=True)]
    for index, share in enumerate(shares):
        chosen = [
            user.weights
            for user in history
            if choose_weighted(salt, user.key, [(candidate, share)])
        ]
        for column, total in enumerate(totals):
            if total > 0.0 and share > 0.0:
                realised = sum(weights[column] for weights in chosen) / total
                worst = max(worst, abs(realised / share - 1.0))
        if not index:
            requests = [weights[0] for weights in chosen]
            squares = sum(each * each for each in requests)
            users = sum(requests) * sum(requests) / squares if squares else 0.0
    return SaltChoice(salt, worst, users)


def heavy_tenants(history: Sequence[UserTraffic], min_share: float = 0.02) -> tuple[str, ...]:
    """Return the tenants whose sessions are assigned instead of their users: those above a share of the traffic.

    Without history these are all tenants. Users differ, and the gate would take an unknown heavy user for a regression.
    """
    if not history:
        return (ALL_TENANTS,)
    requests: dict[str, float] = {}
    for user in history:
        tenant = user.key[0]
        requests[tenant] = requests.get(tenant, 0.0) + user.weights[0]
    threshold = min_share * sum(requests.values())
    return tuple(sorted(tenant for tenant, count in requests.items() if count > threshold))
