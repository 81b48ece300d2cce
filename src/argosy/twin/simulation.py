"""Virtual time: an event heap with an integer clock, named random streams, and a hash of everything that happens.

Events of one nanosecond run by priority, and then in the order in which they were scheduled. Each component draws from
a stream of its own, so that a new component changes no other one's numbers.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

NS_PER_S = 1_000_000_000
START_NS = 1_000 * NS_PER_S
"""Time at which a simulation begins. Policies take 0 for a time long ago."""


class InvariantError(AssertionError):
    """Something happened that must never happen."""


def require(is_true: bool, message: str) -> None:  # noqa: FBT001 - a condition
    """Raise InvariantError with this message, unless the condition is true."""
    if not is_true:
        raise InvariantError(message)


def to_ns(seconds: float) -> int:
    """Return the first whole nanosecond after `seconds`."""
    return int(seconds * NS_PER_S) + 1


def derive_stream(seed: int, name: str) -> random.Random:
    """Return the random stream of a component. Other names and other seeds give independent ones."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))  # noqa: S311 - no secret


class Simulation:
    """Clock, events and trace of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = START_NS
        self.num_events = 0
        """Events that have run."""
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._num_calls = 0
        self._is_stopped = False
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def now(self) -> float:
        """Seconds on the clock of policies."""
        return self.now_ns / NS_PER_S

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning of the run."""
        return (self.now_ns - START_NS) / NS_PER_S

    def stream(self, name: str) -> random.Random:
        """Return the random stream of a component."""
        return derive_stream(self.seed, name)

    def call_at(self, at_ns: int, action: Callable[[], None], priority: int = 0) -> None:
        """Run `action` at a time, or now if that has passed. Smaller priorities run first."""
        self._num_calls = number = self._num_calls + 1
        heapq.heappush(self._heap, (max(at_ns, self.now_ns), priority, number, action))

    def call_later(self, seconds: float, action: Callable[[], None], priority: int = 0) -> None:
        """Run `action` in `seconds`."""
        self.call_at(self.now_ns + round(seconds * NS_PER_S), action, priority)

    def stop(self) -> None:
        """End the present call of `run` after this event."""
        self._is_stopped = True

    def run(self, until_ns: int, max_events: int) -> bool:
        """Run up to `max_events` events.

        Returns:
            Whether more may follow: one is left before `until_ns`, and `stop` was not called.
        """
        heap, pop = self._heap, heapq.heappop
        self._is_stopped = False
        last = self.num_events + max_events
        while heap and heap[0][0] <= until_ns and self.num_events < last:
            self.now_ns, _, _, action = pop(heap)
            self.num_events += 1
            action()
            if self._is_stopped:
                return False
        return bool(heap) and heap[0][0] <= until_ns

    def trace(self, line: str) -> None:
        """Add what has happened now to the hash of the run."""
        self._hash.update(f"{self.now_ns} {line}\n".encode())

    @property
    def trace_hash(self) -> str:
        """Hash of all that was traced so far, in order."""
        return self._hash.hexdigest()
