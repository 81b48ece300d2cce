"""Limits on what an owner may use: hold before, hold more while streaming, settle at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from argosy.policy.prices import Rates
from argosy.policy.quota_meters import Counter

PARTS = 8
"""Of what a request was given in parts, the last few can be given back; it never holds much ahead."""


class Use(msgspec.Struct, frozen=True, gc=False):
    """What a request uses, or may use, of each unit that there are limits on."""

    requests: int = 0
    tokens: int = 0
    """Input and output."""
    input_tokens: int = 0
    output_tokens: int = 0
    nano_dollars: int = 0
    concurrency: int = 0


def running(rates: Rates, input_tokens: int, cached_tokens: int, output_tokens: int) -> Use:
    """What a request uses that runs, and had so many tokens so far."""
    tokens = input_tokens + output_tokens
    nano_dollars = rates.cost(input_tokens, cached_tokens, output_tokens)
    return Use(1, tokens, input_tokens, output_tokens, nano_dollars, 1)


def ended(input_tokens: int, output_tokens: int, nano_dollars: int) -> Use:
    """What a request used that has ended."""
    tokens = input_tokens + output_tokens
    return Use(1, tokens, input_tokens, output_tokens, nano_dollars, 0)


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit of one owner."""

    owner: str
    """What kind of owner: "organisation", "project", "user" or "key"."""
    unit: str
    """A field of `Use`."""
    window: str
    """"second", "minute", "hour", "day" or "month"; empty for concurrency."""
    model: str | None
    """Of which model only."""
    counter: Counter
    of: Callable[[Use], int] = field(init=False, repr=False, compare=False)
    """What a use has of the unit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", attrgetter(self.unit))


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that stands in the way."""

    meter: Meter
    limit: int
    used: int
    asked: int
    wait_s: float
    """Until it may pass: infinite when it never will, 0 when that depends on others ending."""


class Hold(msgspec.Struct):
    """What a request holds of one limit."""

    meter: Meter
    before: int
    """Units that were in use when it came."""
    units: int
    slots: dict[int, int]
    """Where they count, and how many in each slot; the latest last."""

    def add(self, more: int, now: float) -> None:
        """Hold `more` besides."""
        self.units += more
        slot = self.meter.counter.add(more, now)
        if slot in self.slots:
            self.slots[slot] += more
            return
        self.slots[slot] = more
        if len(self.slots) > PARTS:
            del self.slots[next(iter(self.slots))]

    def give_back(self, units: int, now: float) -> None:
        """Hold so many less: the ones that were added last."""
        self.units -= units
        while units > 0 and self.slots:
            slot, there = self.slots.popitem()
            self.meter.counter.correct(slot, -min(units, there), now)
            units -= there


class Reservation(msgspec.Struct, eq=False):
    """What one request holds of its limits. `extend` or `count` as more is used; `settle` ends it."""

    holds: list[Hold]
    whole: bool
    """All that is likely is held."""
    settled: bool = False

    def extend(self, use: Use, now: float) -> Refusal | None:
        """Hold as much as `use` says in all, or nothing more if one of the limits has no room for that."""
        lacking = self._lacking(use)
        for hold, more in lacking:
            if more > hold.meter.counter.room(now):
                return _refusal(hold.meter, more, now)
        for hold, more in lacking:
            hold.add(more, now)
        return None

    def count(self, use: Use, now: float) -> None:
        """Count what was used, whatever the room."""
        for hold, more in self._lacking(use):
            hold.add(more, now)

    def lacking(self, use: Use) -> list[tuple[Meter, int]]:
        """The limits of which `use` needs more than is held, and how much more."""
        return [(hold.meter, more) for hold, more in self._lacking(use)]

    def settle(self, use: Use, now: float) -> None:
        """Replace what is held by what was used; called again, nothing happens.

        A request for which nothing was done has used nothing: not even itself.
        """
        if self.settled:
            return
        self.settled = True
        for hold in self.holds:
            more = hold.meter.of(use) - hold.units
            if more > 0:
                hold.add(more, now)
            elif more < 0:
                hold.give_back(-more, now)

    def _lacking(self, use: Use) -> list[tuple[Hold, int]]:
        return [
            (hold, more) for hold in self.holds if (more := hold.meter.of(use) - hold.units) > 0
        ]


def reserve(
    meters: Sequence[Meter], likely: Use, least: Use, now: float
) -> Reservation | list[Refusal]:
    """Hold what a request will likely use of all limits, or of none of them: then all that stand in the way.

    A limit smaller than what is likely, but not than what is needed at least, is asked for as a whole.
    """
    refusals: list[Refusal] = []
    holds, whole = [], True
    for meter in meters:
        units, counter = meter.of(likely), meter.counter
        if units > counter.limit:
            units, whole = max(counter.limit, meter.of(least)), False
        if units > counter.room(now) and units:
            refusals.append(_refusal(meter, units, now))
        holds.append(Hold(meter, counter.used, units, {}))
    if refusals:
        return refusals
    for hold in holds:
        hold.slots[hold.meter.counter.add(hold.units, now)] = hold.units
    return Reservation(holds, whole)


def worst(refusals: Sequence[Refusal]) -> Refusal:
    """The one that lasts longest: there is no use in coming back before."""
    return max(refusals, key=lambda refusal: refusal.wait_s)


def never(refusal: Refusal) -> bool:
    """Whether waiting does not help."""
    return math.isinf(refusal.wait_s)


def _refusal(meter: Meter, units: int, now: float) -> Refusal:
    counter = meter.counter
    wait_s = counter.wait_s(units, now)
    return Refusal(meter, counter.limit, counter.used, units, wait_s)
