"""The order in which waiting requests are dispatched: tiers, fair shares in tokens, deadlines.

Between tiers the higher goes first, but a tier whose oldest request has waited longer than the tier's
`PROMOTE_S` takes every `PROMOTED_EACH`-th turn, so nobody starves and nobody's old backlog drowns the
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
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM = 256.0
"""Weighted tokens that the tenant of the largest weight gets in a round, each other one in proportion to its own.

Of the largest weight of those that came since nobody waited.
"""
PROMOTED_EACH = 4
PROMOTE_S = (math.inf, 5.0, 30.0)
"""For premium, standard and free: how long the oldest may wait before its tier takes turns."""
LOWEST = len(PROMOTE_S) - 1
PATIENCE_S = 30.0
"""Who has waited for so long goes before all deadlines to come: those in a hurry may never stop coming."""


def due_at(tier: int, sent_at: float) -> float:
    """When an engine that goes by such dates is to begin with a request, which it was sent at `sent_at`.

    Higher tiers go first, and a request that has waited for as long as a tier may before it takes turns goes before
    what comes then: nobody starves there either.
    """
    return sent_at + (PROMOTE_S[tier] if tier else 0.0)


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

    __slots__ = ("alive", "credit", "entry", "heap", "name", "place", "size", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.heap: list[tuple[float, int]] = []
        """By when each has to go, and its number."""
        self.alive = 0
        self.size = 0
        self.credit = 0.0
        """What it has beside that of the rounds: its weight times the tier's level."""
        self.weight = weight
        self.place = 0
        """In the ring: the lower, the sooner."""
        self.entry: _Entry[T] | None = None
        """Its only one that is true in the tier's heaps."""

    @property
    def due(self) -> float:
        """The level at which it has neither credit nor debt."""
        return -self.credit / self.weight

    def weighs(self, weight: float, level: float) -> None:
        """Another weight from now on, which is a `level` of the rounds."""
        self.credit += level * (self.weight - weight)
        self.weight = weight

    def next(self, waiting: Mapping[int, Waiting[T]]) -> Waiting[T]:
        """The one of those that wait whose turn is next; there is one."""
        while self.heap[0][1] not in waiting:
            heapq.heappop(self.heap)
        return waiting[self.heap[0][1]]


_Entry = tuple[float, int, _Tenant[T]]
"""Where a tenant stands in a heap: by its first number, the second being the entry's own."""


