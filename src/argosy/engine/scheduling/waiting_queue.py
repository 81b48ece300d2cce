"""Queue of waiting sequences, which alone defines the order among them."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from argosy.engine.scheduling.sequence import NEVER, Sequence

_arrival_key = attrgetter("arrived_at")


class WaitingQueue:
    """Queue of waiting sequences by (tier, tenant's service per weight, arrival).

    Preempted sequences go to the head of their tier, in the order of their first admission.
    """

    def __init__(self) -> None:
        self._preempted: dict[int, list[Sequence]] = {}
        """Tier -> preempted sequences, first admitted last."""
        self._by_tenant: dict[int, dict[str, deque[Sequence]]] = {}
        """Tier -> tenant -> sequences by arrival."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for preempted in self._preempted.values():
            yield from preempted
        for tenants in self._by_tenant.values():
            for tenant_queue in tenants.values():
                yield from tenant_queue

    def push(self, seq: Sequence) -> None:
        """Queue a sequence by its arrival, or by its first admission if it was preempted."""
        self._size += 1
        if seq.priority_order[1] != NEVER:
            insort(self._preempted.setdefault(seq.tier, []), seq, key=_preempted_key)
            return
        tenant_queue = self._by_tenant.setdefault(seq.tier, {}).setdefault(
            seq.tenant_counter.tenant, deque()
        )
        # A sequence that was blocked for a while belongs before later arrivals.
        if tenant_queue and tenant_queue[-1].arrived_at > seq.arrived_at:
            insort(tenant_queue, seq, key=_arrival_key)
        else:
            tenant_queue.append(seq)

    def peek(self) -> Sequence | None:
        """Return the head of the queue without removing it."""
        for tier in sorted(self._preempted.keys() | self._by_tenant.keys()):
            if preempted := self._preempted.get(tier):
                return preempted[-1]
            if tenants := self._by_tenant.get(tier):
                tenant_queue = min(tenants.values(), key=_fairness_key)
                return tenant_queue[0]
        return None

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence from the queue."""
        preempted = self._preempted.get(seq.tier)
        if preempted and seq in preempted:
            preempted.remove(seq)
            if not preempted:
                del self._preempted[seq.tier]
        else:
            tenants = self._by_tenant[seq.tier]
            tenant_queue = tenants[seq.tenant_counter.tenant]
            tenant_queue.remove(seq)
            if not tenant_queue:
                del tenants[seq.tenant_counter.tenant]
            if not tenants:
                del self._by_tenant[seq.tier]
        self._size -= 1


def _preempted_key(seq: Sequence) -> int:
    """Return the sort key that puts the first admitted sequence last, where removal is cheap."""
    return -seq.priority_order[1]


def _fairness_key(tenant_queue: deque[Sequence]) -> tuple[float, float]:
    """Return the sort key of a tenant's queue, by tokens served and then by arrival."""
    return tenant_queue[0].tenant_counter.served_tokens, tenant_queue[0].arrived_at
