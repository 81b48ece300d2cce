"""What runs at a time, over gateways that speak when they have to: what runs is kept, what has ended comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.virtual_fleet import ALIVE_S, Gateway, World, world

from argosy.policy import ConcurrencyLease, ConcurrencyMeter, LeaseGrant, LeaseRequest

LIMIT = 12


def places(count: int) -> World:
    """Gateways with a lease of so many places; what runs is kept for them, whenever one looks."""
    fleet = world(count, lambda: ConcurrencyLease("places", ConcurrencyMeter(LIMIT), ALIVE_S))

    def check() -> None:
        for gateway in fleet.gateways:
            assert kept(fleet, gateway) >= gateway.running
            assert gateway.lease.used >= gateway.running
        assert kept(fleet, *fleet.gateways) <= LIMIT

    fleet.check = check
    return fleet


def kept(fleet: World, *gateways: Gateway) -> int:
    limit = fleet.authority.limits.get("places")
    return 0 if limit is None else sum(limit.places.get(one.name, 0) for one in gateways)


def begin(fleet: World, gateway: Gateway) -> bool:
    begun = fleet.use(gateway, 1)
    gateway.running += begun
    return begun


def end(fleet: World, gateway: Gateway) -> None:
    if gateway.running:
        gateway.lease.adjust(0, -1, fleet.now)
        gateway.running -= 1


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["begin", "begin", "end", "wait"])),
        max_size=40,
    ),
)
def test_what_runs_is_kept_nobody_waits_for_what_is_free_and_in_the_end_all_comes_back(
    count: int, steps: list[tuple[int, str]]
) -> None:
    fleet = places(count)
    for who, what in steps:
        gateway = fleet.gateways[who % count]
        if what == "wait":
            fleet.wait(3.0)
        elif what == "end":
            end(fleet, gateway)
        elif not begin(fleet, gateway):
            assert kept(fleet, *fleet.gateways) == LIMIT
        fleet.check()
    fleet.wait(3.0)
    for gateway in fleet.gateways:  # a few are at hand for those that come next, and no more
        assert kept(fleet, gateway) <= gateway.running + gateway.running // 4 + 1
    for gateway in fleet.gateways:
        while gateway.running:
            end(fleet, gateway)
    fleet.wait(3.0)
    assert not any(gateway.active for gateway in fleet.gateways)
    assert kept(fleet, *fleet.gateways) == 0
    messages = [gateway.messages for gateway in fleet.gateways]
    fleet.wait(3.0)
    assert messages == [gateway.messages for gateway in fleet.gateways]


def test_who_runs_many_asks_seldom_and_what_others_run_is_known() -> None:
    fleet = places(2)
    first, second = fleet.gateways
    assert all(begin(fleet, first) for _ in range(8))
    assert first.messages <= 5
    begin(fleet, second)
    assert second.lease.used == kept(fleet, first) + 1
    assert second.lease.reset_s(fleet.now) == second.lease.wait_s(1, fleet.now) == 0.0
    before = first.messages
    fleet.wait(10.0)
    assert 5 <= first.messages - before <= 15
    before = first.messages
    begin(fleet, first)
    assert first.messages == before


def test_who_comes_soon_after_another_need_not_ask() -> None:
    fleet = places(1)
    (one,) = fleet.gateways
    begin(fleet, one)
    for _ in range(3):
        end(fleet, one)
        fleet.wait(1.1)
        before = one.messages
        begin(fleet, one)
        assert one.messages == before


def test_an_authority_that_is_silent_keeps_nothing_for_ever() -> None:
    fleet = places(1)
    (one,) = fleet.gateways
    begin(fleet, one)
    assert one.lease.remaining(fleet.now + ALIVE_S - 0.1) > 0
    assert one.lease.remaining(fleet.now + ALIVE_S) == 0
    assert one.lease.build_request(fleet.now + ALIVE_S).kept == 1


def test_what_is_lent_is_one_at_that_moment_and_counts() -> None:
    lease = ConcurrencyLease("places", ConcurrencyMeter(7), ALIVE_S)
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


def test_where_there_was_too_little_more_is_not_worth_asking_for_a_moment_later() -> None:
    lease = ConcurrencyLease("places", ConcurrencyMeter(9), ALIVE_S)
    lease.request_units(5)
    assert not lease.is_exhausted(5, 10.0)
    ask = lease.build_request(10.0)
    assert (ask.need, ask.kept) == (5, 0)
    lease.apply_grant(ask, told(2), 10.0, 10.0)
    assert [lease.can_overdraw(units, 10.01) for units in (2, 3)] == [True, False]
    assert lease.can_overdraw(3, 10.06)
    lease.request_units(1)
    lease.apply_grant(lease.build_request(11.0), told(1), 11.0, 11.0)
    assert lease.can_overdraw(9, 11.0)


def told(granted: int) -> LeaseGrant:
    return LeaseGrant(granted, 0, granted, 0.0, 0.0, known=True)


def test_of_what_all_have_beyond_a_lowered_limit_each_gives_back_what_it_can() -> None:
    lease = ConcurrencyLease("places", ConcurrencyMeter(4), ALIVE_S)
    lease.add(2, 10.0)
    ask = LeaseRequest(kind="slots", limit=4, keep_s=10.0, need=0, ahead=0, kept=5)
    for all_have, room in ((6, 1), (60, -2)):
        lease.apply_grant(ask, LeaseGrant(0, 0, all_have, 0.0, 0.0, known=True), 10.0, 10.0)
        assert lease.remaining(10.0) == room
    lease.apply_grant(
        lease.build_request(11.0), LeaseGrant(0, 0, 60, 0.0, 0.0, known=True), 11.0, 11.0
    )
    assert not lease.is_idle
