"""Dispatch order of waiting requests by tier, fair token shares of tenants, and deadlines.

**Tiers.** Higher tiers are dispatched first. A tier whose oldest request has waited longer than `promote_after_s` is
promoted: it gets one turn in `PROMOTION_INTERVAL`. No tier starves, and no old backlog delays the higher tiers. The
wait before a promotion is at most half of the longest wait in the queue.

**Tenants.** Within a tier, tenants share tokens by weight (see `deficit_round_robin`).

**Requests.** Within a tenant, requests are ordered by deadline and then by arrival. No request is overtaken by one that
arrives `MAX_OVERTAKE_S` later, whatever its deadline. Queues with a shorter wait shorten this time in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from argosy.policy.deficit_round_robin import QueuedRequest, TierQueue

T = TypeVar("T", bound=QueuedRequest)

PROMOTION_INTERVAL = 4
"""Turns from one promotion to the next."""
PROMOTE_AFTER_S = (math.inf, 5.0, 30.0, math.inf)
"""Wait of a tier's oldest request after which the tier gets extra turns, for premium, standard, free and batch."""
BATCH_TIER = len(PROMOTE_AFTER_S) - 1
"""Rank of the lines of batches, below all tiers of projects. No client waits for them, so they are never promoted."""
LOWEST_TIER = BATCH_TIER - 1
"""Rank of the lowest tier of projects."""
BATCH_START_S = 3600.0
"""Time after which an engine with deadline scheduling should start a line of a batch."""
MAX_OVERTAKE_S = 30.0
"""Wait after which a request precedes all later deadlines, since urgent requests may never stop arriving."""
REFERENCE_MAX_WAIT_S = 60.0
"""Longest wait in a queue for which these times hold. A queue with a shorter one shortens them in proportion."""


def promote_after_s(tier: int, max_wait_s: float) -> float:
    """Return the wait after which a tier is promoted in a queue where no request waits longer than `max_wait_s`."""
    return PROMOTE_AFTER_S[tier] * _time_scale(max_wait_s)


def _time_scale(max_wait_s: float) -> float:
    return min(1.0, max_wait_s / REFERENCE_MAX_WAIT_S)


def start_deadline(tier: int, sent_at: float) -> float:
    """Return the time by which an engine with deadline scheduling should start a request sent at `sent_at`.

    Higher tiers get earlier deadlines. A request of a lower tier that has waited for `PROMOTE_AFTER_S` precedes later
    requests, so no tier starves in the engine.
    """
    if tier == BATCH_TIER:
        return sent_at + BATCH_START_S
    return sent_at + (PROMOTE_AFTER_S[tier] if tier else 0.0)


@dataclass(frozen=True, slots=True)
class TenantBacklog:
    """Waiting requests of one tenant in one tier."""

    count: int = 0
    size_bytes: int = 0
    next_arrived_at: float = math.inf
    """Arrival time of the tenant's next request."""


