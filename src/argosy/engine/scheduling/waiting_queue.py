"""Queue of waiting sequences, which alone defines the order among them."""

from __future__ import annotations

from bisect import insort, insort_left
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from argosy.engine.scheduling.sequence import NEVER, Sequence

_arrival_key = attrgetter("arrived_at")


class WaitingQueue:
    """Queue of waiting sequences by (tier, tenant's service per weight, arrival).

    A preempted sequence waits there too. It has its old place, because it arrived before the others of its tenant. A
    request of which `max_group_seqs` sequences run lets the other requests of its tenant go first.
    """

    def __init__(self, max_group_seqs: int) -> None:
        self._max_group_seqs = max_group_seqs
        self._by_tenant: dict[int, dict[str, deque[Sequence]]] = {}
        """Tier -> tenant -> sequences by arrival. Of each group only the first one is in it."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for tenants in self._by_tenant.values():
            for tenant_queue in tenants.values():
                for seq in tenant_queue:
                    yield from (seq,) if seq.group is None else seq.group.waiting

    def push(self, seq: Sequence) -> None:
        """Queue a sequence by its arrival. A preempted one follows the first of its group, which keeps its position."""
        self._size += 1
        if seq.group is not None:
            waiting = seq.group.waiting
            if waiting:
                waiting.insert(1 if seq.priority_order[1] != NEVER else len(waiting), seq)
                return
            waiting.append(seq)
        self._insert(seq)

    def peek(self) -> Sequence | None:
        """Return the head of the queue without removing it."""
        if not self._by_tenant:
            return None
        tenants = self._by_tenant[min(self._by_tenant)]
        return min(map(self._find_head, tenants.values()), key=_fairness_key)

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence from the queue."""
        self._size -= 1
        if seq.group is not None:
            is_first = seq.group.waiting[0] is seq
            seq.group.waiting.remove(seq)
            if not is_first:
                return
        tenants = self._by_tenant[seq.tier]
        tenant_queue = tenants[seq.tenant_counter.tenant]
        tenant_queue.remove(seq)
        if not tenant_queue:
            del tenants[seq.tenant_counter.tenant]
        if not tenants:
            del self._by_tenant[seq.tier]
        if seq.group is not None and seq.group.waiting:
            self._insert(seq.group.waiting[0])

    def _insert(self, seq: Sequence) -> None:
        tenant_queue = self._by_tenant.setdefault(seq.tier, {}).setdefault(
            seq.tenant_counter.tenant, deque()
        )
        if seq.priority_order[1] != NEVER:
            insort_left(tenant_queue, seq, key=_arrival_key)
        # A sequence that was blocked for a while belongs before later arrivals.
        elif tenant_queue and tenant_queue[-1].arrived_at > seq.arrived_at:
            insort(tenant_queue, seq, key=_arrival_key)
        else:
            tenant_queue.append(seq)

    def _find_head(self, tenant_queue: deque[Sequence]) -> Sequence:
        """Return the next sequence of a tenant. At most `max_seqs` / `max_group_seqs` groups are passed over."""
        for seq in tenant_queue:
            if seq.group is None or seq.group.num_running < self._max_group_seqs:
                return seq
        return tenant_queue[0]


def _fairness_key(head: Sequence) -> tuple[float, float]:
    """Return the sort key of a tenant's next sequence, by tokens served and then by arrival."""
    return head.tenant_counter.served_tokens, head.arrived_at
