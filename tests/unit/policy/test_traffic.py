"""Traffic: sticky shares, rules, shadow copies, fallback pools, and the route record of a pool."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.traffic import (
    ALL_TENANTS,
    DailyWindow,
    PoolRoute,
    ShadowCopy,
    ShadowSampler,
    TrafficRoute,
    TrafficSubject,
    UserTraffic,
    Variant,
    WeightedPool,
    choose_salt,
    clamp_share,
    heavy_tenants,
    parse_grade,
    sticky_key,
)

NAMES = st.text(max_size=5)
SUBJECTS = st.builds(TrafficSubject, tenant=NAMES, user=NAMES, session=NAMES, request=NAMES)
SHARES = st.floats(0.0, 1.0)
THURSDAY = 0.0
"""The epoch."""
ALICE = TrafficSubject(tenant="acme", user="alice")


def pool_route(*shares: float, salt: str = "s") -> PoolRoute:
    variants = tuple(Variant(digest=f"v{i}", share=share) for i, share in enumerate(shares))
    return PoolRoute(pool="p", version=7, stable="stable", variants=variants, salt=salt)


@given(SUBJECTS, SHARES, SHARES, SHARES, st.text(max_size=3))
def test_growing_share_moves_nobody_back(
    subject: TrafficSubject, first: float, second: float, other: float, salt: str
) -> None:
    low, high = sorted((first, second))
    before = pool_route(other * (1.0 - high), low, salt=salt).select_version(subject).digest
    after = pool_route(other * (1.0 - high), high, salt=salt).select_version(subject).digest
    if before != "stable":
        assert after == before


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5])
def test_share_of_sticky_users_is_the_declared_one(share: float) -> None:
    """Complaint 15: 10,000 requests of sticky users stay within two points of the share."""
    route = pool_route(share)
    users = [TrafficSubject(tenant="t", user=f"u{number}") for number in range(2_000)]
    digests = [route.select_version(users[number % 2_000]).digest for number in range(10_000)]
    assert digests.count("v0") / 10_000 == pytest.approx(share, abs=0.02)


def test_salts_select_different_users() -> None:
    users = [TrafficSubject(tenant="t", user=f"u{number}") for number in range(2_000)]
    chosen = [
        {user for user in users if pool_route(0.25, salt=salt).select_version(user).digest == "v0"}
        for salt in ("a", "b")
    ]
    assert len(chosen[0] & chosen[1]) / 2_000 == pytest.approx(0.25**2, abs=0.02)


def test_unit_of_assignment_is_the_user_or_the_session_of_heavy_tenants() -> None:
    subject = TrafficSubject(tenant="t", user="u", session="s", request="r")
    assert sticky_key(subject, ()) == ("t", "u")
    assert sticky_key(subject, ("t",)) == ("t", "s")
    assert sticky_key(subject, (ALL_TENANTS,)) == ("t", "s")
    assert sticky_key(TrafficSubject(tenant="t", request="r"), ()) == ("t", "r")
    assert sticky_key(TrafficSubject(tenant="t", request="r"), ("t",)) == ("t", "r")
    assert heavy_tenants(()) == (ALL_TENANTS,)
    history = [
        UserTraffic(key=("large", "u"), weights=(97.0,)),
        UserTraffic(key=("small", "u"), weights=(1.0,)),
    ]
    assert heavy_tenants(history) == ("large",)


def test_chosen_salt_divides_heavy_users_more_evenly_than_the_first() -> None:
    random = Random(1)
    history = [
        UserTraffic(key=("t", f"u{rank}"), weights=(1e4 / rank**1.1, random.random() * 1e2 / rank))
        for rank in range(1, 400)
    ]
    shares = (0.05, 0.25)
    first = choose_salt("r", "c", history, shares, num_salts=1)
    best = choose_salt("r", "c", history, shares)
    assert best.imbalance < first.imbalance
    assert best.effective_users > 1.0
    assert choose_salt("r", "c", (), shares).salt == first.salt
    assert choose_salt("other", "c", history, shares).salt != best.salt


@pytest.mark.parametrize(
    ("window", "hours_open"),
    [
        (DailyWindow(start_minute=60, end_minute=180), {1, 2, 25, 26}),
        (DailyWindow(start_minute=60, end_minute=180, weekdays=(4,)), {25, 26}),
        (DailyWindow(start_minute=60, end_minute=180, utc_offset_minutes=60), {0, 1, 24, 25}),
        (DailyWindow(start_minute=1380, end_minute=60, weekdays=(3,)), {23, 24}),
    ],
)
def test_daily_windows(window: DailyWindow, hours_open: set[int]) -> None:
    assert {hour for hour in range(48) if window.contains(THURSDAY + hour * 3600)} == hours_open


@pytest.mark.parametrize(
    ("answer", "grade"),
    [("7", 0.7), ("10", 1.0), ("**8**/10", 0.8), ("Grade: 0", 0.0), ("I give it 9", None),
     ("The result is 2 + 2", None), ("11", None), ("", None)],
)  # fmt: skip
def test_grades_are_numbers_and_no_sentences(answer: str, grade: float | None) -> None:
    assert parse_grade(answer) == grade


def test_users_are_divided_by_weight() -> None:
    pools = (WeightedPool(pool="a", weight=3.0), WeightedPool(pool="c", weight=1.0))
    route = TrafficRoute(model="m", pools=pools)
    users = [TrafficSubject(tenant="t", user=f"u{number}") for number in range(2_000)]
    chosen = [route.select_by_weight(user).pool for user in users]
    assert chosen.count("c") / 2_000 == pytest.approx(0.25, abs=0.03)


def test_testers_get_the_candidate_until_it_is_rolled_back() -> None:
    rollout = pool_route(0.05)
    assert rollout.select_version(ALICE, prefers_candidate=True) == ("v0", False)
    rolled_back = rollout.roll_back("it errs", 1.0)
    assert rolled_back.select_version(ALICE, prefers_candidate=True) == ("stable", False)


@pytest.mark.parametrize(
    ("waits_s", "pool", "skipped"),
    [
        ({"a": 1.0, "b": 0.0}, "a", ()),
        ({"a": 9.0, "b": 2.0}, "b", ("a has 9.0 s of queue, at most 5 s",)),
        (
            {"c": 2.0, "b": 6.0},
            "c",
            ("a has no ready replica", "b has 6.0 s of queue, at most 5 s"),
        ),
        ({}, None, tuple(f"{name} has no ready replica" for name in "abc")),
    ],
)
def test_fallback_pools_take_over_in_order(
    waits_s: dict[str, float | None], pool: str | None, skipped: tuple[str, ...]
) -> None:
    pools = (WeightedPool(pool="a"),)
    route = TrafficRoute(model="m", pools=pools, fallback_pools=("b", "c"), max_wait_s=5.0)
    waits_s = dict.fromkeys("abc") | waits_s
    assert route.select_serving_pool("a", waits_s) == (pool, skipped)
    assert msgspec.json.decode(msgspec.json.encode(route), type=TrafficRoute) == route


@given(
    SUBJECTS,
    st.lists(st.floats(0.0, 100.0), min_size=2, max_size=4).filter(any),
    st.integers(0, 3),
    st.floats(0.0, 100.0),
)
def test_growing_weight_moves_nobody_away(
    subject: TrafficSubject, weights: list[float], grown: int, growth: float
) -> None:
    grown %= len(weights)

    def select(weights: list[float]) -> str:
        pools = [
            WeightedPool(pool=f"p{index}", weight=weight) for index, weight in enumerate(weights)
        ]
        return TrafficRoute(model="m", pools=tuple(pools)).select_by_weight(subject).pool

    if select(weights) == f"p{grown}":
        weights[grown] += growth
        assert select(weights) == f"p{grown}"


def test_shadow_copies_are_sampled_and_capped() -> None:
    shadow = ShadowCopy(pool="p", digest="v", fraction=0.25, max_requests_per_s=10.0)
    sampler = ShadowSampler()
    copied = [sampler.should_copy(shadow, f"slow{i}", i * 0.1) for i in range(4_000)]
    assert sum(copied) / 4_000 == pytest.approx(0.25, abs=0.03)
    assert not sampler.num_capped
    burst = [sampler.should_copy(shadow, f"fast{i}", 1_000.0 + i * 0.001) for i in range(1_000)]
    assert 10 <= sum(burst) <= 20
    assert sampler.num_capped > 150
    again = ShadowSampler()
    assert again.should_copy(shadow, "x", 0.0) == ShadowSampler().should_copy(shadow, "x", 5.0)


@given(SHARES, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_share_never_exceeds_ready_capacity(
    wanted: float, stable: int, candidate: int, needed: int, may_exceed: bool
) -> None:
    """Invariant 3, complaints 7 and 8."""
    share = clamp_share(
        wanted,
        stable_ready=stable,
        candidate_ready=candidate,
        needed=needed,
        may_exceed=may_exceed,
    )
    assert share * needed <= candidate + 1e-9
    if not may_exceed:
        assert share <= wanted
    elif stable + candidate >= needed > 0:
        assert (1.0 - share) * needed <= stable + 1e-9


@given(st.lists(SHARES, max_size=3), st.booleans())
def test_rollback_is_one_record_that_needs_nothing_but_the_route(
    weights: list[float], has_shadow: bool
) -> None:
    """Invariant 1."""
    total = max(1.0, sum(weights))
    route = pool_route(*(weight / total for weight in weights))
    if has_shadow:
        shadow = ShadowCopy(pool="p", digest="v9", fraction=0.1)
        route = msgspec.structs.replace(route, shadow=shadow)
    rolled_back = route.roll_back("it errs", 5.0)
    assert rolled_back.share_of("stable") == 1.0
    assert rolled_back.shadow is None
    assert rolled_back.roll_back("again", 6.0) is rolled_back
    if rolled_back is not route:
        assert rolled_back.version == route.version + 1
        assert rolled_back.rollback is not None
        assert rolled_back.rollback.digest == ("v0" if weights else "v9")
    assert msgspec.json.decode(msgspec.json.encode(rolled_back), type=PoolRoute) == rolled_back


def test_route_of_a_later_version_is_read() -> None:
    encoded = msgspec.json.encode({**msgspec.to_builtins(pool_route(0.1)), "later": 1, "schema": 2})
    assert msgspec.json.decode(encoded, type=PoolRoute).share_of("v0") == 0.1


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: pool_route(0.7, 0.7), "between 0 and 1"),
        (lambda: msgspec.structs.replace(pool_route(0.1), stable="v0"), "named twice"),
        (lambda: TrafficRoute(model="m", pools=()), "positive weight"),
        (lambda: TrafficRoute(model="m", pools=(WeightedPool(pool="a"),) * 2), "named twice"),
        (
            lambda: TrafficRoute(model="m", pools=(WeightedPool(pool="a", weight=-1.0),)),
            "0 or more",
        ),
        (lambda: ShadowCopy(pool="p", fraction=0.1, max_requests_per_s=0.0), "positive"),
        (lambda: ShadowCopy(pool="p", fraction=1.1), "between 0 and 1"),
        (lambda: DailyWindow(start_minute=0, end_minute=2000), "1440"),
        (lambda: DailyWindow(start_minute=0, end_minute=20, weekdays=(7,)), "weekdays"),
    ],
    ids=["sum", "variants", "empty", "pools", "weight", "cap", "shadow", "minute", "day"],
)
def test_invalid_routes_are_refused(create: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create()
