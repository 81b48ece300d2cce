"""Pace of parsing: large input is parsed in slices, within a budget for each turn of the event loop.

A peer decides how much its input costs: a megabyte may be one part of a body, or 200,000 chunks. Without a budget, the
event loop would do nothing else while a few peers send as much as it reads.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

MIN_PACED_BYTES = 2048
"""Largest input that is parsed at once and not counted. Requests, and tokens of a stream, are smaller."""
SLICE_BYTES = 16 * 1024
MAX_BYTES_PER_TURN = 64 * 1024
"""Bytes of large input that all connections of an event loop parse in one of its turns."""


class InputBudget:
    """Bytes that may still be parsed in this turn of an event loop, and who waits for a later turn."""

    def __init__(self) -> None:
        self._spent_bytes = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    @property
    def is_spent(self) -> bool:
        """Whether more has to wait for a later turn."""
        return self._spent_bytes >= MAX_BYTES_PER_TURN

    def spend(self, byte_count: int) -> None:
        """Count input that is parsed in this turn."""
        self._spent_bytes += byte_count
        self._schedule()

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` in a later turn, after those that wait already."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_turn)

    def _start_turn(self) -> None:
        self._is_scheduled = False
        self._spent_bytes = 0
        try:
            for _ in range(len(self._waiting)):
                if self.is_spent:
                    break
                self._waiting.popleft()()
        finally:
            if self._waiting:
                self._schedule()


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, InputBudget] = WeakKeyDictionary()


def loop_input_budget() -> InputBudget:
    """Return the budget of the running event loop."""
    loop = asyncio.get_running_loop()
    budget = _budgets.get(loop)
    if budget is None:
        budget = _budgets[loop] = InputBudget()
    return budget


class PacedProtocol(asyncio.Protocol, ABC):
    """Protocol that parses large input in slices. Its transport is not read while a part waits for a later turn.

    `data_received` of a subclass passes input of more than `max_unpaced_bytes` to `pace_input`, and gets it back in
    slices.
    """

    max_unpaced_bytes: float = MIN_PACED_BYTES
    """Largest input that `data_received` may parse now."""
    slice_bytes = SLICE_BYTES
    """Bytes that are parsed at once. A slice of input that costs more than other input is smaller."""
    waits_for_turn = False
    """Whether received input waits for a later turn of the event loop."""
    _unparsed = memoryview(b"")

    @abstractmethod
    def update_reading(self) -> None:
        """Read from the transport, unless input waits for its turn or the consumer has paused reading."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""

    def pace_input(self, data: bytes) -> None:
        """Parse input in slices, in this turn and in later ones."""
        if self._unparsed:
            data = bytes(self._unparsed) + data
        self._unparsed = memoryview(data)
        if not self.waits_for_turn:
            self._parse_in_turn()

    def take_unparsed(self) -> bytes:
        """Return the input that waits for its turn, which is then forgotten."""
        rest, self._unparsed = bytes(self._unparsed), memoryview(b"")
        return rest

    def _parse_in_turn(self) -> None:
        did_wait, self.waits_for_turn = self.waits_for_turn, False
        self.max_unpaced_bytes = math.inf
        budget, size = loop_input_budget(), self.slice_bytes
        try:
            while self._unparsed and not budget.is_spent:
                data, self._unparsed = bytes(self._unparsed[:size]), self._unparsed[size:]
                budget.spend(len(data) * SLICE_BYTES // size)
                self.data_received(data)
        except BaseException:
            self._unparsed = memoryview(b"")
            self.abort()
            raise
        self.max_unpaced_bytes = MIN_PACED_BYTES
        if self._unparsed:
            self.waits_for_turn, self.max_unpaced_bytes = True, -1
            budget.wait(self._parse_in_turn)
        if did_wait is not self.waits_for_turn:
            self.update_reading()
