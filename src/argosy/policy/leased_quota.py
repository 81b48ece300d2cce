"""Lease protocol between a gateway and the quota authority, the base class of leased quotas, and the lease on slots.

The field names of `LeaseRequest` and `LeaseGrant` are the wire format that the authority's script reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from argosy.policy.quota_meters import CalendarPeriod, ConcurrencyMeter, QuotaMeter, SlidingWindow

EXHAUSTED_BACKOFF_S = 0.05
"""Seconds for which a gateway requests no units after the authority granted too few."""
MAX_UNITS = 2**53 - 1
"""Largest number of units in a request, because the authority counts in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Request of a gateway for units of one limit, with a report of its usage."""

    kind: Literal["window", "period", "slots"]
    limit: int
    seconds: float = 0.0
    """Length of the sliding window."""
    lease_s: float = 0.0
    keep_s: float
    """Seconds for which the authority has to keep the reported usage."""
    slot: int = 0
    """Start of the calendar period in seconds since the epoch."""
    need: int
    """Units that requests wait for."""
    ahead: int
    """Further units to grant if plenty are free."""
    overdraft: int = 0
    """Units of one request for a budget, beyond what is free. They are granted if `overdraft_above` units are free."""
    overdraft_above: int = 0
    held: int | None = None
    """Units of a budget that running requests hold, and granted ones that are not used; None for other limits.

    They become free if this gateway dies.
    """
    was_held: int = 0
    """Units held after the last grant. They count again if they became free because this gateway seemed dead."""
    kept: int = 0
    """Concurrency slots that the gateway keeps."""
    owed: tuple[tuple[float, int], ...] = ()
    """Units used without a grant, each with their age in seconds."""
    back: tuple[tuple[int, int], ...] = ()
    """Slots and the units that were granted there and not used."""
    seeds: tuple[tuple[float, int], ...] | None = None
    """Units used before the limit was metered, each with their age in seconds; None if they are unknown."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Answer of the authority to a `LeaseRequest`."""

    granted: int
    slot: int
    """Slot in which the authority counts the granted units."""
    used: int
    """Units used by all gateways, including all grants."""
    wait_s: float
    """Seconds until the units that were needed and not granted may be free; 0 if unknown."""
    reset_s: float
    """Seconds until the whole limit is free, if nothing more is used."""
    known: bool
    """Whether any gateway has reported the usage from before the limit was metered."""


