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

QUANTUM_TOKENS = 256.0
"""Weighted tokens that the tenant of the largest weight gets in a round, each other one in proportion to its own.

Of the largest weight of those that came since nobody waited.
"""
PROMOTION_INTERVAL = 4
PROMOTE_AFTER_S = (math.inf, 5.0, 30.0)
"""For premium, standard and free: how long the oldest may wait before its tier takes turns."""
LOWEST_TIER = len(PROMOTE_AFTER_S) - 1
MAX_OVERTAKE_S = 30.0
"""Who has waited for so long goes before all deadlines to come: those in a hurry may never stop coming."""


def start_deadline(tier: int, sent_at: float) -> float:
    """When an engine that goes by such dates is to begin with a request, which it was sent at `sent_at`.

    Higher tiers go first, and a request that has waited for as long as a tier may before it takes turns goes before
    what comes then: nobody starves there either.
    """
    return sent_at + (PROMOTE_AFTER_S[tier] if tier else 0.0)


@dataclass(slots=True)
class QueuedRequest(Generic[T]):
    """A request that waits to be dispatched."""

    item: T
    tier: int
    """0 is the highest."""
    tenant: str
    weight: float
    cost_tokens: float
    """Weighted tokens that it will likely take, those of the prompt and of the answer."""
    arrived_at: float
    deadline: float = math.inf
    size_bytes: int = 0
    """Bytes that it holds while it waits."""
    sequence_number: int = field(default=0, init=False)
    """Its own, from when it is lined up."""
    has_left: bool = field(default=False, init=False)
    """Dispatched or removed."""
    is_charged: bool = field(default=False, init=False)
    """Its cost was; not so when nobody else was kept waiting."""


@dataclass(frozen=True, slots=True)
class TenantBacklog:
    """What one tenant has waiting in one tier."""

    count: int = 0
    size_bytes: int = 0
    """Bytes."""
    next_arrived_at: float = math.inf
    """When the one of them whose turn is next had come."""


