"""Pending timers of the placement core, earliest first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

Action = Callable[[float], None]
"""Function that is called at the time, with the time."""


class Timers:
    """Heap of timers. A cancelled timer stays in the heap until its time has come, and does nothing then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._actions: dict[int, Action] = {}
        self._numbers = itertools.count(1)
        self.next_at = math.inf
        """Time of the next timer; infinite if there is none."""

    def __len__(self) -> int:
        return len(self._actions)

    def add(self, at: float, action: Action) -> int:
        """Start a timer, and return its number, by which `cancel` knows it."""
        number = next(self._numbers)
        heapq.heappush(self._heap, (at, number))
        self.next_at = min(self.next_at, at)
        self._actions[number] = action
        return number

    def cancel(self, number: int) -> None:
        """Cancel a timer, if it has not fired yet."""
        if self._actions.pop(number, None) is not None:
            self._drop_cancelled()

    def fire(self, now: float) -> None:
        """Run the actions of all timers whose time has come, in the order of their times."""
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            action = self._actions.pop(number, None)
            if action is not None:
                action(now)
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        heap = self._heap
        while heap and heap[0][1] not in self._actions:
            heapq.heappop(heap)
        self.next_at = heap[0][0] if heap else math.inf
