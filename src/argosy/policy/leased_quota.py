"""What a gateway and the authority over a shared limit say to each other, and what a gateway counts with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from argosy.policy.quota_meters import CalendarPeriod, ConcurrencyMeter, QuotaMeter, SlidingWindow

EXHAUSTED_BACKOFF_S = 0.05
"""How long nothing is asked for after the authority had too little."""
MAX_UNITS = 2**53 - 1
"""The authority counts in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """What a gateway tells of one limit, and asks of it."""

    kind: Literal["window", "period", "slots"]
    limit: int
    seconds: float = 0.0
    """A window's length."""
    lease_s: float = 0.0
    keep_s: float
    """How long what is told now may matter."""
    slot: int = 0
    """When a period began."""
    need: int
    ahead: int
    """More that would be good to have, where there is plenty."""
    kept: int = 0
    """Of what runs at a time: places that are kept."""
    owed: tuple[tuple[float, int], ...] = ()
    """Used without a grant: how long ago, in seconds, and units."""
    back: tuple[tuple[int, int], ...] = ()
    """Slot and units that were granted there, and not used."""
    seeds: tuple[tuple[float, int], ...] | None = None
    """Used before anybody counted, likewise. None: nobody has looked."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What the authority says to an ask."""

    granted: int
    slot: int
    used: int
    """By all gateways, all grants included."""
    wait_s: float
    """Until what was needed and not granted may be there; 0: nobody knows."""
    reset_s: float
    known: bool
    """Whether what was used before has been told, by whomever."""


class LeasedQuota(QuotaMeter, ABC):
    """A counter whose room comes from an authority, or is lent."""

    def __init__(
        self, name: str, local_meter: SlidingWindow | CalendarPeriod | ConcurrencyMeter
    ) -> None:
        self._name = name
        self._local_meter = local_meter
        """What is used here."""
        self._needed = 0
        self.needs_seed = local_meter.needs_seed
        self._exhausted_until = -math.inf
        self._last_granted = 0
        """Units that there were; before that moment, more is not worth asking for."""

    @property
    def name(self) -> str:
        """Of what is counted, at the authority."""
        return self._name

    @property
    def limit(self) -> int:
        """See `Counter`."""
        return self._local_meter.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._local_meter.limit = limit

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the authority need not hear of it again, as of the last ask."""

    @abstractmethod
    def is_due(self, now: float) -> bool:
        """Whether it is time to ask, though nobody waits."""

    def request_units(self, units: int) -> None:
        """Somebody needs so much."""
        self._needed += units

    @abstractmethod
    def overdraw(self, units: int, now: float) -> None:
        """Have room for `units` at this very moment, granted or not."""

    def is_exhausted(self, units: int, now: float) -> bool:
        """Whether the authority had less than that a moment ago."""
        return now < self._exhausted_until and units > self._last_granted

    def can_overdraw(self, units: int, now: float) -> bool:
        """Whether there may be so much, as far as the authority has told lately."""
        return not self.is_exhausted(units, now)

    def is_within_even_share(self, units: int, gateways: int, now: float) -> bool:
        """Whether `units` are within an even share of the limit."""
        used = self.limit - self._local_meter.remaining(now)
        return used + units <= -(-self.limit // gateways)

    @abstractmethod
    def build_request(self, now: float) -> LeaseRequest:
        """What to tell and to ask; it will be repeated until `answer` is called."""

    def _record_shortfall(self, request: LeaseRequest, grant: LeaseGrant, now: float) -> bool:
        """Whether there was less than was needed."""
        if grant.granted >= request.need:
            return False
        self._exhausted_until, self._last_granted = now + EXHAUSTED_BACKOFF_S, grant.granted
        return True

    @abstractmethod
    def apply_grant(
        self, request: LeaseRequest, grant: LeaseGrant, requested_at: float, now: float
    ) -> None:
        """What the authority said to what was asked first at `asked_at`."""
