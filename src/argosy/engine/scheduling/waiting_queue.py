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

_arrival = attrgetter("arrival")


class FairQueue:
    """Waiting sequences by (tier, tenant's service per weight, arrival).

    Those that ran before (preempted) keep their place at the head of their tier, by seniority.
    """

    def __init__(self) -> None:
        self._returned: dict[int, list[Sequence]] = {}
        """Tier -> preempted sequences, most important last."""
        self._fresh: dict[int, dict[str, deque[Sequence]]] = {}
        """Tier -> tenant -> sequences by arrival."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for returned in self._returned.values():
            yield from returned
        for tenants in self._fresh.values():
            for line in tenants.values():
                yield from line

    def push(self, seq: Sequence) -> None:
        """Line up a sequence by its arrival, or where it was when it has run before (preempted)."""
        self._size += 1
        if seq.order[1] != NEVER:
            insort(self._returned.setdefault(seq.tier, []), seq, key=_seniority)
            return
        line = self._fresh.setdefault(seq.tier, {}).setdefault(seq.account.tenant, deque())
        if line and line[-1].arrival > seq.arrival:  # it was held for a while
            insort(line, seq, key=_arrival)
        else:
            line.append(seq)

    def head(self) -> Sequence | None:
        """The sequence whose turn it is; it stays in the queue."""
        for tier in sorted(self._returned.keys() | self._fresh.keys()):
            if returned := self._returned.get(tier):
                return returned[-1]
            if tenants := self._fresh.get(tier):
                line = min(tenants.values(), key=_claim)
                return line[0]
        return None

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out."""
        returned = self._returned.get(seq.tier)
        if returned and seq in returned:
            returned.remove(seq)
            if not returned:
                del self._returned[seq.tier]
        else:
            tenants = self._fresh[seq.tier]
            line = tenants[seq.account.tenant]
            line.remove(seq)
            if not line:
                del tenants[seq.account.tenant]
            if not tenants:
                del self._fresh[seq.tier]
        self._size -= 1


def _seniority(seq: Sequence) -> int:
    """The first admitted comes last, where it is cheap to take."""
    return -seq.order[1]


def _claim(line: deque[Sequence]) -> tuple[float, float]:
    """Least served first, then first come."""
    return line[0].account.served, line[0].arrival
