"""What a gateway and the authority over a shared limit say to each other, and what a gateway counts with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from argosy.policy.quota_meters import Concurrency, Counter, Period, Window

DRY_S = 0.05
"""How long nothing is asked for after the authority had too little."""
LARGEST = 2**53 - 1
"""The authority counts in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
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
class Grant:
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


class Shared(Counter, ABC):
    """A counter whose room comes from an authority, or is lent."""

    def __init__(self, name: str, own: Window | Period | Concurrency) -> None:
        self._name = name
        self._own = own
        """What is used here."""
        self._need = 0
        self.unknown = own.unknown
        self._dry_until = -math.inf
        self._there = 0
        """Units that there were; before that moment, more is not worth asking for."""

    @property
    def name(self) -> str:
        """Of what is counted, at the authority."""
        return self._name

    @property
    def limit(self) -> int:
        """See `Counter`."""
        return self._own.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._own.limit = limit

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether the authority need not hear of it again, as of the last ask."""

    @abstractmethod
    def due(self, now: float) -> bool:
        """Whether it is time to ask, though nobody waits."""

    def want(self, units: int) -> None:
        """Somebody needs so much."""
        self._need += units

    @abstractmethod
    def lend(self, units: int, now: float) -> None:
        """Have room for `units` at this very moment, granted or not."""

    def dry(self, units: int, now: float) -> bool:
        """Whether the authority had less than that a moment ago."""
        return now < self._dry_until and units > self._there

    def lends(self, units: int, now: float) -> bool:
        """Whether there may be so much, as far as the authority has told lately."""
        return not self.dry(units, now)

    def affords(self, units: int, gateways: int, now: float) -> bool:
        """Whether `units` are within an even share of the limit."""
        used = self.limit - self._own.room(now)
        return used + units <= -(-self.limit // gateways)

    @abstractmethod
    def ask(self, now: float) -> Ask:
        """What to tell and to ask; it will be repeated until `answer` is called."""

    def _falls_short(self, ask: Ask, grant: Grant, now: float) -> bool:
        """Whether there was less than was needed."""
        if grant.granted >= ask.need:
            return False
        self._dry_until, self._there = now + DRY_S, grant.granted
        return True

    @abstractmethod
    def answer(self, ask: Ask, grant: Grant, asked_at: float, now: float) -> None:
        """What the authority said to what was asked first at `asked_at`."""