class LeasedQuota(QuotaMeter, ABC):
    """Meter whose units are granted by an authority, or lent by this gateway and reported afterwards."""

    can_exceed = False

    def __init__(
        self, name: str, local_meter: SlidingWindow | CalendarPeriod | ConcurrencyMeter
    ) -> None:
        self._name = name
        self._local_meter = local_meter
        """Usage of this gateway."""
        self._needed = 0
        self._largest_request = 0, 0
        """Units that the largest waiting request for a budget holds, and how many of them have to be free."""
        self.needs_seed = local_meter.needs_seed
        self._exhausted_until = -math.inf
        self._last_granted = 0
        """Units granted last; until `_exhausted_until` it is useless to request more."""

    @property
    def name(self) -> str:
        """Name of the counter at the authority."""
        return self._name

    @property
    def limit(self) -> int:
        return self._local_meter.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        is_lowered = limit < self._local_meter.limit
        self._local_meter.limit = limit
        if is_lowered:
            self.return_unused()

    @property
    def held(self) -> int:
        return self._local_meter.held

    def settle(self, slot: int, units: int) -> None:
        self._local_meter.settle(slot, units)

    def return_unused(self) -> None:
        """Return the granted units that are not used, because the limit was lowered."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether there is nothing to report to the authority since the last request."""

    @abstractmethod
    def is_due(self, now: float) -> bool:
        """Return whether to send a request although no units are needed."""

    def request_units(self, units: int, free_units: int = MAX_UNITS) -> None:
        """Add `units` to the next request. If only `free_units` are free, one request gets all of its units."""
        self._needed += units
        if units > free_units:
            self._largest_request = max(self._largest_request, (units, free_units))

    @abstractmethod
    def overdraw(self, units: int, now: float) -> None:
        """Lend `units`, which are available at the time `now` only, granted or not."""

    def is_exhausted(self, units: int, now: float) -> bool:
        """Return whether the authority had fewer than `units` a moment ago."""
        return now < self._exhausted_until and units > self._last_granted

    def can_overdraw(self, units: int, now: float) -> bool:
        """Return whether `units` are probably free according to the authority's recent answers."""
        return not self.is_exhausted(units, now)

    def is_within_even_share(self, units: int, gateways: int, now: float) -> bool:
        """Return whether `units` more stay within this gateway's even share of the limit."""
        used = self.limit - self._local_meter.remaining(now)
        return used + units <= -(-self.limit // gateways)

    @abstractmethod
    def build_request(self, now: float) -> LeaseRequest:
        """Build the next request. The caller has to repeat it until the authority answers."""

    def _record_shortfall(self, request: LeaseRequest, grant: LeaseGrant, now: float) -> bool:
        """Return whether fewer units were granted than needed, and back off if so."""
        if grant.granted >= request.need:
            return False
        self._exhausted_until, self._last_granted = now + EXHAUSTED_BACKOFF_S, grant.granted
        return True

    @abstractmethod
    def apply_grant(
        self, request: LeaseRequest, grant: LeaseGrant, requested_at: float, now: float
    ) -> None:
        """Apply the authority's answer to a request that was first sent at `requested_at`."""


class ConcurrencyLease(LeasedQuota):
    """Slots that the authority keeps for this gateway. The authority drops gateways silent for `alive_s`."""

    def __init__(self, name: str, local_meter: ConcurrencyMeter, alive_s: float) -> None:
        super().__init__(name, local_meter)
        self._alive_s = alive_s
        self._granted_slots = 0
        self._granted_until = -math.inf
        self._overdraft_at = -math.inf
        self._was_used = False
        self._last_grant_at = -math.inf
        self._used_by_others = 0

    @property
    def used(self) -> int:
        """Slots in use by all gateways, as of the last grant."""
        return self._used_by_others + self._local_meter.used

    @property
    def is_idle(self) -> bool:
        return not (self._granted_slots or self._local_meter.used or self._needed or self._was_used)

    def remaining(self, now: float) -> int:
        if now == self._overdraft_at:
            return 1
        return self._granted_slots - self._local_meter.used if now < self._granted_until else 0

    def add(self, units: int, now: float) -> int:
        self._was_used = True
        self._overdraft_at = -math.inf
        return self._local_meter.add(units, now)

    def adjust(self, slot: int, units: int, now: float) -> bool:
        return self._local_meter.adjust(slot, units, now)

    def wait_s(self, units: int, now: float) -> float:
        return self._local_meter.wait_s(units, now)

    def reset_s(self, now: float) -> float:
        return self._local_meter.reset_s(now)

    def seed_points(self, now: float) -> tuple[float, ...]:
        return self._local_meter.seed_points(now)

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Do nothing, because earlier requests have ended."""

    def is_due(self, now: float) -> bool:
        """Return whether to send a request, which happens five times per `alive_s` to keep the slots."""
        return now >= self._last_grant_at + self._alive_s / 5

    def overdraw(self, units: int, now: float) -> None:  # noqa: ARG002 - a request takes one slot
        self._overdraft_at = now

    def build_request(self, now: float) -> LeaseRequest:
        """Build the next request. Slots that it does not keep are no longer used, whatever the answer is."""
        used = self._local_meter.used
        spare = used // 4 + 1 if self._was_used or self._needed or used else 0
        granted = self._granted_slots if now < self._granted_until else 0
        self._granted_slots = min(granted, used + spare)
        kept = max(used, self._granted_slots)
        request = LeaseRequest(
            kind="slots",
            limit=min(self.limit, MAX_UNITS),
            keep_s=self._alive_s * 2,
            need=min(self._needed, MAX_UNITS),
            ahead=used + spare - kept,
            kept=kept,
        )
        self._needed, self._was_used = 0, False
        return request

    def apply_grant(
        self, request: LeaseRequest, grant: LeaseGrant, requested_at: float, now: float
    ) -> None:
        """Apply an answer.

        If all gateways together exceed the limit, each gives up the excess as far as it has unused slots.
        """
        self._granted_slots = request.kept + grant.granted
        self._used_by_others = grant.used - self._granted_slots
        excess = max(0, grant.used - self.limit)
        self._granted_slots = max(0, self._granted_slots - excess)
        self._granted_until = requested_at + self._alive_s
        self._last_grant_at = now
        self._record_shortfall(request, grant, now)
