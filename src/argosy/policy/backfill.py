"""Backfill: how many lines of batches a gateway runs beside online requests, and which are next.

Lines use slots that online requests leave free. Some slots stay free for a burst: as many as online requests have
lately used at most, and at least an eighth of all. Without online requests for `PEAK_WINDOW_S` lines may use all.
The window falls at once, and at most doubles each second. So a pool that was full is not filled by all gateways in one
moment.

Owners share lines by deficit round robin (Shreedhar & Varghese 1995), whose deficit is in tokens. Of one owner the
batch with the earliest deadline comes first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

PEAK_WINDOW_S = 60.0
"""Time for which a peak of online requests keeps slots free."""
RESERVED_SLOT_DIVISOR = 8
"""The slots divided by this number stay free while online requests arrive."""
GROWTH_INTERVAL_S = 1.0
"""Time in which the window may double."""
MAX_KV_USAGE = 0.85
"""KV cache usage beyond which no line starts."""
RISK_WINDOW_S = 60.0
"""Time over which the pace of a batch is measured."""
MAX_PLANNED_FRACTION = 0.8
"""Fraction of the time left that the open lines of a batch may take. Beyond it the batch is at risk."""
MAX_RAISED_DIVISOR = 4
"""At most the slots divided by this number run lines of batches that are at risk with the rank of online requests."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Requests and slots of one pool at one gateway."""

    total_slots: int
    free_slots: int
    """Slots that the gateway may use for lines now."""
    running_lines: int
    """Lines that occupy slots."""
    online_running: int
    online_waiting: int
    kv_usage: float
    """Smallest KV cache usage of the replicas, from 0 to 1."""


class BackfillWindow:
    """Window of one pool: lines that may run. Not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        """The window as of the last update."""
        self._grown_at = -math.inf
        self._peaks: deque[tuple[float, int]] = deque()
        """Number of online requests by time, without those that were followed by as many."""

    def update(self, load: PoolLoad, now: float) -> int:
        """Return how many lines may run.

        Args:
            load: Load of the pool.
            now: Monotonic seconds.
        """
        target = self._find_target(load, now)
        if target <= self.size:
            self.size = target
        elif now - self._grown_at >= GROWTH_INTERVAL_S:
            self._grown_at = now
            self.size = min(target, max(1, 2 * self.size))
        return self.size

    def _find_target(self, load: PoolLoad, now: float) -> int:
        peaks, online = self._peaks, load.online_running
        while peaks and peaks[0][0] < now - PEAK_WINDOW_S:
            peaks.popleft()
        while peaks and peaks[-1][1] <= online:
            peaks.pop()
        if online:
            peaks.append((now, online))
        if load.online_waiting or load.kv_usage > MAX_KV_USAGE:
            return 0
        reserve = 0
        if peaks:
            share = -(-load.total_slots // RESERVED_SLOT_DIVISOR)
            reserve = max(share, peaks[0][1] - online)
        return max(0, load.running_lines + load.free_slots - reserve)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Lines of one batch that wait for one pool."""

    owner: str
    batch: str
    deadline: float
    lines: int
    cost_tokens: float
    """Expected tokens of one line, more than 0."""


class LineShares:
    """Shares of owners in the lines of one pool. Deterministic."""

    def __init__(self) -> None:
        self._credits: dict[str, float] = {}
        """Tokens that owners may still use in their turn."""
        self._current = ""
        """Owner whose turn has begun."""

    def choose(self, backlogs: Sequence[Backlog], count: int) -> dict[str, int]:
        """Return how many lines of which batches start next, at most `count`, in this order.

        Between two owners that wait all the time, the tokens of chosen lines differ by at most two quanta. A quantum is
        the largest cost of a line.
        """
        waiting: dict[str, deque[list[float | str]]] = {}
        for each in sorted(backlogs, key=lambda each: (each.deadline, each.batch)):
            if each.lines:
                entry: list[float | str] = [each.batch, each.lines, each.cost_tokens]
                waiting.setdefault(each.owner, deque()).append(entry)
        self._credits = {owner: self._credits.get(owner, 0.0) for owner in waiting}
        quantum = max((each.cost_tokens for each in backlogs if each.lines), default=0.0)
        ring = deque(sorted(waiting, key=lambda owner: (owner < self._current, owner)))
        has_turn = bool(ring) and ring[0] == self._current
        chosen: dict[str, int] = {}
        while count and ring:
            owner = ring[0]
            if not has_turn:
                self._current, has_turn = owner, True
                self._credits[owner] += quantum
            queue = waiting[owner]
            while count and queue and self._credits[owner] >= float(queue[0][2]):
                batch, lines, cost = str(queue[0][0]), int(queue[0][1]), float(queue[0][2])
                taken = min(count, lines, int(self._credits[owner] // cost))
                chosen[batch] = chosen.get(batch, 0) + taken
                self._credits[owner] -= taken * cost
                count -= taken
                queue[0][1] = lines - taken
                if lines == taken:
                    queue.popleft()
            if not queue:
                del self._credits[owner]
                ring.popleft()
                has_turn = False
            elif count:
                ring.rotate(-1)
                has_turn = False
        return chosen


class BatchPace:
    """Pace of one batch, by which its end is predicted."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def record(self, open_lines: int, now: float) -> None:
        """Record the lines that have not ended."""
        self._samples.append((now, open_lines))
        while self._samples[0][0] < now - RISK_WINDOW_S:
            self._samples.popleft()

    def is_at_risk(self, time_left_s: float) -> bool:
        """Return whether the lines may not end in time at this pace. False until it has been measured for a while."""
        (start, before), (now, after) = self._samples[0], self._samples[-1]
        if not after or now - start < RISK_WINDOW_S / 2:
            return False
        rate = max(0, before - after) / (now - start)
        return after > rate * MAX_PLANNED_FRACTION * time_left_s
