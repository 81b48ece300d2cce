"""Gateways that share one limit in virtual time and send messages only when they have to.

Never compared with gateways in processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from argosy.policy import LeasedQuota, WindowLease
from tests.support.quota_authority import FakeQuotaAuthority

GATEWAY_TTL_S = 5.0
TICK_S = 0.05


@dataclass
class VirtualGateway:
    """Sends a request when units are missing or the lease is due, and drops an idle lease."""

    name: str
    lease: LeasedQuota
    active: bool = False
    """Whether the lease is renewed when it is due."""
    num_messages: int = 0
    num_running: int = 0
    """Running requests, for a concurrency limit."""


@dataclass
class VirtualFleet:
    """Gateways and an authority that drops a limit after a time without messages."""

    gateways: list[VirtualGateway]
    authority: FakeQuotaAuthority = field(default_factory=FakeQuotaAuthority)
    now: float = 1_000_000.0
    is_authority_up: bool = True
    kept_until: dict[str, float] = field(default_factory=dict)
    """Time at which the authority drops each limit."""
    uses: list[tuple[float, int]] = field(default_factory=list)
    """Time and units of each use."""
    check: Callable[[], None] = lambda: None
    """Called at each tick."""

    def exchange(self, gateway: VirtualGateway) -> None:
        """Send a gateway's lease request and apply the grant."""
        lease, name = gateway.lease, gateway.lease.name
        request = lease.build_request(self.now)
        if request.kind == "slots":
            assert lease.remaining(self.now) <= max(0, request.kept - gateway.num_running)
        if self.now >= self.kept_until.get(name, 0.0):
            self.authority.limits.pop(name, None)
        self.kept_until[name] = self.now + request.keep_s
        gateway.num_messages += 1
        [grant] = self.authority.exchange(
            gateway.name, gateway.num_messages, GATEWAY_TTL_S, [(name, request)], self.now
        )
        lease.apply_grant(request, grant, self.now, self.now)
        gateway.active = not lease.is_idle

    def use(self, gateway: VirtualGateway, units: int) -> bool:
        """Use units, requesting more if necessary. Returns whether there were enough."""
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
        """Advance the time tick by tick. Gateways send the messages that become due."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for gateway in self.gateways:
                if self.is_authority_up and gateway.active and gateway.lease.is_due(self.now):
                    self.exchange(gateway)
            self.check()

    def counted_units(self) -> int:
        """Return the units that the authority counts, including unused grants."""
        lease = self.gateways[0].lease
        lease.remaining(self.now)  # a calendar period that is over changes the lease's name
        return self.authority.counted_units(lease.name)

    def used_units(self) -> int:
        """Return the units that all gateways have used."""
        return sum(units for _, units in self.uses)


def make_fleet(num_gateways: int, make_lease: Callable[[], LeasedQuota]) -> VirtualFleet:
    """Return gateways with new leases of the same limit."""
    gateways = [VirtualGateway(f"g{number}", make_lease()) for number in range(num_gateways)]
    for gateway in gateways:
        if isinstance(gateway.lease, WindowLease):
            gateway.lease.on_report_due = partial(setattr, gateway, "active", True)
    return VirtualFleet(gateways)
