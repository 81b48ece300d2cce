"""Concurrency leases of gateways in virtual time: running requests keep their slots, unused slots are returned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.virtual_fleet import GATEWAY_TTL_S, VirtualFleet, VirtualGateway, make_fleet

from argosy.policy import ConcurrencyLease, ConcurrencyMeter, LeaseGrant

LIMIT = 12


def make_lease(limit: int = LIMIT) -> ConcurrencyLease:
    return ConcurrencyLease("concurrency", ConcurrencyMeter(limit), GATEWAY_TTL_S)


def make_concurrency_fleet(num_gateways: int) -> VirtualFleet:
    """Return a fleet that checks at each tick that running requests have slots within the limit."""
    fleet = make_fleet(num_gateways, make_lease)

    def check() -> None:
        for gateway in fleet.gateways:
            assert leased_slots(fleet, gateway) >= gateway.num_running
            assert gateway.lease.used >= gateway.num_running
        assert leased_slots(fleet, *fleet.gateways) <= LIMIT

    fleet.check = check
    return fleet


def leased_slots(fleet: VirtualFleet, *gateways: VirtualGateway) -> int:
    """Return the slots that the authority has leased to these gateways."""
    limit = fleet.authority.limits.get("concurrency")
    return 0 if limit is None else sum(limit.concurrency.get(each.name, 0) for each in gateways)


def begin(fleet: VirtualFleet, gateway: VirtualGateway) -> bool:
    admitted = fleet.use(gateway, 1)
    gateway.num_running += admitted
    return admitted


def end(fleet: VirtualFleet, gateway: VirtualGateway) -> None:
    if gateway.num_running:
        gateway.lease.adjust(0, -1, fleet.now)
        gateway.num_running -= 1


def grant(granted: int, used: int) -> LeaseGrant:
    return LeaseGrant(granted, 0, used, 0.0, 0.0, known=True)


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["begin", "begin", "end", "wait"])),
        max_size=40,
    ),
)
def test_free_slots_are_granted_and_unused_slots_are_returned(
    num_gateways: int, steps: list[tuple[int, str]]
) -> None:
    fleet = make_concurrency_fleet(num_gateways)
    for number, action in steps:
        gateway = fleet.gateways[number % num_gateways]
        if action == "wait":
            fleet.wait(3.0)
        elif action == "end":
            end(fleet, gateway)
        elif not begin(fleet, gateway):
            assert leased_slots(fleet, *fleet.gateways) == LIMIT
        fleet.check()
    fleet.wait(3.0)
    for gateway in fleet.gateways:  # a few slots are kept for the next requests
        spare = gateway.num_running // 4 + 1
        assert leased_slots(fleet, gateway) <= gateway.num_running + spare
    for gateway in fleet.gateways:
        while gateway.num_running:
            end(fleet, gateway)
    fleet.wait(3.0)
    assert not any(gateway.active for gateway in fleet.gateways)
    assert leased_slots(fleet, *fleet.gateways) == 0
    messages = [gateway.num_messages for gateway in fleet.gateways]
    fleet.wait(3.0)
    assert messages == [gateway.num_messages for gateway in fleet.gateways]


def test_busy_gateway_sends_few_messages_and_knows_usage_of_others() -> None:
    fleet = make_concurrency_fleet(2)
    first, second = fleet.gateways
    assert all(begin(fleet, first) for _ in range(8))
    assert first.num_messages <= 5
    begin(fleet, second)
    assert second.lease.used == leased_slots(fleet, first) + 1
    assert second.lease.reset_s(fleet.now) == second.lease.wait_s(1, fleet.now) == 0.0
    before = first.num_messages
    fleet.wait(10.0)
    assert 5 <= first.num_messages - before <= 15
    before = first.num_messages
    begin(fleet, first)
    assert first.num_messages == before


def test_spare_slots_expire_while_authority_is_silent() -> None:
    fleet = make_concurrency_fleet(1)
    (gateway,) = fleet.gateways
    begin(fleet, gateway)
    assert gateway.lease.remaining(fleet.now + GATEWAY_TTL_S - 0.1) > 0
    assert gateway.lease.remaining(fleet.now + GATEWAY_TTL_S) == 0
    assert gateway.lease.build_request(fleet.now + GATEWAY_TTL_S).kept == 1


def test_overdrawn_slot_counts_and_is_usable_only_at_that_moment() -> None:
    lease = make_lease(7)
    assert lease.is_idle
    assert [lease.is_within_even_share(units, 3, 10.0) for units in (3, 4)] == [True, False]
    lease.overdraw(1, 10.0)
    assert [lease.remaining(now) for now in (10.0, 10.1)] == [1, 0]
    lease.overdraw(1, 11.0)
    lease.add(1, 11.0)
    assert lease.remaining(11.0) == 0
    assert lease.used == 1
    assert lease.is_due(11.0)
    assert [lease.is_within_even_share(units, 3, 12.0) for units in (2, 3)] == [True, False]
    assert lease.build_request(12.0).kept == 1


def test_overdraft_is_refused_for_a_moment_after_short_grant() -> None:
    lease = make_lease(9)
    lease.request_units(5)
    assert not lease.is_exhausted(5, 10.0)
    request = lease.build_request(10.0)
    assert (request.need, request.kept) == (5, 0)
    lease.apply_grant(request, grant(2, 2), 10.0, 10.0)
    assert [lease.can_overdraw(units, 10.01) for units in (2, 3)] == [True, False]
    assert lease.can_overdraw(3, 10.06)
    lease.request_units(1)
    lease.apply_grant(lease.build_request(11.0), grant(1, 1), 11.0, 11.0)
    assert lease.can_overdraw(9, 11.0)
