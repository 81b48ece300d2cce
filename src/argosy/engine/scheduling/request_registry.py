"""Registry of unfinished requests by id, by deadline, and by the lead or block that they wait for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from argosy.engine.scheduling.sequence import Sequence


class RequestRegistry:
    """Registry of all unfinished requests, whether they run, wait or are blocked.

    A sibling is blocked until its lead's prompt is computed, because the sibling then shares the lead's blocks. A
    request is also blocked while another sequence computes its prefix.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._blocked: dict[Sequence | bytes, list[Sequence]] = {}
        """Lead or block key -> sequences that wait for it."""
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, request_id: str | None) -> Sequence | None:
        """Return the unfinished request with this id, or None."""
        return None if request_id is None else self._by_id.get(request_id)

    def add(self, seq: Sequence) -> bool:
        """Add a request, whose id must not be in use, and return whether it may enter the queue."""
        assert seq.id not in self._by_id, f"request id {seq.id} is in use"
        self._by_id[seq.id] = seq
        if seq.deadline < float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.id))
        if len(self._deadlines) > 1000 + 4 * len(self._by_id):  # drop deadlines of ended requests
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_id]
            heapq.heapify(self._deadlines)
        if seq.parent is None or seq.parent.is_prefilled:
            return True
        self.block(seq, seq.parent)
        return False

    def block(self, seq: Sequence, dependency: Sequence | bytes) -> None:
        """Block a sequence until `unblock` is called for its dependency, a lead or a block key."""
        self._blocked.setdefault(dependency, []).append(seq)
        seq.blocked_on = dependency

    def unblock(self, dependency: Sequence | bytes) -> list[Sequence]:
        """Return and unblock the sequences that wait for `dependency`, which is available or abandoned."""
        released = self._blocked.pop(dependency, [])
        for seq in released:
            seq.blocked_on = None
        return released

    def remove(self, seq: Sequence) -> None:
        """Remove a request that has ended."""
        del self._by_id[seq.id]
        if seq.blocked_on is not None:
            self._blocked[seq.blocked_on].remove(seq)
            seq.blocked_on = None

    def pop_expired(self, now: float) -> list[Sequence]:
        """Return the requests whose deadline has passed. Each request is returned once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            seq = self._by_id.get(request_id)
            if seq is not None and seq.deadline <= now:
                expired.append(seq)
        return expired

    @property
    def blocked_requests(self) -> list[Sequence]:
        """Requests that wait for a lead or a block."""
        return [seq for waiting in self._blocked.values() for seq in waiting]