class _Tier(Generic[T]):
    """Deficit round robin over the tenants of one tier.

    A round gives to everybody at once, by a level that rises, and who is next is found by heaps: thousands may wait.
    """

    def __init__(self) -> None:
        self.ring: dict[str, _Tenant[T]] = {}
        """Tenants with waiting requests."""
        self.resting: dict[str, _Tenant[T]] = {}
        """Tenants without, that are in debt."""
        self.waiting: dict[int, Waiting[T]] = {}
        """By number. The heaps have no more than that: they keep who has left for as long as an older one waits."""
        self.arrivals: list[tuple[float, int]] = []
        self._level = 0.0
        """Weighted tokens that the rounds have given so far, for a weight of 1."""
        self._heaviest = 0.0
        """The largest weight since somebody waits."""
        self._numbers = itertools.count(1)
        self._able: list[_Entry[T]] = []
        """Those of the ring that have credit, by their places,"""
        self._short: list[_Entry[T]] = []
        """those that have none, by the level that they wait for,"""
        self._indebted: list[_Entry[T]] = []
        """and those that rest, likewise. Entries stay until they are met that are no longer their tenants' own."""

    def push(self, waiting: Waiting[T]) -> None:
        tenant = self.ring.get(waiting.tenant)
        if tenant is None:
            tenant = self.resting.pop(waiting.tenant, None) or self._tenant(
                waiting.tenant, waiting.weight
            )
            self.ring[waiting.tenant] = tenant
            self._to_the_end(tenant)
        if tenant.weight != waiting.weight:
            tenant.weighs(waiting.weight, self._level)
            self._line_up(tenant)
        self._heaviest = max(self._heaviest, waiting.weight)
        tenant.alive += 1
        tenant.size += waiting.size
        self.waiting[waiting.number] = waiting
        urgent = min(waiting.deadline, waiting.arrival + PATIENCE_S)
        heapq.heappush(tenant.heap, (urgent, waiting.number))
        heapq.heappush(self.arrivals, (waiting.arrival, waiting.number))

    def pop(self) -> Waiting[T]:
        tenant = self._turn()
        waiting = tenant.next(self.waiting)
        waiting.charged = len(self.ring) + len(self.resting) > 1
        if waiting.charged:
            tenant.credit -= waiting.cost
        self.leave(waiting)
        if tenant.name in self.ring and tenant.due >= self._level:
            self._to_the_end(tenant)
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
            tenant.entry = None
            if tenant.due > self._level:
                self.resting[waiting.tenant] = tenant
                self._line_up(tenant)
        if not self.ring:
            self._begin_anew()
        while self.arrivals and self.arrivals[0][1] not in self.waiting:
            heapq.heappop(self.arrivals)

    def charge(self, name: str, weight: float, cost: float) -> None:
        tenant = self.ring.get(name)
        if len(self.ring) == (tenant is not None):
            return  # nobody else waits, so nobody is kept waiting by it
        if tenant is None:
            tenant = self.resting.get(name) or self._tenant(name, weight)
            self.resting[name] = tenant
        tenant.credit -= cost
        if name in self.resting and tenant.due <= self._level:
            del self.resting[name]
            tenant.entry = None
        else:
            self._line_up(tenant)

    def _tenant(self, name: str, weight: float) -> _Tenant[T]:
        """One with neither credit nor debt."""
        tenant = _Tenant[T](name, weight)
        tenant.credit = -self._level * weight
        return tenant

    def _turn(self) -> _Tenant[T]:
        """The first tenant with credit; when none has any, as many rounds pass as one of them needs."""
        found = _first(self._able)
        if found is not None:
            return found[-1]
        short = _first(self._short)
        assert short is not None
        quantum, due = QUANTUM / self._heaviest, short[0]
        rounds = math.floor((due - self._level) / quantum) + 1
        self._level = max(self._level + rounds * quantum, math.nextafter(due, math.inf))
        while (short := _first(self._short)) is not None and short[0] < self._level:
            self._line_up(short[-1])
        while (paid := _first(self._indebted)) is not None and paid[0] <= self._level:
            tenant = paid[-1]
            tenant.entry = None
            del self.resting[tenant.name]
        return self._turn()

    def _to_the_end(self, tenant: _Tenant[T]) -> None:
        """It is the last of the ring."""
        tenant.place = next(self._numbers)
        self._line_up(tenant)

    def _line_up(self, tenant: _Tenant[T]) -> None:
        """Have it where it is looked for, as its credit is now."""
        heap, by = self._able, float(tenant.place)
        if tenant.due >= self._level:
            heap, by = self._short, tenant.due
        if tenant.name in self.resting:
            heap = self._indebted
        tenant.entry = by, next(self._numbers), tenant
        heapq.heappush(heap, tenant.entry)
        if len(heap) > 2 * (len(self.ring) + len(self.resting)):
            heap[:] = filter(_is_true, heap)
            heapq.heapify(heap)

    def _begin_anew(self) -> None:
        """Nobody waits: whoever comes next owes nothing."""
        self.resting.clear()
        for heap in (self._able, self._short, self._indebted):
            heap.clear()
        self._level = self._heaviest = 0.0


def _is_true(entry: _Entry[T]) -> bool:
    return entry[-1].entry is entry


def _first(heap: list[_Entry[T]]) -> _Entry[T] | None:
    """The first of those that are still true."""
    while heap and not _is_true(heap[0]):
        heapq.heappop(heap)
    return heap[0] if heap else None


class DispatchQueue(Generic[T]):
    """All that wait for a replica of one pool. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._tiers: tuple[_Tier[T], ...] = tuple(_Tier() for _ in PROMOTE_S)
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
            old = [n for n in busy[1:] if now - self._oldest(n) > PROMOTE_S[n]]
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
