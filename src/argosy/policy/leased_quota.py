"""Lease protocol between a gateway and the quota authority, and the gateway's base class for leased quotas.

The field names of `LeaseRequest` and `LeaseGrant` are the wire format that the authority's script reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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

    def __init__(
        self, name: str, local_meter: SlidingWindow | CalendarPeriod | ConcurrencyMeter
    ) -> None:
        self._name = name
        self._local_meter = local_meter
        """Usage of this gateway."""
        self._needed = 0
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

    def return_unused(self) -> None:
        """Return the granted units that are not used, because the limit was lowered."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether there is nothing to report to the authority since the last request."""

    @abstractmethod
    def is_due(self, now: float) -> bool:
        """Return whether to send a request although no units are needed."""

    def request_units(self, units: int) -> None:
        """Add `units` to the next request."""
        self._needed += units

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
