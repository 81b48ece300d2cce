"""Choice of a salt whose hash divides the known traffic evenly, whatever the few heaviest users do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.policy.traffic.sticky_hash import ALL_TENANTS, choose_weighted

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
