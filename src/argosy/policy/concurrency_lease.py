"""A gateway's part of a limit on how much may run at a time, over many gateways."""

from __future__ import annotations

import math
from collections.abc import Iterable

from argosy.policy.leased_quota import LARGEST, Ask, Grant, Shared
from argosy.policy.quota_meters import Concurrency


class SlotLease(Shared):
    """Places that the authority keeps for this gateway; it forgets one that is silent for `alive_s`."""

    def __init__(self, name: str, own: Concurrency, alive_s: float) -> None:
        super().__init__(name, own)
        self._alive_s = alive_s
        self._allowed = 0
        self._until = -math.inf
        self._credit_at = -math.inf
        self._touched = False
        self._told_at = -math.inf
        self._others = 0

    @property
    def used(self) -> int:
        """See `Counter`: by all gateways, as far as is known."""
        return self._others + self._own.used

    @property
    def idle(self) -> bool:
        """See `Shared`."""
        return not (self._allowed or self._own.used or self._need or self._touched)

    def room(self, now: float) -> int:
        """See `Counter`."""
        if now == self._credit_at:
            return 1
        return self._allowed - self._own.used if now < self._until else 0

    def add(self, units: int, now: float) -> int:
        """See `Counter`."""
        self._touched = True
        self._credit_at = -math.inf
        return self._own.add(units, now)

    def correct(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`."""
        return self._own.correct(slot, units, now)

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        return self._own.wait_s(units, now)

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        return self._own.reset_s(now)

    def since(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        return self._own.since(now)

    def recall(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """See `Counter`."""

    def due(self, now: float) -> bool:
        """See `Shared`: often enough not to be forgotten."""
        return now >= self._told_at + self._alive_s / 5

    def lend(self, units: int, now: float) -> None:  # noqa: ARG002 - it is one each time
        """See `Shared`."""
        self._credit_at = now

    def ask(self, now: float) -> Ask:
        """See `Shared`. What is not kept is not used from now on, whatever the answer."""
        used = self._own.used
        spare = used // 4 + 1 if self._touched or self._need or used else 0
        allowed = self._allowed if now < self._until else 0
        self._allowed = min(allowed, used + spare)
        kept = max(used, self._allowed)
        ask = Ask(
            kind="slots",
            limit=min(self.limit, LARGEST),
            keep_s=self._alive_s * 2,
            need=min(self._need, LARGEST),
            ahead=used + spare - kept,
            kept=kept,
        )
        self._need, self._touched = 0, False
        return ask

    def answer(self, ask: Ask, grant: Grant, asked_at: float, now: float) -> None:
        """See `Shared`. Of what all have beyond the limit, each gives back as much as it can as its own end."""
        self._allowed = ask.kept + grant.granted
        self._others = grant.used - self._allowed
        beyond = max(0, grant.used - self.limit)
        self._allowed = max(0, self._allowed - beyond)
        self._until = asked_at + self._alive_s
        self._told_at = now
        self._falls_short(ask, grant, now)
