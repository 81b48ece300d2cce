"""What grants units of limits to gateways, as `store/leases.lua` does it, in Python: to be tested in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.policy import LeaseGrant, LeaseRequest

SLOTS = 60


@dataclass
class _Limit:
    slots: dict[int, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    known: bool = False


@dataclass
class Authority:
    """All limits, and who is alive."""

    limits: dict[str, _Limit] = field(default_factory=dict)
    alive: dict[str, float] = field(default_factory=dict)
    answered: dict[str, tuple[int, list[LeaseGrant]]] = field(default_factory=dict)

    def exchange(
        self,
        gateway: str,
        number: int,
        alive_s: float,
        asks: list[tuple[str, LeaseRequest]],
        now: float,
    ) -> list[LeaseGrant]:
        """Answer a message; again, if it was heard before."""
        told = self.answered.get(gateway)
        if told is not None and told[0] == number:
            return told[1]
        self.alive[gateway] = now + alive_s
        self.alive = {name: until for name, until in self.alive.items() if until > now}
        grants = [
            self._places(gateway, name, ask) if ask.kind == "slots" else self._units(name, ask, now)
            for name, ask in asks
        ]
        self.answered[gateway] = number, grants
        return grants

    def _share(self, ask: LeaseRequest, room: int) -> int:
        granted = min(ask.need, max(0, room))
        rest = max(0, room - granted)
        return granted + min(ask.ahead, rest // (2 * len(self.alive)))

    def _units(self, name: str, ask: LeaseRequest, now: float) -> LeaseGrant:
        limit = self.limits.setdefault(name, _Limit())
        slot, oldest, width = ask.slot, ask.slot, 0.0
        if ask.kind == "window":
            width = ask.seconds / SLOTS
            slot = int(now // width)
            oldest = int((now - ask.lease_s) // width) - SLOTS
        limit.slots = {at: units for at, units in limit.slots.items() if at >= oldest}
        slot = max([slot, *limit.slots])
        for at, units in ask.back:
            if at in limit.slots:
                limit.slots[at] -= units
        seeds = ask.seeds if ask.seeds is not None and not limit.known else ()
        for age, units in (*seeds, *ask.owed):
            at = int((now - age) // width) if width else slot
            if at >= oldest:
                limit.slots[at] = limit.slots.get(at, 0) + units
        limit.known = limit.known or ask.seeds is not None
        granted = self._share(ask, ask.limit - sum(limit.slots.values()))
        if granted:
            limit.slots[slot] = limit.slots.get(slot, 0) + granted
        return LeaseGrant(granted, slot, sum(limit.slots.values()), 0.0, 0.0, limit.known)

    def _places(self, gateway: str, name: str, ask: LeaseRequest) -> LeaseGrant:
        places = self.limits.setdefault(name, _Limit()).places
        for other in set(places) - set(self.alive):
            del places[other]
        others = sum(held for other, held in places.items() if other != gateway)
        granted = self._share(ask, ask.limit - others - ask.kept)
        places[gateway] = ask.kept + granted
        return LeaseGrant(granted, 0, others + ask.kept + granted, 0.0, 0.0, known=True)
