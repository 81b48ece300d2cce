"""The order in which waiting requests are dispatched: tiers, fair shares in tokens, deadlines.

Between tiers the higher goes first, but a tier whose oldest request has waited longer than the tier's
`promote_s` takes every `PROMOTED_EACH`-th turn, so nobody starves and nobody's old backlog drowns the
higher tiers. Inside a tier, deficit round robin over tenants (Shreedhar & Varghese 1995) with the
deficit in weighted tokens (`fairness.service`): a tenant that has credit goes on until it has none, then waits
until the rounds have given it some again (`QUANTUM`, by weight). A request is charged what it will likely
cost as it leaves, so that a tenant does not take all room before its first token has come; what it costs in
truth, its prompt too, some of which may be cached, is known only as its answer streams, so `charge` may put
a tenant into debt, which later rounds pay off, or give back what was too much. What is served while no other
tenant waits is no debt. Between two tenants that both wait all the while, service per weight then differs by
at most two quanta, plus for each what it can have running in excess of what was expected. Inside a tenant: by
deadline, then as they came; none is overtaken by one that comes `PATIENCE_S` later, whatever its deadline.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM = 256.0
"""Weighted tokens that the tenant of the largest weight gets in a round, each other one in proportion to its own."""
PROMOTED_EACH = 4
PROMOTE_S = (math.inf, 5.0, 30.0)
"""For premium, standard and free: how long the oldest may wait before its tier takes turns."""
LOWEST = len(PROMOTE_S) - 1
PATIENCE_S = 30.0
"""Who has waited for so long goes before all deadlines to come: those in a hurry may never stop coming."""


@dataclass(slots=True)
class Waiting(Generic[T]):
    """A request that waits to be dispatched."""

    item: T
    tier: int
    """0 is the highest."""
    tenant: str
    weight: float
    cost: float
    """Weighted tokens that it will likely take, those of the prompt and of the answer."""
    arrival: float
    deadline: float = math.inf
    size: int = 0
    """Bytes that it holds while it waits."""
    number: int = field(default=0, init=False)
    """Its own, from when it is lined up."""
    left: bool = field(default=False, init=False)
    """Dispatched or removed."""
    charged: bool = field(default=False, init=False)
    """Its cost was; not so when nobody else was kept waiting."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one tenant has waiting in one tier."""

    count: int = 0
    size: int = 0
    """Bytes."""
    since: float = math.inf
    """When the one of them whose turn is next had come."""


class _Tenant(Generic[T]):
    """One tenant's requests in one tier."""

    __slots__ = ("alive", "credit", "heap", "size", "weight")

    def __init__(self, weight: float) -> None:
        self.heap: list[tuple[float, int]] = []
        """By when each has to go, and its number."""
        self.alive = 0
        self.size = 0
        self.credit = 0.0
        self.weight = weight

    def next(self, waiting: Mapping[int, Waiting[T]]) -> Waiting[T]:
        """The one of those that wait whose turn is next; there is one."""
        while self.heap[0][1] not in waiting:
            heapq.heappop(self.heap)
        return waiting[self.heap[0][1]]


