"""Limits on what an owner may use: hold before, hold more while streaming, settle at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from argosy.policy.prices import Rates
from argosy.policy.quota_meters import QuotaMeter

MAX_RELEASABLE_SLOTS = 8
"""Of what a request was given in parts, the last few can be given back; it never holds much ahead."""


class QuotaUsage(msgspec.Struct, frozen=True, gc=False):
    """What a request uses, or may use, of each unit that there are limits on."""

    requests: int = 0
    tokens: int = 0
    """Input and output."""
    input_tokens: int = 0
    output_tokens: int = 0
    nano_dollars: int = 0
    concurrency: int = 0


def running_usage(
    rates: Rates, input_tokens: int, cached_tokens: int, output_tokens: int
) -> QuotaUsage:
    """What a request uses that runs, and had so many tokens so far."""
    tokens = input_tokens + output_tokens
    nano_dollars = rates.cost_nano_dollars(input_tokens, cached_tokens, output_tokens)
    return QuotaUsage(1, tokens, input_tokens, output_tokens, nano_dollars, 1)


def final_usage(input_tokens: int, output_tokens: int, nano_dollars: int) -> QuotaUsage:
    """What a request used that has ended."""
    tokens = input_tokens + output_tokens
    return QuotaUsage(1, tokens, input_tokens, output_tokens, nano_dollars, 0)


@dataclass(frozen=True, slots=True)
class QuotaLimit:
    """One limit of one owner."""

    owner_kind: str
    """What kind of owner: "organisation", "project", "user" or "key"."""
    unit: str
    """A field of `Use`."""
    window: str
    """"second", "minute", "hour", "day" or "month"; empty for concurrency."""
    model: str | None
    """Of which model only."""
    meter: QuotaMeter
    units_of: Callable[[QuotaUsage], int] = field(init=False, repr=False, compare=False)
    """What a use has of the unit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "units_of", attrgetter(self.unit))


@dataclass(frozen=True, slots=True)
class QuotaRejection:
    """The limit that stands in the way."""

    quota_limit: QuotaLimit
    limit: int
    used: int
    requested: int
    wait_s: float
    """Until it may pass: infinite when it never will, 0 when that depends on others ending."""


class LimitHold(msgspec.Struct):
    """What a request holds of one limit."""

    quota_limit: QuotaLimit
    used_before: int
    """Units that were in use when it came."""
    units: int
    units_by_slot: dict[int, int]
    """Where they count, and how many in each slot; the latest last."""

    def extend(self, units: int, now: float) -> None:
        """Hold `more` besides."""
        self.units += units
        slot = self.quota_limit.meter.add(units, now)
        if slot in self.units_by_slot:
            self.units_by_slot[slot] += units
            return
        self.units_by_slot[slot] = units
        if len(self.units_by_slot) > MAX_RELEASABLE_SLOTS:
            del self.units_by_slot[next(iter(self.units_by_slot))]

    def release(self, units: int, now: float) -> None:
        """Hold so many less: the ones that were added last."""
        self.units -= units
        while units > 0 and self.units_by_slot:
            slot, there = self.units_by_slot.popitem()
            self.quota_limit.meter.adjust(slot, -min(units, there), now)
            units -= there


class Reservation(msgspec.Struct, eq=False):
    """What one request holds of its limits. `extend` or `count` as more is used; `settle` ends it."""

    holds: list[LimitHold]
    covers_estimate: bool
    """All that is likely is held."""
    is_settled: bool = False

    def extend(self, usage: QuotaUsage, now: float) -> QuotaRejection | None:
        """Hold as much as `use` says in all, or nothing more if one of the limits has no room for that."""
        lacking = self._shortfall_by_hold(usage)
        for hold, more in lacking:
            if more > hold.quota_limit.meter.remaining(now):
                return _build_rejection(hold.quota_limit, more, now)
        for hold, more in lacking:
            hold.extend(more, now)
        return None

    def force_extend(self, usage: QuotaUsage, now: float) -> None:
        """Count what was used, whatever the room."""
        for hold, more in self._shortfall_by_hold(usage):
            hold.extend(more, now)

    def shortfall(self, usage: QuotaUsage) -> list[tuple[QuotaLimit, int]]:
        """The limits of which `use` needs more than is held, and how much more."""
        return [(hold.quota_limit, more) for hold, more in self._shortfall_by_hold(usage)]

    def settle(self, usage: QuotaUsage, now: float) -> None:
        """Replace what is held by what was used; called again, nothing happens.

        A request for which nothing was done has used nothing: not even itself.
        """
        if self.is_settled:
            return
        self.is_settled = True
        for hold in self.holds:
            more = hold.quota_limit.units_of(usage) - hold.units
            if more > 0:
                hold.extend(more, now)
            elif more < 0:
                hold.release(-more, now)

    def _shortfall_by_hold(self, use: QuotaUsage) -> list[tuple[LimitHold, int]]:
        return [
            (hold, more)
            for hold in self.holds
            if (more := hold.quota_limit.units_of(use) - hold.units) > 0
        ]


def reserve(
    limits: Sequence[QuotaLimit], expected: QuotaUsage, minimum: QuotaUsage, now: float
) -> Reservation | list[QuotaRejection]:
    """Hold what a request will likely use of all limits, or of none of them: then all that stand in the way.

    A limit smaller than what is likely, but not than what is needed at least, is asked for as a whole.
    """
    refusals: list[QuotaRejection] = []
    holds, whole = [], True
    for meter in limits:
        units, counter = meter.units_of(expected), meter.meter
        if units > counter.limit:
            units, whole = max(counter.limit, meter.units_of(minimum)), False
        if units > counter.remaining(now) and units:
            refusals.append(_build_rejection(meter, units, now))
        holds.append(LimitHold(meter, counter.used, units, {}))
    if refusals:
        return refusals
    for hold in holds:
        hold.units_by_slot[hold.quota_limit.meter.add(hold.units, now)] = hold.units
    return Reservation(holds, whole)


def longest_rejection(rejections: Sequence[QuotaRejection]) -> QuotaRejection:
    """The one that lasts longest: there is no use in coming back before."""
    return max(rejections, key=lambda refusal: refusal.wait_s)


def is_permanent(rejection: QuotaRejection) -> bool:
    """Whether waiting does not help."""
    return math.isinf(rejection.wait_s)


def _build_rejection(meter: QuotaLimit, units: int, now: float) -> QuotaRejection:
    counter = meter.meter
    wait_s = counter.wait_s(units, now)
    return QuotaRejection(meter, counter.limit, counter.used, units, wait_s)
