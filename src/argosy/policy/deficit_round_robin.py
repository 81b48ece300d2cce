"""Fair token shares of the tenants of one tier, and the order of each tenant's requests.

Tenants share by deficit round robin (Shreedhar & Varghese 1995), with the deficit in weighted tokens
(`weighted_tokens`). A tenant with credit is served until its credit is used up. Then it waits until the rounds have
granted credit again, `QUANTUM_TOKENS` each, scaled by weight.

A dispatched request is charged its expected cost at once, so that a tenant cannot take all slots before its first token
has arrived. The actual cost, including the prompt and its cached part, is known only as the response streams.
Therefore `charge` may put a tenant into debt, which later rounds pay off, or refund the excess. Service while no other
tenant waits creates no debt. Between two tenants that wait all the time, service per weight differs by at most two
quanta. The unexpected cost of each tenant's running requests adds to that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

QUANTUM_TOKENS = 256.0
"""Weighted tokens per round for the tenant with the largest weight; others get credit in proportion to their weight.

The largest weight is that of all requests pushed since the tier was last empty.
"""


class QueuedRequest(msgspec.Struct, eq=False, kw_only=True):
    """Request that can wait to be dispatched."""

    tier: int
    """Tier of the tenant; 0 is the highest."""
    tenant: str
    weight: float
    cost_tokens: float = 0.0
    """Expected cost in weighted tokens of prompt and response."""
    arrived_at: float = 0.0
    """When it began to wait."""
    deadline: float = math.inf
    size_bytes: int = 0
    """Bytes of memory that the request holds while it waits."""
    is_first: bool = False
    """Whether it precedes the tenant's other requests, because it has run before."""
    sequence_number: int = 0
    """Unique number, assigned by `DispatchQueue.push`."""
    is_queued: bool = False
    """Whether it waits in a queue."""
    is_charged: bool = False
    """Whether the cost was charged to the tenant, which happens only if another tenant waited or had debt."""


T = TypeVar("T", bound=QueuedRequest)