class DispatchQueue(Generic[T]):
    """Queue of all requests that wait for a replica of one pool.

    Args:
        max_wait_s: Longest time for which the caller leaves a request in the queue.
    """

    def __init__(self, max_wait_s: float = REFERENCE_MAX_WAIT_S) -> None:
        max_overtake_s = MAX_OVERTAKE_S * _time_scale(max_wait_s)
        self._tiers: tuple[TierQueue[T], ...] = tuple(
            TierQueue(max_overtake_s) for _ in PROMOTE_AFTER_S
        )
        self._promote_after_s = [
            promote_after_s(tier, max_wait_s) for tier in range(len(PROMOTE_AFTER_S))
        ]
        self._last_number = 0
        self._turns_since_promotion = 0
        self._count = 0
        self.size_bytes = 0
        """Bytes of memory that the waiting requests hold."""
        self.cost_tokens = 0.0
        """Expected cost of the waiting requests."""

    def __len__(self) -> int:
        return self._count

    def push(self, request: T) -> None:
        """Enqueue a request."""
        self._last_number += 1
        self._count += 1
        self.size_bytes += request.size_bytes
        self.cost_tokens += request.cost_tokens
        request.sequence_number = self._last_number
        self._tiers[request.tier].push(request)

    def remove(self, request: T) -> bool:
        """Remove a cancelled or expired request; return False if it was dequeued before."""
        if not request.is_queued:
            return False
        self._count -= 1
        self.size_bytes -= request.size_bytes
        self.cost_tokens -= request.cost_tokens
        self._tiers[request.tier].remove(request)
        return True

    def pop(
        self, now: float, lowest_tier: int = BATCH_TIER, lowest_free_tier: int = BATCH_TIER
    ) -> T | None:
        """Dequeue the next request to dispatch; return None if no request may be dispatched.

        Slots that are reserved for a tier in between do not exclude lower tiers from their turns, because a higher tier
        takes them whenever it sends a request.

        Args:
            now: Seconds on the clock of `QueuedRequest.arrived_at`.
            lowest_tier: Lowest tier that may be dispatched.
            lowest_free_tier: Lowest tier that could be dispatched if no slots were reserved.
        """
        busy = [
            number for number, tier in enumerate(self._tiers[: lowest_free_tier + 1]) if tier.queued
        ]
        if not busy or busy[0] > lowest_tier:
            return None
        self._turns_since_promotion += 1
        selected = busy[0]
        if self._turns_since_promotion >= PROMOTION_INTERVAL and selected < lowest_tier:
            promoted = [
                n for n in busy[1:] if now - self._oldest_arrival(n) > self._promote_after_s[n]
            ]
            if promoted:
                selected = min(promoted, key=self._oldest_arrival)
                self._turns_since_promotion = 0
        request = self._tiers[selected].pop()
        self._count -= 1
        self.size_bytes -= request.size_bytes
        self.cost_tokens -= request.cost_tokens
        return request

    def take(self, request: T) -> None:
        """Dequeue a waiting request out of turn, as if it were the next one."""
        self._tiers[request.tier].take(request)
        self._count -= 1
        self.size_bytes -= request.size_bytes
        self.cost_tokens -= request.cost_tokens

    def next_requests(self, tier: int) -> list[T]:
        """Return the next request of each tenant that waits in a tier."""
        queue = self._tiers[tier]
        return [tenant.peek(queue.queued) for tenant in queue.ring.values()]

    def hold_tenant(self, tier: int, tenant: str, *, is_held: bool) -> None:
        """Let the other waiting tenants of the tier go before a tenant, or end this."""
        self._tiers[tier].hold(tenant, is_held=is_held)

    def charge_tenant(self, tier: int, tenant: str, weight: float, cost_tokens: float) -> None:
        """Charge the actual cost of a dispatched request minus the expected one; negative amounts are a refund."""
        self._tiers[tier].charge(tenant, weight, cost_tokens)

    def count_ahead(self, request: T) -> int:
        """Return the number of other waiting requests in the same and higher tiers."""
        return self.count_up_to(request.tier) - request.is_queued

    def count_up_to(self, tier: int) -> int:
        """Return the number of waiting requests in a tier and the higher ones."""
        return sum(len(each.queued) for each in self._tiers[: tier + 1])

    def tenant_backlog(self, tier: int, tenant: str) -> TenantBacklog:
        """Return the waiting requests of a tenant in a tier."""
        tenant_queue, queued = self._tiers[tier].ring.get(tenant), self._tiers[tier].queued
        if tenant_queue is None:
            return TenantBacklog()
        return TenantBacklog(
            tenant_queue.count, tenant_queue.size_bytes, tenant_queue.peek(queued).arrived_at
        )

    def count_by_tenant(self) -> dict[str, int]:
        """Return the number of waiting requests of each tenant that has any."""
        counts: dict[str, int] = {}
        for tier in self._tiers:
            for tenant, tenant_queue in tier.ring.items():
                counts[tenant] = counts.get(tenant, 0) + tenant_queue.count
        return counts

    @property
    def highest_tier(self) -> int | None:
        """Rank of the highest tier above batches of which a request waits; None if none waits."""
        online = self._tiers[:BATCH_TIER]
        return next((number for number, tier in enumerate(online) if tier.queued), None)

    @property
    def tenant_count(self) -> int:
        """Number of tenants with waiting requests above batches. One counts once for each tier."""
        return sum(len(tier.ring) for tier in self._tiers[:BATCH_TIER])

    def oldest_arrival(self) -> float | None:
        """Return when the oldest waiting request above batches arrived; None if none waits."""
        return min(
            (
                self._oldest_arrival(number)
                for number, tier in enumerate(self._tiers[:BATCH_TIER])
                if tier.queued
            ),
            default=None,
        )

    def _oldest_arrival(self, tier: int) -> float:
        return self._tiers[tier].arrival_heap[0][0]
