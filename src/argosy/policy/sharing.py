"""What a gateway and the authority over a shared limit say to each other, and what a gateway counts with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from argosy.policy.windows import Counter

DRY_S = 0.05
"""How long nothing is asked for after the authority had too little."""
LARGEST = 2**53 - 1
"""The authority counts in floating point."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a gateway tells of one limit, and asks of it."""

    kind: Literal["window", "period", "slots"]
    limit: int
    seconds: float
    """A window's length."""
    lease_s: float
    keep_s: float
    """How long what is told now may matter."""
    slot: int
    """When a period began."""
    need: int
    ahead: int
    """More that would be good to have, where there is plenty."""
    kept: int
    """Of what runs at a time: places that are kept."""
    owed: tuple[tuple[float, int], ...]
    """Used without a grant: how long ago, in seconds, and units."""
    back: tuple[tuple[int, int], ...]
    """Slot and units that were granted there, and not used."""
    seeds: tuple[tuple[float, int], ...] | None
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


class Shared(Counter, Protocol):
    """A counter whose room comes from an authority, or is lent."""

    dry_until: float
    """Nothing is worth asking for before."""

    @property
    def name(self) -> str:
        """Of what is counted, at the authority."""

    @property
    def idle(self) -> bool:
        """Whether the authority need not hear of it again, as of the last ask."""

    def due(self, now: float) -> bool:
        """Whether it is time to ask, though nobody waits."""

    def want(self, units: int) -> None:
        """Somebody needs so much."""

    def lend(self, units: int, now: float) -> None:
        """Have room for `units` at this very moment, granted or not."""

    def affords(self, units: int, gateways: int, now: float) -> bool:
        """Whether `units` are within an even share of the limit."""

    def ask(self, now: float) -> Ask:
        """What to tell and to ask; it will be repeated until `answer` is called."""

    def answer(self, ask: Ask, grant: Grant, asked_at: float, now: float) -> None:
        """What the authority said to what was asked first at `asked_at`."""
