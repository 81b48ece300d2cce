"""Routing policies: the least-cost estimate is the sum of its terms, and classic policies keep their definitions."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    ROUTING_POLICIES,
    BoundedHash,
    ReplicaLoad,
    RoundRobin,
    RoutingCandidate,
    RoutingPolicy,
    RoutingPolicyName,
    estimate_cost,
)
from argosy.policy.routing import select_least_cost, select_power_of_two


def load(name: str, **known: float) -> ReplicaLoad:
    return ReplicaLoad(name, reported_at=0.0, **known)  # type: ignore[arg-type]


def select_replica(
    policy: RoutingPolicy,
    loads: list[ReplicaLoad],
    draw: float = 0.0,
    now: float = 0.0,
    key: str = "",
) -> ReplicaLoad:
    candidates = [
        RoutingCandidate(replica, 1000, estimate_cost(replica, 1000, 10, now)) for replica in loads
    ]
    return policy(candidates, key, draw, now).load


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    draw=st.floats(0, 1, exclude_max=True),
    key=st.text(max_size=3),
)
def test_policy_selects_a_candidate(
    policy: RoutingPolicyName, loads: list[int], draw: float, key: str
) -> None:
    candidates = [load(str(n), in_flight=busy, queued_tokens=busy) for n, busy in enumerate(loads)]
    assert select_replica(ROUTING_POLICIES[policy](), candidates, draw, key=key) in candidates


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
@pytest.mark.parametrize(("weight", "expected"), [(1.0, 0.5), (3.0, 0.75)])
def test_share_follows_weight(policy: RoutingPolicyName, weight: float, expected: float) -> None:
    replicas = [load("heavy", weight=weight), load("light")]
    for replica in replicas:
        replica.ttft.add(0.1, 0.0)
    running, counts, chooser = deque[ReplicaLoad](), Counter[str](), ROUTING_POLICIES[policy]()
    for number in range(1000):
        if len(running) == 40:
            ended = running.popleft()
            ended.in_flight -= 1
            ended.sent_tokens -= 1000
        chosen = select_replica(chooser, replicas, (number * 0.618) % 1.0, key=str(number))
        chosen.in_flight += 1
        chosen.sent_tokens += 1000
        running.append(chosen)
        counts[chosen.name] += 1
    assert counts["heavy"] / 1000 == pytest.approx(expected, abs=0.07)


def test_least_cost_prefers_warm_replica_until_its_queue_costs_more() -> None:
    for queued, expected in ((0, "warm"), (900, "warm"), (1100, "cold")):
        candidates = [
            RoutingCandidate(replica, uncached, estimate_cost(replica, uncached, 10, 0.0))
            for replica, uncached in (
                (load("cold"), 1000),
                (load("warm", queued_tokens=queued), 40),
            )
        ]
        assert select_least_cost(candidates, "", 0.0, 0.0).load.name == expected


def test_cost_is_the_sum_of_its_terms() -> None:
    known = load("x", prefill_tokens_per_s=500.0, inter_token_s=0.02, kv_usage_ratio=0.5)
    known.queued_tokens, known.sent_tokens, known.reported_at = 100, 150, 100.0
    costs = estimate_cost(known, 1000, 10, 102.1)
    terms = (costs.queue_s, costs.prefill_s, costs.decode_s, costs.memory_s, costs.stale_s)
    assert terms == pytest.approx((0.5, 2.0, 0.2, 0.15, 0.25))
    assert costs.total_s == pytest.approx(3.1)
    assert estimate_cost(known, 1000, 10, 101.9).stale_s == 0.0
    assert estimate_cost(load("x", kv_usage_ratio=1.0), 1000, 10, 0.0).memory_s > 100


LOADS = st.builds(
    ReplicaLoad,
    st.just(""),
    prefill_tokens_per_s=st.floats(0.0, 1e6),
    inter_token_s=st.floats(0.0, 10.0),
    queued_tokens=st.integers(0, 10**7),
    sent_tokens=st.integers(0, 10**7),
    kv_usage_ratio=st.floats(0.0, 1.0),
    reported_at=st.sampled_from([-math.inf, 0.0, 99.0, 100.0, 101.0]),
)


@given(
    st.lists(LOADS, min_size=1, max_size=6),
    st.lists(st.integers(0, 10**6), min_size=6, max_size=6),
    st.integers(0, 1 << 40),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_costs_are_not_negative_and_dominated_replica_is_never_selected(
    loads: list[ReplicaLoad], uncached: list[int], output: int, draw: float
) -> None:
    for number, candidate in enumerate(loads):
        candidate.name = str(number)
    candidates = [
        RoutingCandidate(candidate, tokens, estimate_cost(candidate, tokens, output, 100.0))
        for candidate, tokens in zip(loads, uncached, strict=False)
    ]
    terms = {
        candidate.load.name: (c.queue_s, c.prefill_s, c.decode_s, c.memory_s, c.stale_s)
        for candidate in candidates
        for c in [candidate.cost]
    }
    assert all(
        math.isfinite(term) and term >= 0
        for replica_terms in terms.values()
        for term in replica_terms
    )
    chosen = select_least_cost(candidates, "", draw, 100.0).load.name
    for other in terms.values():
        assert not all(a > b + 1e-8 for a, b in zip(terms[chosen], other, strict=True))


def test_equal_replicas_are_selected_by_the_draw() -> None:
    candidates = [load(name) for name in "abcd"]
    chosen = Counter(
        select_replica(select_least_cost, candidates, number / 100).name for number in range(100)
    )
    assert chosen == dict.fromkeys("abcd", 25)


def test_round_robin_stays_even_when_a_replica_leaves() -> None:
    policy, four = RoundRobin(), [load(name) for name in "dbca"]
    assert "".join(select_replica(policy, four).name for _ in range(6)) == "abcdab"
    assert "".join(select_replica(policy, four[1:]).name for _ in range(3)) == "cab"


def test_power_of_two_selects_the_less_loaded_of_each_pair() -> None:
    candidates = [load("busy", in_flight=9), load("idle"), load("half", in_flight=5)]
    chosen = Counter(
        select_replica(select_power_of_two, candidates, number / 600).name for number in range(600)
    )
    assert chosen == {"idle": 400, "half": 200}


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=200))
def test_bounded_hash_keeps_its_bound_and_key_affinity(keys: list[str]) -> None:
    policy, candidates = BoundedHash(), [load(name) for name in "abcde"]
    for number, key in enumerate(keys):
        chosen = select_replica(policy, candidates, key=key)
        chosen.in_flight += 1
        assert chosen.in_flight <= math.ceil(1.25 * (number + 1) / 5)
    idle = [load(name) for name in "abcde"]
    again = {select_replica(policy, idle, key=keys[0]).name for _ in range(5)}
    assert len(again) == 1


def test_bounded_hash_moves_few_keys_when_a_replica_is_added() -> None:
    policy, few, more = BoundedHash(), [load(n) for n in "abcd"], [load(n) for n in "abcde"]
    keys = [str(number) for number in range(400)]
    before = [select_replica(policy, few, key=key).name for key in keys]
    after = [select_replica(policy, more, key=key).name for key in keys]
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    assert moved < 160
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"e"}


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), max_size=8), st.text(max_size=8))
def test_bounded_hash_does_not_depend_on_absent_replicas(
    candidate_sets: list[set[str]], key: str
) -> None:
    policy = BoundedHash()
    for present in candidate_sets:
        candidates = [load(name) for name in sorted(present)]
        fresh_choice = select_replica(BoundedHash(), candidates, 0.4, key=key)
        assert select_replica(policy, candidates, 0.4, key=key) is fresh_choice


def test_latency_policy_tries_new_replicas_once_and_retries_slow_ones() -> None:
    policy = ROUTING_POLICIES["latency"]()
    known, new, slow = load("known"), load("new"), load("slow")
    known.ttft.add(0.2, 0.0)
    slow.ttft.add(2.0, 0.0)
    assert select_replica(policy, [slow, known, new]) is new
    new.in_flight = 1
    assert select_replica(policy, [slow, known, new]) is known
    slow.in_flight, known.in_flight = 2, 18
    assert select_replica(policy, [slow, known, new]) is known
    known.in_flight = 20
    assert select_replica(policy, [slow, known, new]) is new
    slow.in_flight = known.in_flight = 0
    for second in range(60):
        known.ttft.add(0.2, float(second))
    assert select_replica(policy, [slow, known, new], now=60.0) is slow
