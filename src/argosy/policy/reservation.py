"""Reservation of a request's quotas: reserve an estimate, extend it while streaming, settle the actual usage.

A reservation holds units of every limit that applies to the request, or of none. Of a budget it holds the most that the
request may cost, because the gateway learns some costs only at the end. A request whose expected cost is free is
admitted even if its maximum is not. Its hold then exceeds the budget, so that no other request is admitted before units
are returned: all requests together exceed a budget by less than the maximum of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import msgspec

from argosy.policy.quota_meters import QuotaMeter, is_exceeded
from argosy.protocol import TokenUsage

MAX_RELEASABLE_SLOTS = 8
"""Slots of a hold that can be released; older ones are not needed, because a request holds little in advance."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Nano-dollars per token that one request pays; fixed when the request begins."""

    input: int
    cached_input: int
    output: int

    def cost_nano_dollars(self, usage: TokenUsage) -> int:
        """Return the cost in nano-dollars."""
        prompt = usage.prompt_tokens
        cached = min(usage.cached_tokens, prompt)
        uncached = prompt - cached
        return (
            uncached * self.input + cached * self.cached_input + usage.output_tokens * self.output
        )

    def max_nano_dollars(self, usage: TokenUsage) -> int:
        """Return the cost in nano-dollars, whatever part of the prompt is cached."""
        input_rate = max(self.input, self.cached_input)
        return usage.prompt_tokens * input_rate + usage.output_tokens * self.output

    def scale(self, percent: int) -> Rates:
        """Return a percentage of these rates, each rounded up."""
        return Rates(
            *(-(-rate * percent // 100) for rate in (self.input, self.cached_input, self.output))
        )


NO_CHARGE = Rates(0, 0, 0)


class QuotaUsage(msgspec.Struct, frozen=True, gc=False):
    """Actual or expected usage of a request in every unit that can be limited."""

    requests: int = 0
    tokens: int = 0
    """Sum of input and output tokens."""
    input_tokens: int = 0
    output_tokens: int = 0
    nano_dollars: int = 0
    concurrency: int = 0


def running_usage(rates: Rates, usage: TokenUsage) -> QuotaUsage:
    """Return the usage of a running request with its tokens so far; it occupies one concurrency unit."""
    prompt, output = usage.prompt_tokens, usage.output_tokens
    return QuotaUsage(1, prompt + output, prompt, output, rates.cost_nano_dollars(usage), 1)


def final_usage(usage: TokenUsage, nano_dollars: int) -> QuotaUsage:
    """Return the usage of an ended request, which occupies no concurrency unit."""
    prompt, output = usage.prompt_tokens, usage.output_tokens
    return QuotaUsage(1, prompt + output, prompt, output, nano_dollars, 0)


@dataclass(frozen=True, slots=True)
class QuotaLimit:
    """Limit of one owner, with its meter."""

    owner_kind: str
    """Kind of owner, which is "organisation", "project", "user" or "key"."""
    unit: str
    """Name of a field of `QuotaUsage`."""
    window: str
    """Window "second", "minute", "hour", "day" or "month"; empty for concurrency."""
    model: str | None
    """Model that the limit applies to; None for all models."""
    meter: QuotaMeter
    units_of: Callable[[QuotaUsage], int] = field(init=False, repr=False, compare=False)
    """Function that returns the limited unit of a usage."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "units_of", attrgetter(self.unit))


@dataclass(frozen=True, slots=True)
class QuotaRejection:
    """Limit that rejects a request, with the numbers for the error message."""

    quota_limit: QuotaLimit
    limit: int
    used: int
    requested: int
    """Units that have to be free for the request."""
    wait_s: float
    """Seconds until the request may pass: infinite if never, 0 if that depends on the end of other requests."""
    held: int
    """Units that the request would hold, at least those that are requested."""


class LimitHold(msgspec.Struct):
    """Units of one limit that a request holds."""

    quota_limit: QuotaLimit
    used_before: int
    """Units in use when the request arrived."""
    units: int
    units_by_slot: dict[int, int]
    """Held units by slot of the meter, latest slot last."""
    uncounted_units: int = 0
    """Units that the request had used before the limit applied to it."""
    may_exceed: bool = False
    """Whether the limit may have no room for all held units. The request ends as soon as it uses more than the rest."""

    def missing_units(self, usage: QuotaUsage) -> int:
        """Return how many units `usage` has more than are held; negative if it has fewer."""
        return max(0, self.counted_units(usage)) - self.units

    def counted_units(self, usage: QuotaUsage) -> int:
        """Return the units of `usage` since the limit applies to the request."""
        return self.quota_limit.units_of(usage) - self.uncounted_units

    def replace_by(self, usage: QuotaUsage, now: float) -> None:
        """Hold exactly the units of `usage`."""
        units = self.missing_units(usage)
        if units > 0:
            self.extend(units, now)
        elif units < 0:
            self.release(-units, now)

    def usable_units(self, now: float) -> int:
        """Return the held units that are within the limit."""
        meter = self.quota_limit.meter
        if not self.may_exceed or not is_exceeded(meter, now):
            return self.units
        return self.units - (meter.used - meter.limit)

    def extend(self, units: int, now: float) -> None:
        """Hold `units` more."""
        self.units += units
        slot = self.quota_limit.meter.add(units, now)
        if slot in self.units_by_slot:
            self.units_by_slot[slot] += units
            return
        self.units_by_slot[slot] = units
        if len(self.units_by_slot) > MAX_RELEASABLE_SLOTS:
            oldest = next(iter(self.units_by_slot))
            self.quota_limit.meter.settle(oldest, self.units_by_slot.pop(oldest))

    def release(self, units: int, now: float) -> None:
        """Release `units`, the ones added last first."""
        self.units -= units
        while units > 0 and self.units_by_slot:
            slot, slot_units = self.units_by_slot.popitem()
            released = min(units, slot_units)
            self.quota_limit.meter.adjust(slot, -released, now)
            units -= released
            if released < slot_units:
                self.units_by_slot[slot] = slot_units - released

    def settle(self) -> None:
        """Hold nothing more. The units that are left are used."""
        for slot, units in self.units_by_slot.items():
            self.quota_limit.meter.settle(slot, units)


class Reservation(msgspec.Struct, eq=False):
    """Holds of one request on all of its limits.

    Call `extend` or `force_extend` as the usage grows, `change_limits` when other limits apply, and `settle` when the
    request ends.
    """

    holds: list[LimitHold]
    covers_estimate: bool
    """Whether the whole expected usage is held."""
    is_settled: bool = False

    def extend(self, usage: QuotaUsage, now: float) -> QuotaRejection | None:
        """Extend the holds to `usage` in total.

        Returns a rejection, and holds nothing more, if one of the limits lacks room.
        """
        for hold in self.holds:
            if hold.may_exceed:
                units = hold.counted_units(usage) - hold.usable_units(now)
                if 0 < units > hold.quota_limit.meter.remaining(now):
                    rejection = _build_rejection(hold.quota_limit, units, units, now)
                    return replace(rejection, used=rejection.limit)  # not what is held beyond it
        shortfalls = self._shortfall_by_hold(usage)
        for hold, units in shortfalls:
            if units > hold.quota_limit.meter.remaining(now):
                return _build_rejection(hold.quota_limit, units, units, now)
        for hold, units in shortfalls:
            hold.extend(units, now)
        return None

    def force_extend(self, usage: QuotaUsage, now: float) -> None:
        """Extend the holds to `usage` in total, even beyond the limits."""
        for hold, units in self._shortfall_by_hold(usage):
            hold.extend(units, now)

    def shortfall(self, usage: QuotaUsage) -> list[tuple[QuotaLimit, int]]:
        """Return each limit of which `usage` exceeds the held units, with the missing units."""
        return [(hold.quota_limit, units) for hold, units in self._shortfall_by_hold(usage)]

    def settle(self, usage: QuotaUsage, now: float) -> None:
        """Replace the held units by the actual usage. Further calls have no effect.

        Pass an empty usage for a request that was never started; it then does not count as a request either.
        """
        if self.is_settled:
            return
        self.is_settled = True
        for hold in self.holds:
            if hold.quota_limit.units_of(usage) != hold.units or hold.uncounted_units:
                hold.replace_by(usage, now)
            hold.settle()

    def change_limits(
        self,
        limits: Sequence[QuotaLimit],
        usage: QuotaUsage,
        minimum: QuotaUsage,
        now: float,
        exceeded: Collection[QuotaMeter] = (),
    ) -> None:
        """Apply other limits to the running request, or the same limits with other amounts.

        A limit that no longer applies keeps the usage so far. A new limit counts only what follows, and holds nothing
        yet.

        Args:
            limits: Limits that apply now.
            usage: Usage so far.
            minimum: Usage that the request has at least, which includes a prompt that is not counted yet.
            now: Seconds since the epoch.
            exceeded: Meters whose usage exceeds their limit, because it was lowered or past usage became known. Their
                holds shrink to the minimum, except those of budgets, since the request may still cost what they hold.
        """
        usage_if_ended = msgspec.structs.replace(usage, concurrency=0)
        previous = {hold.quota_limit: hold for hold in self.holds}
        self.holds = [
            previous.pop(limit) if limit in previous else _start_hold(limit, usage_if_ended)
            for limit in limits
        ]
        for hold in previous.values():
            hold.replace_by(usage_if_ended, now)
            hold.settle()
        for hold in self.holds:
            if hold.quota_limit.meter in exceeded and hold.missing_units(minimum) < 0:
                hold.may_exceed = hold.quota_limit.unit == "nano_dollars"
                if not hold.may_exceed:
                    hold.replace_by(minimum, now)

    def _shortfall_by_hold(self, usage: QuotaUsage) -> list[tuple[LimitHold, int]]:
        return [
            (hold, units)
            for hold in self.holds
            if (units := hold.counted_units(usage) - hold.units) > 0
        ]


def _start_hold(quota_limit: QuotaLimit, usage: QuotaUsage) -> LimitHold:
    """Return an empty hold of a limit that begins to apply to a request with this usage."""
    return LimitHold(quota_limit, quota_limit.meter.used, 0, {}, quota_limit.units_of(usage))


def reserve(
    limits: Sequence[QuotaLimit],
    expected: QuotaUsage,
    minimum: QuotaUsage,
    now: float,
    max_nano_dollars: int = 0,
) -> Reservation | list[QuotaRejection]:
    """Reserve a request's usage of all limits, or return every rejection and reserve nothing.

    A limit below the expected usage but not below the minimum is reserved as a whole.

    Args:
        limits: Limits that apply to the request.
        expected: Usage that the request probably has.
        minimum: Usage that the request has at least.
        now: Seconds since the epoch.
        max_nano_dollars: The most that the request may cost, which budgets hold.
    """
    rejections: list[QuotaRejection] = []
    holds, covers_estimate = [], True
    for quota_limit in limits:
        units, meter = quota_limit.units_of(expected), quota_limit.meter
        if units > meter.limit:
            units, covers_estimate = max(meter.limit, quota_limit.units_of(minimum)), False
        held, may_exceed = units, False
        remaining = meter.remaining(now)
        if max_nano_dollars > units and quota_limit.unit == "nano_dollars":
            held = max_nano_dollars
            may_exceed = meter.can_exceed and held > remaining
        if (units if may_exceed else held) > remaining and units:
            rejections.append(_build_rejection(quota_limit, units, held, now))
        holds.append(LimitHold(quota_limit, meter.used, held, {}, may_exceed=may_exceed))
    if rejections:
        return rejections
    for hold in holds:
        hold.units_by_slot[hold.quota_limit.meter.add(hold.units, now)] = hold.units
    return Reservation(holds, covers_estimate)


def longest_rejection(rejections: Sequence[QuotaRejection]) -> QuotaRejection:
    """Return the rejection with the longest wait, before which a retry is useless."""
    return max(rejections, key=lambda rejection: rejection.wait_s)


def is_permanent(rejection: QuotaRejection) -> bool:
    """Return whether the request is rejected however long the client waits."""
    return math.isinf(rejection.wait_s)


def _build_rejection(quota_limit: QuotaLimit, units: int, held: int, now: float) -> QuotaRejection:
    meter = quota_limit.meter
    wait_s = meter.wait_s(units, now)
    if quota_limit.unit == "nano_dollars" and units <= meter.limit - meter.used + meter.held:
        wait_s = 0.0  # most requests cost less than they hold
    return QuotaRejection(quota_limit, meter.limit, meter.used, units, wait_s, held)
