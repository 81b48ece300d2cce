"""Gateways that share a limit and speak only when they have to, as those of a fleet do; in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from argosy.policy import LeasedQuota, WindowLease
from tests.support.quota_authority import Authority

ALIVE_S = 5.0
TICK_S = 0.05


@dataclass
class Gateway:
    """It asks when somebody needs more, or the lease is due, and forgets a lease that is idle."""

    name: str
    lease: LeasedQuota
    active: bool = False
    messages: int = 0
    running: int = 0
    """Of what runs at a time."""


@dataclass
class World:
    """Gateways, and an authority that forgets a limit that it has not heard of for long."""

    gateways: list[Gateway]
    authority: Authority = field(default_factory=Authority)
    now: float = 1_000_000.0
    up: bool = True
    kept_until: dict[str, float] = field(default_factory=dict)
    uses: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many units."""
    check: Callable[[], None] = lambda: None
    """Called at each moment."""

    def exchange(self, gateway: Gateway) -> None:
        """The gateway asks, and hears the answer."""
        lease, name = gateway.lease, gateway.lease.name
        ask = lease.build_request(self.now)
        assert (
            lease.remaining(self.now) <= max(0, ask.kept - gateway.running) or ask.kind != "slots"
        )
        if self.now >= self.kept_until.get(name, 0.0):
            self.authority.limits.pop(name, None)
        self.kept_until[name] = self.now + ask.keep_s
        gateway.messages += 1
        [grant] = self.authority.exchange(
            gateway.name, gateway.messages, ALIVE_S, [(name, ask)], self.now
        )
        lease.apply_grant(ask, grant, self.now, self.now)
        gateway.active = not lease.is_idle

    def use(self, gateway: Gateway, units: int) -> bool:
        """Whether there was so much, asked for if need be."""
        lease = gateway.lease
        if lease.remaining(self.now) < units and not lease.is_exhausted(units, self.now):
            lease.request_units(units)
            self.exchange(gateway)
        if lease.remaining(self.now) < units:
            return False
        gateway.active = True
        lease.add(units, self.now)
        self.uses.append((self.now, units))
        return True

    def wait(self, seconds: float) -> None:
        """Time goes by, and who has to speak does."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for gateway in self.gateways:
                if self.up and gateway.active and gateway.lease.is_due(self.now):
                    self.exchange(gateway)
            self.check()

    def counted(self) -> int:
        """Units that the authority counts, grants that may yet be used included."""
        lease = self.gateways[0].lease
        lease.remaining(self.now)  # it may be of another day
        limit = self.authority.limits.get(lease.name)
        return 0 if limit is None else sum(limit.slots.values())

    def used(self, since: float) -> int:
        """Units that were used from then on."""
        return sum(units for at, units in self.uses if at > since)


def world(count: int, lease: Callable[[], LeasedQuota]) -> World:
    """Gateways with such leases."""
    gateways = [Gateway(f"g{number}", lease()) for number in range(count)]
    for gateway in gateways:
        if isinstance(gateway.lease, WindowLease):
            gateway.lease.on_report_due = partial(setattr, gateway, "active", True)
    return World(gateways)
