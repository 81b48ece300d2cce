"""Who is next: the only place where order among waiting requests is decided."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from argosy.engine.scheduling.sequence import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from argosy.engine.scheduling.sequence import Sequence

_arrival = attrgetter("arrived_at")


class WaitingQueue:
    """Waiting sequences by (tier, tenant's service per weight, arrival).

    Those that ran before (preempted) keep their place at the head of their tier, by seniority.
    """

    def __init__(self) -> None:
        self._preempted: dict[int, list[Sequence]] = {}
        """Tier -> preempted sequences, most important last."""
        self._by_tenant: dict[int, dict[str, deque[Sequence]]] = {}
        """Tier -> tenant -> sequences by arrival."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for returned in self._preempted.values():
            yield from returned
        for tenants in self._by_tenant.values():
            for line in tenants.values():
                yield from line

    def push(self, seq: Sequence) -> None:
        """Line up a sequence by its arrival, or where it was when it has run before (preempted)."""
        self._size += 1
        if seq.priority_order[1] != NEVER:
            insort(self._preempted.setdefault(seq.tier, []), seq, key=_preempted_key)
            return
        line = self._by_tenant.setdefault(seq.tier, {}).setdefault(
            seq.tenant_counter.tenant, deque()
        )
        if line and line[-1].arrived_at > seq.arrived_at:  # it was held for a while
            insort(line, seq, key=_arrival)
        else:
            line.append(seq)

    def peek(self) -> Sequence | None:
        """The sequence whose turn it is; it stays in the queue."""
        for tier in sorted(self._preempted.keys() | self._by_tenant.keys()):
            if returned := self._preempted.get(tier):
                return returned[-1]
            if tenants := self._by_tenant.get(tier):
                line = min(tenants.values(), key=_fairness_key)
                return line[0]
        return None

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out."""
        returned = self._preempted.get(seq.tier)
        if returned and seq in returned:
            returned.remove(seq)
            if not returned:
                del self._preempted[seq.tier]
        else:
            tenants = self._by_tenant[seq.tier]
            line = tenants[seq.tenant_counter.tenant]
            line.remove(seq)
            if not line:
                del tenants[seq.tenant_counter.tenant]
            if not tenants:
                del self._by_tenant[seq.tier]
        self._size -= 1


def _preempted_key(seq: Sequence) -> int:
    """The first admitted comes last, where it is cheap to take."""
    return -seq.priority_order[1]


def _fairness_key(line: deque[Sequence]) -> tuple[float, float]:
    """Least served first, then first come."""
    return line[0].tenant_counter.served_tokens, line[0].arrived_at
