"""Limits over sliding windows: reserve before, charge while streaming, settle at the end.

A window holds what was used in its last `seconds`, kept in `SLOTS` slots; a slot is forgotten only when all
of it is past. So in no interval of that length is more used than the limit, and room that was used
comes back at most `seconds / SLOTS` late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SLOTS = 60


class Window:
    """At most `limit` units in any `seconds`. Units are requests, tokens or nano-dollars."""

    __slots__ = ("_slots", "limit", "seconds", "used")

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.used = 0
        """Units that count now, as of the last call that told the time."""
        self._slots: dict[int, int] = {}
        """Slot number -> units, oldest first; at most SLOTS + 1."""

    def room(self, now: float) -> int:
        """Units that may be used now; negative when the limit was lowered below what is used."""
        self._forget(now)
        return self.limit - self.used

    def add(self, units: int, now: float) -> int:
        """Count `units` (whatever the room) and return the slot, for `correct`."""
        self._forget(now)
        slot = self._slot(now)
        self._slots[slot] = self._slots.get(slot, 0) + units
        self.used += units
        return slot

    def correct(self, slot: int, units: int, now: float) -> None:
        """Change what was counted in `slot` by `units`; nothing happens when it no longer counts."""
        self._forget(now)
        if slot in self._slots:
            self._slots[slot] += units
            self.used += units

    def wait_s(self, units: int, now: float) -> float:
        """Seconds until there is room for `units`; infinite when they exceed the limit itself."""
        short = units - self.room(now)
        if short <= 0:
            return 0.0
        if units > self.limit:
            return float("inf")
        for slot, used in self._slots.items():
            short -= used
            if short <= 0:
                return max(0.0, (slot + 1) * self._width + self.seconds - now)
        return self.seconds

    def reset_s(self, now: float) -> float:
        """Seconds until all of the limit is free again, if nothing more is used."""
        self._forget(now)
        last = next(reversed(self._slots), None)
        return 0.0 if last is None else max(0.0, (last + 1) * self._width + self.seconds - now)

    @property
    def _width(self) -> float:
        return self.seconds / SLOTS

    def _slot(self, now: float) -> int:
        newest = next(reversed(self._slots), None)
        slot = int(now // self._width)
        return slot if newest is None else max(slot, newest)

    def _forget(self, now: float) -> None:
        """Drop the slots whose last instant is a whole window ago."""
        oldest = int(now // self._width) - SLOTS
        while self._slots:
            slot = next(iter(self._slots))
            if slot >= oldest:
                return
            self.used -= self._slots.pop(slot)


class Concurrency:
    """At most `limit` at a time."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


@dataclass(slots=True)
class Scope:
    """The limits of one owner (an organisation, a project, a key), some of them for one model only."""

    name: str
    requests: list[Window] = field(default_factory=list)
    tokens: list[Window] = field(default_factory=list)
    money: list[Window] = field(default_factory=list)
    """Nano-dollars."""
    concurrency: Concurrency | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that stands in the way."""

    scope: str
    kind: str
    """"requests", "tokens", "money" or "concurrency"."""
    limit: int
    used: int
    asked: int
    wait_s: float
    """Until it may pass: infinite when it never will, 0 when that depends on others ending."""


@dataclass(slots=True)
class _Hold:
    """Units of one window that a reservation holds."""

    kind: str
    window: Window
    slot: int
    units: int


class Reservation:
    """What one request holds of its scopes. `charge` as tokens come; `settle` or `abandon` ends it."""

    __slots__ = ("_concurrent", "_holds", "_open")

    def __init__(self) -> None:
        self._holds: list[_Hold] = []
        self._concurrent: list[Concurrency] = []
        self._open = True

    def charge(self, tokens: int, money: int, now: float) -> Refusal | None:
        """Count what was used so far in all (it may exceed the estimate), and tell which limit that passes.

        What is past a limit is counted all the same, since it was used: stop at the first refusal, and a
        limit is exceeded by what came between two calls at most.
        """
        refusal = None
        for hold, used in self._with(tokens, money):
            more = used - hold.units
            if more <= 0:
                continue
            if more > hold.window.room(now) and refusal is None:
                refusal = _refusal("", hold.kind, hold.window, more, now)
            hold.slot = hold.window.add(more, now)
            hold.units = used
        return refusal

    def settle(self, tokens: int, money: int, now: float) -> None:
        """Replace what is held by what was used; called again, nothing happens."""
        if not self._open:
            return
        self.charge(tokens, money, now)
        self._open = False
        for slots in self._concurrent:
            slots.used -= 1
        for hold, used in self._with(tokens, money):
            hold.window.correct(hold.slot, used - hold.units, now)

    def abandon(self, now: float) -> None:
        """Nothing was done for it: give everything back, the request included."""
        if not self._open:
            return
        for hold in self._holds:
            if hold.kind == "requests":
                hold.window.correct(hold.slot, -hold.units, now)
        self.settle(0, 0, now)

    def hold(self, kind: str, window: Window, units: int, now: float) -> None:
        """Count `units` against `window`."""
        self._holds.append(_Hold(kind, window, window.add(units, now), units))

    def occupy(self, slots: Concurrency) -> None:
        """Take one of `slots` until the end."""
        slots.used += 1
        self._concurrent.append(slots)

    def _with(self, tokens: int, money: int) -> list[tuple[_Hold, int]]:
        used = {"tokens": tokens, "money": money}
        return [(hold, used[hold.kind]) for hold in self._holds if hold.kind in used]


def reserve(scopes: list[Scope], tokens: int, money: int, now: float) -> Reservation | Refusal:
    """Hold one request with an estimate of `tokens` and `money` in all scopes, or in none of them."""
    asked = {"requests": 1, "tokens": tokens, "money": money}
    for scope in scopes:
        for kind, units in asked.items():
            for window in getattr(scope, kind):
                if units > window.room(now):
                    return _refusal(scope.name, kind, window, units, now)
        slots = scope.concurrency
        if slots is not None and slots.used >= slots.limit:
            return Refusal(scope.name, "concurrency", slots.limit, slots.used, 1, 0.0)
    held = Reservation()
    for scope in scopes:
        for kind, units in asked.items():
            for window in getattr(scope, kind):
                held.hold(kind, window, units, now)
        if scope.concurrency is not None:
            held.occupy(scope.concurrency)
    return held


def _refusal(scope: str, kind: str, window: Window, units: int, now: float) -> Refusal:
    return Refusal(scope, kind, window.limit, window.used, units, window.wait_s(units, now))