class _TenantQueue(Generic[T]):
    """One tenant's requests in one tier."""

    __slots__ = (
        "count",
        "credit",
        "deadline_heap",
        "heap_entry",
        "name",
        "ring_position",
        "size_bytes",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.deadline_heap: list[tuple[float, int]] = []
        """By when each has to go, and its number."""
        self.count = 0
        self.size_bytes = 0
        self.credit = 0.0
        """What it has beside that of the rounds: its weight times the tier's level."""
        self.weight = weight
        self.ring_position = 0
        """In the ring: the lower, the sooner."""
        self.heap_entry: _HeapEntry[T] | None = None
        """Its only one that is true in the tier's heaps."""

    @property
    def break_even_level(self) -> float:
        """The level at which it has neither credit nor debt."""
        return -self.credit / self.weight

    def set_weight(self, weight: float, level: float) -> None:
        """Another weight from now on, which is a `level` of the rounds."""
        self.credit += level * (self.weight - weight)
        self.weight = weight

    def peek(self, queued: Mapping[int, QueuedRequest[T]]) -> QueuedRequest[T]:
        """The one of those that wait whose turn is next; there is one."""
        while self.deadline_heap[0][1] not in queued:
            heapq.heappop(self.deadline_heap)
        return queued[self.deadline_heap[0][1]]


_HeapEntry = tuple[float, int, _TenantQueue[T]]
"""Where a tenant stands in a heap: by its first number, the second being the entry's own."""


class _TierQueue(Generic[T]):
    """Deficit round robin over the tenants of one tier.

    A round gives to everybody at once, by a level that rises, and who is next is found by heaps: thousands may wait.
    """

    def __init__(self) -> None:
        self.ring: dict[str, _TenantQueue[T]] = {}
        """Tenants with waiting requests."""
        self.idle_debtors: dict[str, _TenantQueue[T]] = {}
        """Tenants without, that are in debt."""
        self.queued: dict[int, QueuedRequest[T]] = {}
        """By number. The heaps have no more than that: they keep who has left for as long as an older one waits."""
        self.arrival_heap: list[tuple[float, int]] = []
        self._round_level = 0.0
        """Weighted tokens that the rounds have given so far, for a weight of 1."""
        self._max_weight = 0.0
        """The largest weight since somebody waits."""
        self._numbers = itertools.count(1)
        self._credit_heap: list[_HeapEntry[T]] = []
        """Those of the ring that have credit, by their places,"""
        self._no_credit_heap: list[_HeapEntry[T]] = []
        """those that have none, by the level that they wait for,"""
        self._debtor_heap: list[_HeapEntry[T]] = []
        """and those that rest, likewise. Entries stay until they are met that are no longer their tenants' own."""

    def push(self, request: QueuedRequest[T]) -> None:
        tenant = self.ring.get(request.tenant)
        if tenant is None:
            tenant = self.idle_debtors.pop(request.tenant, None) or self._create_tenant(
                request.tenant, request.weight
            )
            self.ring[request.tenant] = tenant
            self._move_to_end(tenant)
        if tenant.weight != request.weight:
            tenant.set_weight(request.weight, self._round_level)
            self._reindex(tenant)
        self._max_weight = max(self._max_weight, request.weight)
        tenant.count += 1
        tenant.size_bytes += request.size_bytes
        self.queued[request.sequence_number] = request
        urgent = min(request.deadline, request.arrived_at + MAX_OVERTAKE_S)
        heapq.heappush(tenant.deadline_heap, (urgent, request.sequence_number))
        heapq.heappush(self.arrival_heap, (request.arrived_at, request.sequence_number))

    def pop(self) -> QueuedRequest[T]:
        tenant = self._select_tenant()
        waiting = tenant.peek(self.queued)
        waiting.is_charged = len(self.ring) + len(self.idle_debtors) > 1
        if waiting.is_charged:
            tenant.credit -= waiting.cost_tokens
        self.remove(waiting)
        if tenant.name in self.ring and tenant.break_even_level >= self._round_level:
            self._move_to_end(tenant)
        return waiting

    def remove(self, request: QueuedRequest[T]) -> None:
        request.has_left = True
        del self.queued[request.sequence_number]
        tenant = self.ring[request.tenant]
        tenant.count -= 1
        tenant.size_bytes -= request.size_bytes
        if tenant.count == 0:
            del self.ring[request.tenant]
            tenant.deadline_heap.clear()
            tenant.heap_entry = None
            if tenant.break_even_level > self._round_level:
                self.idle_debtors[request.tenant] = tenant
                self._reindex(tenant)
        if not self.ring:
            self._reset()
        while self.arrival_heap and self.arrival_heap[0][1] not in self.queued:
            heapq.heappop(self.arrival_heap)

    def charge(self, name: str, weight: float, cost_tokens: float) -> None:
        tenant = self.ring.get(name)
        if len(self.ring) == (tenant is not None):
            return  # nobody else waits, so nobody is kept waiting by it
        if tenant is None:
            tenant = self.idle_debtors.get(name) or self._create_tenant(name, weight)
            self.idle_debtors[name] = tenant
        tenant.credit -= cost_tokens
        if name in self.idle_debtors and tenant.break_even_level <= self._round_level:
            del self.idle_debtors[name]
            tenant.heap_entry = None
        else:
            self._reindex(tenant)

    def _create_tenant(self, name: str, weight: float) -> _TenantQueue[T]:
        """One with neither credit nor debt."""
        tenant = _TenantQueue[T](name, weight)
        tenant.credit = -self._round_level * weight
        return tenant

    def _select_tenant(self) -> _TenantQueue[T]:
        """The first tenant with credit; when none has any, as many rounds pass as one of them needs."""
        found = _peek_current(self._credit_heap)
        if found is not None:
            return found[-1]
        short = _peek_current(self._no_credit_heap)
        assert short is not None
        quantum, due = QUANTUM_TOKENS / self._max_weight, short[0]
        rounds = math.floor((due - self._round_level) / quantum) + 1
        self._round_level = max(self._round_level + rounds * quantum, math.nextafter(due, math.inf))
        while (short := _peek_current(self._no_credit_heap)) is not None and short[
            0
        ] < self._round_level:
            self._reindex(short[-1])
        while (paid := _peek_current(self._debtor_heap)) is not None and paid[
            0
        ] <= self._round_level:
            tenant = paid[-1]
            tenant.heap_entry = None
            del self.idle_debtors[tenant.name]
        return self._select_tenant()

    def _move_to_end(self, tenant: _TenantQueue[T]) -> None:
        """It is the last of the ring."""
        tenant.ring_position = next(self._numbers)
        self._reindex(tenant)

    def _reindex(self, tenant: _TenantQueue[T]) -> None:
        """Have it where it is looked for, as its credit is now."""
        heap, by = self._credit_heap, float(tenant.ring_position)
        if tenant.break_even_level >= self._round_level:
            heap, by = self._no_credit_heap, tenant.break_even_level
        if tenant.name in self.idle_debtors:
            heap = self._debtor_heap
        tenant.heap_entry = by, next(self._numbers), tenant
        heapq.heappush(heap, tenant.heap_entry)
        if len(heap) > 2 * (len(self.ring) + len(self.idle_debtors)):
            heap[:] = filter(_is_current, heap)
            heapq.heapify(heap)

    def _reset(self) -> None:
        """Nobody waits: whoever comes next owes nothing."""
        self.idle_debtors.clear()
        for heap in (self._credit_heap, self._no_credit_heap, self._debtor_heap):
            heap.clear()
        self._round_level = self._max_weight = 0.0


def _is_current(entry: _HeapEntry[T]) -> bool:
    return entry[-1].heap_entry is entry


def _peek_current(heap: list[_HeapEntry[T]]) -> _HeapEntry[T] | None:
    """The first of those that are still true."""
    while heap and not _is_current(heap[0]):
        heapq.heappop(heap)
    return heap[0] if heap else None


class DispatchQueue(Generic[T]):
    """All that wait for a replica of one pool. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._tiers: tuple[_TierQueue[T], ...] = tuple(_TierQueue() for _ in PROMOTE_AFTER_S)
        self._last_number = 0
        self._turn_count = 0
        self._count = 0
        self.size_bytes = 0
        """Bytes held by those who wait."""

    def __len__(self) -> int:
        return self._count

    def push(self, request: QueuedRequest[T]) -> None:
        """Line up a request."""
        self._last_number += 1
        self._count += 1
        self.size_bytes += request.size_bytes
        request.sequence_number = self._last_number
        self._tiers[request.tier].push(request)

    def remove(self, request: QueuedRequest[T]) -> bool:
        """Take a request out (cancelled, expired); False when it has left already."""
        if request.has_left:
            return False
        self._count -= 1
        self.size_bytes -= request.size_bytes
        self._tiers[request.tier].remove(request)
        return True

    def pop(
        self, now: float, lowest_tier: int = LOWEST_TIER, lowest_free_tier: int = LOWEST_TIER
    ) -> QueuedRequest[T] | None:
        """The next request to dispatch, where `lowest` is the lowest tier that there is room for; None: none of these.

        `reach` is the lowest that a seat is free for, were none kept. Room that is kept for a tier between is taken
        by a higher one whenever that asks, so it is no reason for those below to be left out of their turns.
        """
        busy = [
            number for number, tier in enumerate(self._tiers[: lowest_free_tier + 1]) if tier.queued
        ]
        if not busy or busy[0] > lowest_tier:
            return None
        self._turn_count += 1
        chosen = busy[0]
        if self._turn_count % PROMOTION_INTERVAL == 0 and chosen < lowest_tier:
            old = [n for n in busy[1:] if now - self._oldest_arrival(n) > PROMOTE_AFTER_S[n]]
            chosen = min(old, key=self._oldest_arrival, default=chosen)
        waiting = self._tiers[chosen].pop()
        self._count -= 1
        self.size_bytes -= waiting.size_bytes
        return waiting

    def charge_tenant(self, tier: int, tenant: str, weight: float, cost_tokens: float) -> None:
        """Count what a dispatched request of `tenant` cost beyond what was thought; negative: so much less."""
        self._tiers[tier].charge(tenant, weight, cost_tokens)

    def count_ahead(self, request: QueuedRequest[T]) -> int:
        """Requests of its own tier and above that wait too."""
        return sum(len(tier.queued) for tier in self._tiers[: request.tier + 1]) - (
            not request.has_left
        )

    def tenant_backlog(self, tier: int, tenant: str) -> TenantBacklog:
        """What a tenant has waiting."""
        found, waiting = self._tiers[tier].ring.get(tenant), self._tiers[tier].queued
        if found is None:
            return TenantBacklog()
        return TenantBacklog(found.count, found.size_bytes, found.peek(waiting).arrived_at)

    def _oldest_arrival(self, tier: int) -> float:
        return self._tiers[tier].arrival_heap[0][0]
