"""Numbered requests for tests of the dispatch queue."""

from __future__ import annotations

import math

from argosy.policy import QueuedRequest


class NumberedRequest(QueuedRequest, eq=False, weakref=True):
    """A request that a test knows by its number."""

    item: int = 0


def queued(
    item: int = 0,
    *,
    tier: int = 1,
    tenant: str = "a",
    weight: float = 1.0,
    cost: float = 100.0,
    arrival: float = 0.0,
    deadline: float = math.inf,
) -> NumberedRequest:
    return NumberedRequest(
        item,
        tier=tier,
        tenant=tenant,
        weight=weight,
        cost_tokens=cost,
        arrived_at=arrival,
        deadline=deadline,
        size_bytes=item + 1,
    )
