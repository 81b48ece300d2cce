"""Placement of adapters: few and stable homes, a bound on their load, and the cost of a replica without the adapter."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.adapter_placement import (
    HOT_REQUESTS_PER_MIN,
    MAX_COUNTED_ADAPTERS,
    MAX_RELATIVE_LOAD,
    AdapterRates,
    count_homes,
    estimate_load_s,
    select_homes,
)
from argosy.policy.placement import PlacementPool, PlacementReplica, PlacementRequest

LOADS = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 50), min_size=1)


@given(LOADS, st.integers(1, 5), st.text(max_size=5))
def test_homes_are_distinct_and_within_the_bound(
    loads: dict[str, float], count: int, adapter: str
) -> None:
    homes = select_homes(adapter, loads, count)
    assert 1 <= len(homes) == len({*homes}) <= count
    bound = MAX_RELATIVE_LOAD * (sum(loads.values()) + 1) / len(loads) + 1
    assert all(loads[home] < bound for home in homes)
    assert select_homes(adapter, dict(reversed(loads.items())), count) == homes
    assert select_homes(adapter, loads, count + 1)[:count] == homes


@given(st.integers(2, 8), st.text(max_size=5))
def test_a_replica_that_leaves_moves_only_its_own_adapters(replicas: int, adapter: str) -> None:
    loads = {f"r{index}": 0.0 for index in range(replicas)}
    for gone in loads:
        rest = {name: load for name, load in loads.items() if name != gone}
        before, after = select_homes(adapter, loads, 1), select_homes(adapter, rest, 1)
        assert before in (after, [gone])


def test_homes_follow_the_rate_of_requests() -> None:
    rates = AdapterRates()
    rates.record("rare", 0.0)
    assert count_homes(rates.per_minute("rare", 0.0)) == 1
    assert count_homes(rates.per_minute("rare", 0.0), min_replicas=3) == 3
    for second in range(600):
        rates.record("hot", second)
    assert rates.per_minute("hot", 599.0) > 10 * HOT_REQUESTS_PER_MIN
    assert count_homes(rates.per_minute("hot", 599.0)) == 2
    assert count_homes(1300.0) == 4
    assert count_homes(rates.per_minute("hot", 3600.0)) == 1
    for number in range(MAX_COUNTED_ADAPTERS):
        rates.record(str(number), 700.0)
    assert rates.per_minute("hot", 700.0) == 0.0
    assert estimate_load_s(40_000_000, 4e8) == 0.1
    assert estimate_load_s(0, 0.0) > 0.0


def test_a_pool_sends_an_adapter_to_its_home_and_counts_the_load() -> None:
    replicas = [PlacementReplica(name) for name in "abcd"]
    for replica in replicas:
        replica.health.on_reported_state("ready", 0.0)
        replica.load.reported_at, replica.adapter_bytes_per_s = 0.0, 1e8
    pool = PlacementPool("m", replicas)
    source = random.Random(1)

    def send(adapter: str, now: float) -> tuple[str, float]:
        request = PlacementRequest(
            *("x", 10),
            tenant="t",
            tier=1,
            weight=1.0,
            compute_block_keys=list,
            compute_digest=bytes,
            adapter=adapter,
        )
        selection = pool.select_replica(request, set(), now, source)
        assert selection is not None
        return selection.replica.name, selection.chosen.cost.adapter_s

    digests = [f"sha256:{number:02d}{'0' * 62}" for number in range(40)]
    first = [send(digest, 0.0) for digest in digests]
    assert all(load_s == 0.2 for _, load_s in first)
    assert min(Counter(name for name, _ in first).values()) >= 4
    again = [send(digest, 0.1) for digest in digests]
    assert [name for name, _ in again] == [name for name, _ in first]
    assert not any(load_s for _, load_s in again)
    replicas[0].adapters = {digests[0].removeprefix("sha256:")[:16]: 50_000_000}
    assert replicas[0].has_adapter(digests[0])
    assert not replicas[0].has_adapter(digests[1])
    assert len(pool.find_homes(f"sha256:{'f' * 64}", 0, 1.0)) == 1
    for index in range(40):
        send(digests[0], 1.0 + 0.1 * index)
    assert len(pool.find_homes(digests[0], 0, 5.0)) == 2
    assert len(pool.find_homes(digests[1], 3, 5.0)) == 3