class _Tier(Generic[T]):
    """Deficit round robin over the tenants of one tier."""

    def __init__(self) -> None:
        self.ring: OrderedDict[str, _Tenant[T]] = OrderedDict()
        """Tenants with waiting requests, the one whose turn it is first."""
        self.resting: dict[str, _Tenant[T]] = {}
        """Tenants without, that are in debt."""
        self.waiting: dict[int, Waiting[T]] = {}
        """By number. The heaps have no more than that: they keep who has left for as long as an older one waits."""
        self.arrivals: list[tuple[float, int]] = []

    def push(self, waiting: Waiting[T]) -> None:
        tenant = self.ring.get(waiting.tenant)
        if tenant is None:
            tenant = self.resting.pop(waiting.tenant, None) or _Tenant(waiting.weight)
            self.ring[waiting.tenant] = tenant
        tenant.weight = waiting.weight
        tenant.alive += 1
        tenant.size += waiting.size
        self.waiting[waiting.number] = waiting
        urgent = min(waiting.deadline, waiting.arrival + PATIENCE_S)
        heapq.heappush(tenant.heap, (urgent, waiting.number))
        heapq.heappush(self.arrivals, (waiting.arrival, waiting.number))

    def pop(self) -> Waiting[T]:
        name, tenant = self._turn()
        waiting = tenant.next(self.waiting)
        waiting.charged = len(self.ring) + len(self.resting) > 1
        if waiting.charged:
            tenant.credit -= waiting.cost
        self.leave(waiting)
        if name in self.ring and tenant.credit <= 0:
            self.ring.move_to_end(name)
        return waiting

    def leave(self, waiting: Waiting[T]) -> None:
        waiting.left = True
        del self.waiting[waiting.number]
        tenant = self.ring[waiting.tenant]
        tenant.alive -= 1
        tenant.size -= waiting.size
        if tenant.alive == 0:
            del self.ring[waiting.tenant]
            tenant.heap.clear()
            if tenant.credit < 0:
                self.resting[waiting.tenant] = tenant
        if not self.ring:
            self.resting.clear()
        while self.arrivals and self.arrivals[0][1] not in self.waiting:
            heapq.heappop(self.arrivals)

    def charge(self, name: str, weight: float, cost: float) -> None:
        tenant = self.ring.get(name)
        if len(self.ring) == (tenant is not None):
            return  # nobody else waits, so nobody is kept waiting by it
        if tenant is not None:
            tenant.credit -= cost
            return
        tenant = self.resting.setdefault(name, _Tenant(weight))
        tenant.credit -= cost
        if tenant.credit >= 0:
            del self.resting[name]

    def _turn(self) -> tuple[str, _Tenant[T]]:
        """The first tenant with credit; when none has any, as many rounds pass as one of them needs."""
        for name, tenant in self.ring.items():
            if tenant.credit > 0:
                return name, tenant
        quantum = QUANTUM / max(tenant.weight for tenant in self.ring.values())
        rounds = min(math.floor(-t.credit / (quantum * t.weight)) + 1 for t in self.ring.values())
        for tenant in self.ring.values():
            tenant.credit += rounds * quantum * tenant.weight
        for name, resting in list(self.resting.items()):
            resting.credit += rounds * quantum * resting.weight
            if resting.credit >= 0:
                del self.resting[name]
        return self._turn()


class DispatchQueue(Generic[T]):
    """All that wait for a replica of one pool. Pure: the time is an argument."""

    def __init__(self, promote_s: tuple[float, ...] = PROMOTE_S) -> None:
        self._promote_s = promote_s
        self._tiers: tuple[_Tier[T], ...] = tuple(_Tier() for _ in promote_s)
        self._number = 0
        self._turns = 0
        self._count = 0
        self.size = 0
        """Bytes held by those who wait."""

    def __len__(self) -> int:
        return self._count

    def push(self, waiting: Waiting[T]) -> None:
        """Line up a request."""
        self._number += 1
        self._count += 1
        self.size += waiting.size
        waiting.number = self._number
        self._tiers[waiting.tier].push(waiting)

    def remove(self, waiting: Waiting[T]) -> bool:
        """Take a request out (cancelled, expired); False when it has left already."""
        if waiting.left:
            return False
        self._count -= 1
        self.size -= waiting.size
        self._tiers[waiting.tier].leave(waiting)
        return True

    def pop(self, now: float, lowest: int = LOWEST, reach: int = LOWEST) -> Waiting[T] | None:
        """The next request to dispatch, where `lowest` is the lowest tier that there is room for; None: none of these.

        `reach` is the lowest that a seat is free for, were none kept. Room that is kept for a tier between is taken
        by a higher one whenever that asks, so it is no reason for those below to be left out of their turns.
        """
        busy = [number for number, tier in enumerate(self._tiers[: reach + 1]) if tier.waiting]
        if not busy or busy[0] > lowest:
            return None
        self._turns += 1
        chosen = busy[0]
        if self._turns % PROMOTED_EACH == 0 and chosen < lowest:
            old = [n for n in busy[1:] if now - self._oldest(n) > self._promote_s[n]]
            chosen = min(old, key=self._oldest, default=chosen)
        waiting = self._tiers[chosen].pop()
        self._count -= 1
        self.size -= waiting.size
        return waiting

    def charge(self, tier: int, tenant: str, weight: float, cost: float) -> None:
        """Count what a dispatched request of `tenant` cost beyond what was thought; negative: so much less."""
        self._tiers[tier].charge(tenant, weight, cost)

    def ahead(self, waiting: Waiting[T]) -> int:
        """Requests of its own tier and above that wait too."""
        return sum(len(tier.waiting) for tier in self._tiers[: waiting.tier + 1]) - (
            not waiting.left
        )

    def held(self, tier: int, tenant: str) -> Held:
        """What a tenant has waiting."""
        found, waiting = self._tiers[tier].ring.get(tenant), self._tiers[tier].waiting
        if found is None:
            return Held()
        return Held(found.alive, found.size, found.next(waiting).arrival)

    def _oldest(self, tier: int) -> float:
        return self._tiers[tier].arrivals[0][0]