class _TenantQueue(Generic[T]):
    """Queue of one tenant's requests in one tier."""

    __slots__ = (
        "count",
        "credit",
        "deadline_heap",
        "heap_entry",
        "is_held",
        "name",
        "ring_position",
        "size_bytes",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.deadline_heap: list[tuple[float, int]] = []
        """Deadline and sequence number of each request."""
        self.count = 0
        self.size_bytes = 0
        self.credit = 0.0
        """Credit besides that of the rounds, which is the weight times the round level of the tier."""
        self.weight = weight
        self.ring_position = 0
        """Position in the ring; the lowest is served first."""
        self.heap_entry: _HeapEntry[T] | None = None
        """Current entry in one of the tier's heaps; all other entries of this tenant are stale."""
        self.is_held = False
        """Whether the other tenants of the tier go first."""

    @property
    def break_even_level(self) -> float:
        """Round level at which the tenant has neither credit nor debt."""
        return -self.credit / self.weight

    def set_weight(self, weight: float, level: float) -> None:
        """Change the weight at round level `level`, keeping the present credit."""
        self.credit += level * (self.weight - weight)
        self.weight = weight

    def peek(self, queued: Mapping[int, T]) -> T:
        """Return the next request. The tenant must have one in `queued`."""
        while self.deadline_heap[0][1] not in queued:
            heapq.heappop(self.deadline_heap)
        return queued[self.deadline_heap[0][1]]


_HeapEntry = tuple[float, int, _TenantQueue[T]]
"""Heap entry of a tenant, with the sort key and a unique number of the entry."""


class TierQueue(Generic[T]):
    """Queue of one tier.

    A round grants credit to all tenants at once by raising the round level. Heaps find the next tenant, because
    thousands may wait.

    Args:
        max_overtake_s: Wait after which a request precedes all later deadlines of its tenant.
    """

    def __init__(self, max_overtake_s: float) -> None:
        self._max_overtake_s = max_overtake_s
        self.ring: dict[str, _TenantQueue[T]] = {}
        """Tenants with waiting requests."""
        self.idle_debtors: dict[str, _TenantQueue[T]] = {}
        """Tenants without waiting requests that are in debt."""
        self.queued: dict[int, T] = {}
        """Waiting requests by sequence number.

        The heaps hold numbers only. They keep the number of a dequeued request while an older request waits.
        """
        self.arrival_heap: list[tuple[float, int]] = []
        self._round_level = 0.0
        """Weighted tokens that all rounds so far have granted to a weight of 1."""
        self._max_weight = 0.0
        """Largest weight pushed since the tier was last empty."""
        self._numbers = itertools.count(1)
        self._credit_heap: list[_HeapEntry[T]] = []
        """Waiting tenants with credit, by position in the ring. This and the next two heaps may hold stale entries."""
        self._no_credit_heap: list[_HeapEntry[T]] = []
        """Waiting tenants without credit, by their break-even level."""
        self._debtor_heap: list[_HeapEntry[T]] = []
        """Idle tenants in debt, by their break-even level."""
        self.held: set[str] = set()
        """Tenants that are served only while no other tenant waits."""

    def push(self, request: T) -> None:
        """Enqueue a request."""
        tenant = self.ring.get(request.tenant)
        if tenant is None:
            tenant = self.idle_debtors.pop(request.tenant, None) or self._create_tenant(
                request.tenant, request.weight
            )
            self.ring[request.tenant] = tenant
            tenant.is_held = request.tenant in self.held
            self._move_to_end(tenant)
        if tenant.weight != request.weight:
            tenant.set_weight(request.weight, self._round_level)
            self._reindex(tenant)
        self._max_weight = max(self._max_weight, request.weight)
        tenant.count += 1
        tenant.size_bytes += request.size_bytes
        self.queued[request.sequence_number] = request
        request.is_queued, request.is_charged = True, False
        deadline = min(request.deadline, request.arrived_at + self._max_overtake_s)
        if request.is_first:
            deadline = -math.inf
        heapq.heappush(tenant.deadline_heap, (deadline, request.sequence_number))
        heapq.heappush(self.arrival_heap, (request.arrived_at, request.sequence_number))

    def pop(self) -> T:
        """Dequeue the next request. There must be one."""
        tenant = self._select_tenant()
        request = tenant.peek(self.queued)
        self._charge_and_remove(request, tenant)
        if tenant.name in self.ring and (
            tenant.is_held or tenant.break_even_level >= self._round_level
        ):
            self._move_to_end(tenant)
        return request

    def take(self, request: T) -> None:
        """Dequeue a request out of turn."""
        tenant = self.ring[request.tenant]
        self._charge_and_remove(request, tenant)
        if tenant.name in self.ring:
            self._reindex(tenant)

    def _charge_and_remove(self, request: T, tenant: _TenantQueue[T]) -> None:
        """Dequeue a request. Its tenant pays the expected cost, unless no other tenant waits or has debt."""
        request.is_charged = len(self.ring) + len(self.idle_debtors) > 1
        if request.is_charged:
            tenant.credit -= request.cost_tokens
        self.remove(request)

    def remove(self, request: T) -> None:
        """Remove a request without charging its tenant."""
        request.is_queued = False
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
        """Charge a tenant, or refund a negative amount."""
        tenant = self.ring.get(name)
        if len(self.ring) == (tenant is not None):
            return  # no other tenant waits, so the service delays no other tenant
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
        """Create a tenant with neither credit nor debt."""
        tenant = _TenantQueue[T](name, weight)
        tenant.credit = -self._round_level * weight
        return tenant

    def hold(self, name: str, *, is_held: bool) -> None:
        """Let the other waiting tenants of the tier go before a tenant, or end this."""
        if is_held:
            self.held.add(name)
        else:
            self.held.discard(name)
        tenant = self.ring.get(name)
        if tenant is None or tenant.is_held == is_held:
            return
        tenant.is_held = is_held
        if not is_held:  # the time without turns gives no credit
            tenant.credit = min(tenant.credit, -self._round_level * tenant.weight)
        self._reindex(tenant)

    def _select_tenant(self) -> _TenantQueue[T]:
        """Return the first tenant with credit, after as many rounds as it takes until a tenant has credit.

        If all tenants are held, they are served in the order of their positions in the ring.
        """
        with_credit = _peek_current(self._credit_heap)
        if with_credit is not None:
            return with_credit[-1]
        entry = _peek_current(self._no_credit_heap)
        if entry is None:
            return min(self.ring.values(), key=lambda tenant: tenant.ring_position)
        quantum, break_even = QUANTUM_TOKENS / self._max_weight, entry[0]
        rounds = math.floor((break_even - self._round_level) / quantum) + 1
        self._round_level = max(
            self._round_level + rounds * quantum, math.nextafter(break_even, math.inf)
        )
        while (entry := _peek_current(self._no_credit_heap)) is not None and entry[
            0
        ] < self._round_level:
            self._reindex(entry[-1])
        while (debtor := _peek_current(self._debtor_heap)) is not None and debtor[
            0
        ] <= self._round_level:
            tenant = debtor[-1]
            tenant.heap_entry = None
            del self.idle_debtors[tenant.name]
        return self._select_tenant()

    def _move_to_end(self, tenant: _TenantQueue[T]) -> None:
        """Make the tenant the last of the ring."""
        tenant.ring_position = next(self._numbers)
        self._reindex(tenant)

    def _reindex(self, tenant: _TenantQueue[T]) -> None:
        """Put the tenant into the heap that matches its present credit. A held one is in no heap while it waits."""
        if tenant.is_held and tenant.name in self.ring:
            tenant.heap_entry = None
            return
        heap, sort_key = self._credit_heap, float(tenant.ring_position)
        if tenant.break_even_level >= self._round_level:
            heap, sort_key = self._no_credit_heap, tenant.break_even_level
        if tenant.name in self.idle_debtors:
            heap = self._debtor_heap
        tenant.heap_entry = sort_key, next(self._numbers), tenant
        heapq.heappush(heap, tenant.heap_entry)
        if len(heap) > 2 * (len(self.ring) + len(self.idle_debtors)):
            heap[:] = filter(_is_current, heap)
            heapq.heapify(heap)

    def _reset(self) -> None:
        """Cancel all debts, since no tenant waits."""
        self.idle_debtors.clear()
        for heap in (self._credit_heap, self._no_credit_heap, self._debtor_heap):
            heap.clear()
        self._round_level = self._max_weight = 0.0


def _is_current(entry: _HeapEntry[T]) -> bool:
    return entry[-1].heap_entry is entry


def _peek_current(heap: list[_HeapEntry[T]]) -> _HeapEntry[T] | None:
    """Drop stale entries and return the first current one; None if there is none."""
    while heap and not _is_current(heap[0]):
        heapq.heappop(heap)
    return heap[0] if heap else None
