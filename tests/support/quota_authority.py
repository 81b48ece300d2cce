"""Python model of the quota authority in `store/leases.lua`, for tests in virtual time.

Compared with the script in a real Redis by `test_redis_script_grants_same_units_as_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.policy import LeaseGrant, LeaseRequest

SLOTS = 60
"""Slots of a sliding window."""


@dataclass
class _Limit:
    slots: dict[int, int] = field(default_factory=dict)
    """Units by time slot."""
    concurrency: dict[str, int] = field(default_factory=dict)
    """Concurrency slots by gateway."""
    held: dict[str, int] = field(default_factory=dict)
    """Units that become free when a gateway dies."""
    known: bool = False
    """Whether the usage before the first request has been reported."""


@dataclass
class FakeQuotaAuthority:
    """Leases units of all limits to gateways, and tracks which gateways are alive."""

    limits: dict[str, _Limit] = field(default_factory=dict)
    alive: dict[str, float] = field(default_factory=dict)
    """Expiry of each gateway."""
    last_replies: dict[str, tuple[int, list[LeaseGrant]]] = field(default_factory=dict)
    """Message number and reply of each gateway's last message."""

    def exchange(
        self,
        gateway: str,
        number: int,
        alive_s: float,
        requests: list[tuple[str, LeaseRequest]],
        now: float,
    ) -> list[LeaseGrant]:
        """Answer a message. A repeated message gets the same reply."""
        last = self.last_replies.get(gateway)
        if last is not None and last[0] == number:
            return last[1]
        self.alive[gateway] = now + alive_s
        self.alive = {name: until for name, until in self.alive.items() if until > now}
        grants = [
            self._lease_concurrency(gateway, name, request)
            if request.kind == "slots"
            else self._lease_units(gateway, name, request, now)
            for name, request in requests
        ]
        self.last_replies[gateway] = number, grants
        return grants

    def counted_units(self, name: str) -> int:
        """Return the units that are used or leased of a limit."""
        limit = self.limits.get(name)
        return 0 if limit is None else sum(limit.slots.values())

    def _share(self, request: LeaseRequest, available: int) -> int:
        granted = min(request.need, max(0, available))
        rest = max(0, available - granted)
        return granted + min(request.ahead, rest // (2 * len(self.alive)))

    def _lease_units(
        self, gateway: str, name: str, request: LeaseRequest, now: float
    ) -> LeaseGrant:
        limit = self.limits.setdefault(name, _Limit())
        slot, oldest, width = request.slot, request.slot, 0.0
        if request.kind == "window":
            width = request.seconds / SLOTS
            slot = int(now // width)
            oldest = int((now - request.lease_s) // width) - SLOTS
        limit.slots = {at: units for at, units in limit.slots.items() if at >= oldest}
        slot = max([slot, *limit.slots])
        freed = sum(limit.held.pop(other) for other in set(limit.held) - set(self.alive))
        freed += limit.held.pop(gateway, 0) - request.was_held
        if freed:
            used = limit.slots.get(slot, 0)
            limit.slots[slot] = used - min(freed, used)
        for at, units in request.back:
            if at in limit.slots:
                limit.slots[at] -= units
        seeds = request.seeds if request.seeds is not None and not limit.known else ()
        for age, units in (*seeds, *request.owed):
            at = int((now - age) // width) if width else slot
            if at >= oldest:
                limit.slots[at] = limit.slots.get(at, 0) + units
        limit.known = limit.known or request.seeds is not None
        room = request.limit - sum(limit.slots.values())
        granted = self._share(request, room)
        if granted < request.need and request.overdraft > 0 and room >= request.overdraft_above:
            granted = min(request.need, room + request.overdraft)
        if granted:
            limit.slots[slot] = limit.slots.get(slot, 0) + granted
        if request.held is not None and request.held + granted > 0:
            limit.held[gateway] = request.held + granted
        return LeaseGrant(granted, slot, sum(limit.slots.values()), 0.0, 0.0, limit.known)

    def _lease_concurrency(self, gateway: str, name: str, request: LeaseRequest) -> LeaseGrant:
        leased = self.limits.setdefault(name, _Limit()).concurrency
        for other in set(leased) - set(self.alive):
            del leased[other]
        others = sum(count for other, count in leased.items() if other != gateway)
        granted = self._share(request, request.limit - others - request.kept)
        leased[gateway] = request.kept + granted
        return LeaseGrant(granted, 0, others + request.kept + granted, 0.0, 0.0, known=True)
