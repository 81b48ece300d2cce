"""Every request that has not ended: found by id, by deadline, and by what it is held for."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from argosy.engine.scheduling.sequence import Sequence


class RequestRegistry:
    """Requests from their arrival to their end, whatever happens to them between.

    Readiness is a state: a sibling is held until its lead's prompt is computed, so that it can take it
    over; a request whose prefix is being computed is held until it can be found.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._blocked: dict[Sequence | bytes, list[Sequence]] = {}
        """Lead, or key of a block -> those who wait for it."""
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, request_id: str | None) -> Sequence | None:
        """The request of this id, unless it has ended."""
        return None if request_id is None else self._by_id.get(request_id)

    def add(self, seq: Sequence) -> bool:
        """A new request; its id must not be in use. Returns whether it may queue up: it is not held."""
        assert seq.id not in self._by_id, f"request id {seq.id} is in use"
        self._by_id[seq.id] = seq
        if seq.deadline < float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.id))
        if len(self._deadlines) > 1000 + 4 * len(self._by_id):  # most of them have ended long ago
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_id]
            heapq.heapify(self._deadlines)
        if seq.parent is None or seq.parent.is_prefilled:
            return True
        self.block(seq, seq.parent)
        return False

    def block(self, seq: Sequence, dependency: Sequence | bytes) -> None:
        """It waits for a lead or for a block."""
        self._blocked.setdefault(dependency, []).append(seq)
        seq.blocked_on = dependency

    def unblock(self, dependency: Sequence | bytes) -> list[Sequence]:
        """Those who need not wait for it any longer: it is there, or will not come."""
        released = self._blocked.pop(dependency, [])
        for seq in released:
            seq.blocked_on = None
        return released

    def remove(self, seq: Sequence) -> None:
        """The request has ended."""
        del self._by_id[seq.id]
        if seq.blocked_on is not None:
            self._blocked[seq.blocked_on].remove(seq)
            seq.blocked_on = None

    def pop_expired(self, now: float) -> list[Sequence]:
        """The requests whose deadline has passed; each is told once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            seq = self._by_id.get(request_id)
            if seq is not None and seq.deadline <= now:
                late.append(seq)
        return late

    @property
    def blocked_requests(self) -> list[Sequence]:
        """All that wait for a lead or a block."""
        return [seq for waiting in self._blocked.values() for seq in waiting]
