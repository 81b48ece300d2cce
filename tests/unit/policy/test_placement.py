"""The placement core under a virtual clock: many requests with faults in pools of any shape, and single decisions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.virtual_placement import WAITING, PlacementSimulation, PlacementWorld

from argosy.policy import AttemptOutcome
from argosy.policy.placement import (
    AttemptEnding,
    GivingWay,
    PlacementLimits,
    PlacementReplica,
    QueueLimits,
    RequestState,
)
from argosy.policy.placement.attempt import MAX_CANDIDATES
from argosy.policy.placement.request import MAX_ATTEMPT_RECORDS
from argosy.policy.retries import HEDGE_RATIO, HEDGE_RESERVE

SLOTS = 8
DEFAULT = GivingWay()


@pytest.mark.parametrize(
    ("num_requests", "num_replicas", "num_stable"),
    [
        (3000, 20, 0),
        (1000, 60, 0),
        (2000, 4, 12),
        pytest.param(10_000, 20, 0, marks=pytest.mark.exhaustive),
        pytest.param(5000, 4, 12, marks=pytest.mark.exhaustive),
    ],
)
def test_thousands_of_requests_keep_all_invariants_through_faults(
    num_requests: int, num_replicas: int, num_stable: int
) -> None:
    """Replicas crash, stall, drain, refuse; clients leave; streams pause, move, resume and are hedged.

    A stable version takes over what the few replicas of another one cannot serve, and all that waits there when that
    one is rolled back.
    """
    simulation = PlacementSimulation(num_requests, num_replicas, 5, 7, num_stable)
    simulation.run()
    counts = simulation.counts
    kinds = {4: ("moved", "moved streams"), 20: ("paused", "drained"), 60: ("hedge",)}
    for kind in (*kinds[num_replicas], "resume", "retry", "left"):
        assert counts[kind] > 0, kind
    completed = [each for each in simulation.ended if each.end == "completed"]
    assert len(completed) == counts["completed"] > num_requests / 2
    assert all(each.delivered == each.target for each in completed)
    assert not counts["refused: INTERRUPTED"]


@settings(max_examples=40)
@given(
    st.integers(1, 150),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32),
    st.integers(0, 2),
)
def test_invariants_hold_in_small_pools_of_any_shape(
    num_requests: int, num_replicas: int, slots: int, seed: int, num_stable: int
) -> None:
    limits = PlacementLimits(QueueLimits(max_requests=30, timeout_s=20.0), 5.0, 3)
    simulation = PlacementSimulation(num_requests, num_replicas, slots, seed, num_stable, limits)
    simulation.leave_share, simulation.fault_interval_s = 0.3, 0.5
    simulation.run()


@pytest.mark.parametrize("num_stable", [0, 4])
def test_same_seed_gives_same_effects_with_and_without_previews(num_stable: int) -> None:
    """Each preview is what happens then, and changes nothing."""
    first, second = (PlacementSimulation(400, 6, 5, 3, num_stable) for _ in range(2))
    second.previews = True
    first.run()
    second.run()
    assert first.log == second.log
    assert second.counts["previewed"] > 10


def make_world(num_replicas: int = 2, giving_way: GivingWay | None = DEFAULT) -> PlacementWorld:
    return PlacementWorld(num_replicas, SLOTS, 0, giving_way=giving_way)


def fill(world: PlacementWorld, tenant: str, count: int, tier: int = 2) -> None:
    """Start `count` long streams of a tenant."""
    for _ in range(count):
        request = world.arrive(tenant, tier, 10_000)
        if request.attempts:
            world.answer(request, request.attempts[0])


def run_for(world: PlacementWorld, seconds: float) -> None:
    """Let time pass in which every replica answers at once, and streams get 50 tokens per second."""
    for _ in range(round(seconds / 0.1)):
        world.advance(0.1)
        for request, each in tuple(world.requests.items()):
            for attempt in tuple(each.calls):
                if request.state is RequestState.SENT:
                    world.answer(request, attempt)
                elif request.state is RequestState.STREAMING:
                    world.deliver(request, 5)


def count_streams(world: PlacementWorld) -> Counter[str]:
    return Counter(each.request.tenant for each in world.requests.values() if each.calls)


@pytest.mark.parametrize(("tier", "after_s"), [(0, 0.3), (1, 1.0), (2, 5.0)])
def test_streams_give_way_to_a_waiting_tenant_within_its_time(tier: int, after_s: float) -> None:
    world = make_world()
    fill(world, "greedy", 40)
    run_for(world, 3.0)
    late = world.arrive("late", tier, 10)
    run_for(world, after_s - 0.1)
    assert late.state is RequestState.WAITING
    run_for(world, 0.3)
    assert late.attempts
    assert world.counts["paused"] == 1
    (paused,) = [each for each in world.requests if each.state is RequestState.PAUSED]
    assert paused.tenant == "greedy"


@pytest.mark.parametrize("giving_way", [DEFAULT, None])
def test_batches_pause_at_once_for_each_waiting_request(giving_way: GivingWay | None) -> None:
    world = make_world(giving_way=giving_way)
    fill(world, "batch", 40, tier=3)
    run_for(world, 0.2)
    late = [world.arrive("late", 2, 10) for _ in range(3)]
    run_for(world, 0.1)
    assert all(request.attempts for request in late)
    assert world.counts["drained"] == 3
    world.arrive("other", 3, 10)
    run_for(world, 60.0)
    assert world.counts["drained"] == 3, "a batch paused for a batch"
    assert world.counts["paused"] == 0


def test_pausing_ends_at_equal_shares() -> None:
    world = make_world()
    fill(world, "greedy", 40)
    run_for(world, 3.0)
    fill(world, "late", 40)
    run_for(world, 30.0)
    assert count_streams(world) == {"greedy": SLOTS, "late": SLOTS}
    paused = world.counts["paused"]
    run_for(world, 30.0)
    assert world.counts["paused"] == paused


def test_expected_wait_is_at_most_the_time_that_sleeping_replicas_take_to_wake_up() -> None:
    world = make_world(1)
    world.pool.wake_s = 0.5
    waits = [world.pool.estimate_wait_s(0, 1, world.now)]
    fill(world, "greedy", SLOTS + 1)
    waits.append(world.pool.estimate_wait_s(1, 1, world.now))
    world.replicas[0].health.on_reported_state("sleeping", world.now)
    waits.append(world.pool.estimate_wait_s(1, 1, world.now))
    assert waits == [0.0, 0.5, 0.5]
    assert world.pool.has_ready(world.now), "its requests do not fall back to another model"
    world.pool.wake_s = None
    assert world.pool.estimate_wait_s(1, 1, world.now) is None
    assert not world.pool.has_ready(world.now)


def test_paused_stream_resumes_before_its_tenant_s_new_requests() -> None:
    world = make_world()
    fill(world, "greedy", 2 * SLOTS)
    run_for(world, 3.0)
    other = world.arrive("greedy", 2, 10)
    late = world.arrive("late", 2, 10)
    run_for(world, 5.5)
    (paused,) = [each for each in world.requests if each.state is RequestState.PAUSED]
    world.end(late, late.attempts[0], AttemptEnding.COMPLETED)
    assert paused.attempts
    assert other.state is RequestState.WAITING
    assert [end is not None for _, end in paused.pauses] == [True]


@pytest.mark.parametrize("is_native", [True, False])
def test_request_with_many_sequences_takes_as_many_slots(
    monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    """Any free slot starts it. At a native replica it gives up one for each request of another tenant."""
    monkeypatch.setattr(PlacementReplica, "is_native", is_native)
    world = make_world(1)
    load = world.replicas[0].load
    first = world.arrive("calm", 2, 10_000)
    wide = [world.arrive("wide", 2, 10_000, sequences=64) for _ in range(3)]
    assert [bool(each.attempts) for each in wide] == [True, False, False]
    assert load.slots_in_use == (SLOTS if is_native else SLOTS + 1)
    world.finish(first, "left")
    if not is_native:
        assert not any(each.attempts for each in wide[1:]), "all slots are taken"
        world.finish(wide[0], "left")
        assert load.slots_in_use == SLOTS
        return
    assert wide[1].attempts, "in the slot that is free again"
    late = world.arrive("late", 2, 10_000)
    run_for(world, 5.5)
    assert late.attempts
    assert not world.counts["paused"], "the streams go on"
    assert (wide[0].slots, load.slots_in_use) == (SLOTS - 2, SLOTS)
    fill(world, "late", 20)
    run_for(world, 20.0)
    assert wide[0].slots + wide[1].slots == SLOTS // 2, "equal shares"
    assert load.demand_by_tenant == {
        "wide": (128, load.demand_by_tenant["wide"][1]),
        "late": (4, load.demand_by_tenant["late"][1]),
    }


@pytest.mark.parametrize("is_full", [True, False])
def test_requests_that_wait_at_a_full_replica_give_way_before_streams(*, is_full: bool) -> None:
    """The cache of the replica has room for half of the slots. Others that start late may just be slow."""
    world = make_world(1)
    world.replicas[0].load.waiting = SLOTS // 2 if is_full else 0
    fill(world, "greedy", SLOTS // 2)
    unanswered = []
    for _ in range(SLOTS // 2):
        unanswered.append(world.arrive("greedy", 2, 10_000))
        world.advance(1.0)
    late = world.arrive("late", 2, 10)
    world.advance(5.5)
    assert late.attempts
    (paused,) = [each for each in world.requests if each.state is RequestState.PAUSED]
    assert (paused is unanswered[-1]) is is_full
    world.end(late, late.attempts[0], AttemptEnding.COMPLETED)
    assert paused.attempts


@pytest.mark.parametrize("reason", ["off", "inexact", "fresh", "last"])
def test_stream_does_not_pause(reason: str) -> None:
    """Giving way is off, streams cannot be resumed, have just started, or are the last of their tenants."""
    world = make_world(giving_way=None if reason == "off" else DEFAULT)
    if reason == "inexact":
        for replica in world.replicas:
            replica.is_exact = False
    if reason == "last":
        for number in range(2 * SLOTS):
            fill(world, f"t{number}", 1)
    else:
        fill(world, "greedy", 2 * SLOTS)
    run_for(world, 0.2 if reason == "fresh" else 3.0)
    late = world.arrive("late", 1 if reason == "fresh" else 2 if reason == "last" else 0, 10)
    run_for(world, 1.5 if reason == "fresh" else 6.0)
    assert late.state is RequestState.WAITING
    assert not world.counts["paused"]


def eject(world: PlacementWorld, *replicas: PlacementReplica) -> None:
    for replica in replicas:
        for _ in range(3):
            replica.health.on_attempt_ended(AttemptOutcome.FAILURE, 0, world.now)
        assert replica.health.is_ejected


def test_ejected_replicas_are_used_only_while_the_others_are_busy() -> None:
    world = make_world(3)
    eject(world, *world.replicas[:2])
    fill(world, "t", SLOTS + 1)
    assert sorted(replica.load.in_flight for replica in world.replicas) == [0, 1, SLOTS]
    assert world.replicas[2].load.in_flight == SLOTS


def test_retries_between_failing_replicas_stay_within_their_budget() -> None:
    """Each waits for budget, and the others fail at the timeout."""
    world = PlacementWorld(2, 40, 0, limits=PlacementLimits(failover_timeout_s=1.0))
    eject(world, *world.replicas)
    requests = [world.arrive("t", 1, 10) for _ in range(40)]
    for _ in range(20):
        for request in requests:
            if request.attempts:
                world.end(request, request.attempts[0], AttemptEnding.LOST)
        world.advance(0.1)
    assert world.counts["refused: UPSTREAM_FAILED"] == 40
    assert 40 < sum(len(each.request.records) for each in world.ended) <= 1.1 * 40 + 6


def test_request_of_a_failing_replica_waits_for_budget() -> None:
    world = PlacementWorld(1, SLOTS, 0, limits=PlacementLimits(failover_timeout_s=30.0))
    eject(world, *world.replicas)
    while world.pool.retry_budget.try_acquire(0.0):
        pass
    request = world.arrive("t", 1, 10)
    world.end(request, request.attempts[0], AttemptEnding.LOST)
    world.advance(1.0)
    assert not request.attempts
    world.advance(20.0)
    assert request.attempts


def test_requests_wait_for_a_replica_that_refuses_what_exceeds_its_limit() -> None:
    """The replica runs three requests for 50 ms each, which the gateway does not know."""
    count = 24
    world = PlacementWorld(1, count, 0, limits=PlacementLimits(failover_timeout_s=20.0))
    num_sent = []
    for _ in range(2):
        requests = [world.arrive("t", 1, 1, is_stream=False) for _ in range(count)]
        while running := [each for each in requests if each.attempts]:
            for request in running[3:]:
                world.end(request, request.attempts[0], AttemptEnding.REFUSED, 429)
            for request in running[:3]:
                world.answer(request, request.attempts[0])
                world.end(request, request.attempts[0], AttemptEnding.COMPLETED)
            while world.requests and not any(each.attempts for each in requests):
                world.advance(0.05)
        num_sent.append(sum(len(each.request.records) for each in world.ended))
    assert world.counts["completed"] == 2 * count
    assert num_sent[1] - num_sent[0] < 1.5 * count


def test_a_token_per_attempt_is_no_progress() -> None:
    """A failure for each token would cost too many attempts."""
    world = make_world(8)
    request = world.arrive("t", 1, 10_000)
    while request in world.requests:
        world.answer(request, request.attempts[0])
        world.end(request, request.attempts[0], AttemptEnding.LOST)
        world.advance(1.0)
    assert world.counts["refused: QUARANTINED"] == 1
    assert len(request.records) == 4


def test_hedges_of_many_silent_requests_stay_within_their_budget() -> None:
    world = PlacementWorld(8, 20, 0, hedge_after_s=1.0)
    for _ in range(30):
        world.arrive("t", 1, 10)
    world.advance(2.0)
    assert 0 < world.counts["hedge"] <= HEDGE_RESERVE + HEDGE_RATIO * 30


def test_request_that_fails_when_the_clock_starts_is_given_up_in_time() -> None:
    world = PlacementWorld(1, SLOTS, 0, limits=PlacementLimits(failover_timeout_s=5.0))
    request = world.arrive("t", 1, 10)
    world.report_state(world.replicas[0], "draining")
    world.end(request, request.attempts[0], AttemptEnding.LOST)
    world.advance(4.0)
    assert request.state is RequestState.DISPLACED
    world.advance(6.0)
    assert world.counts["refused: UPSTREAM_FAILED"] == 1


def test_tenant_with_streams_that_cannot_pause_lets_others_go_first() -> None:
    world = make_world(giving_way=GivingWay(max_share=0.5))
    for replica in world.replicas:
        replica.is_exact = False
    fill(world, "greedy", 40)
    fill(world, "late", 40)
    greedy = [each for each in world.requests if each.tenant == "greedy" and each.attempts]
    for request in greedy[:SLOTS]:
        world.deliver(request, 10_000)
        world.end(request, request.attempts[0], AttemptEnding.COMPLETED)
    assert count_streams(world) == {"greedy": SLOTS, "late": SLOTS}
    assert any(each.state in WAITING for each in world.requests)


def test_kept_attempts_and_candidates_are_bounded() -> None:
    world = make_world(2 * MAX_CANDIDATES)
    request = world.arrive("t", 1, 10_000)
    for _ in range(1000):
        world.answer(request, request.attempts[0])
        world.deliver(request, 4)
        world.end(request, request.attempts[0], AttemptEnding.LOST)
        while not request.attempts:
            world.advance(0.1)
            for replica in world.replicas:
                if replica.health.is_ejected:
                    replica.health.on_test_ended(AttemptOutcome.SUCCESS, 0, world.now, is_up=True)
    records = request.records
    assert len(records) == MAX_ATTEMPT_RECORDS
    assert (records[0].chosen_at, records[-1].chosen_at) == (0.0, world.now)
    assert len(records[0].candidate_costs) == MAX_CANDIDATES


def make_versions(arithmetic_id: str = "same") -> PlacementWorld:
    """Return a world whose only replica is taken over by two of the stable version, which have this arithmetic."""
    limits = PlacementLimits(QueueLimits(max_requests=SLOTS), failover_timeout_s=5.0)
    world = PlacementWorld(1, SLOTS, 0, limits=limits, num_stable_replicas=2)
    for replica in world.replicas[1:]:
        replica.arithmetic_id = arithmetic_id
    return world


def test_stable_version_takes_over_what_another_cannot_serve() -> None:
    world = make_versions()
    (candidate, *stable) = world.replicas
    fill(world, "t", SLOTS)
    waiting = [world.arrive("t", 1, 10) for _ in range(SLOTS)]
    beyond = [world.arrive("t", 1, 10) for _ in range(SLOTS)]
    refused = [each for each in beyond if each.attempts]
    assert refused, "requests beyond the tenant's share of the queue"
    assert not any(each.attempts for each in waiting[:2])
    world.withdraw(is_withdrawn=True)
    assert not len(world.core.queues[world.pool])
    assert candidate.load.in_flight == SLOTS, "running requests stay"
    assert sum(replica.load.in_flight for replica in stable) == 2 * SLOTS
    world.withdraw(is_withdrawn=False)
    world.report_state(candidate, "draining")
    for request in waiting:
        world.finish(request, "left")
    world.advance(2.0)
    assert world.counts["drained"] == SLOTS, "a drain moves the streams"
    assert not candidate.load.in_flight
    moved = world.arrive("t", 1, 10)
    assert all(world.requests[each].pool is world.pool.takeover for each in (moved, *refused))


@pytest.mark.parametrize("arithmetic_id", ["same", "other"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_stream_of_a_lost_replica_goes_to_the_stable_version_of_its_arithmetic(
    arithmetic_id: str, *, is_stream: bool
) -> None:
    world = make_versions(arithmetic_id)
    request = world.arrive("t", 1, 100, is_stream=is_stream)
    world.answer(request, request.attempts[0])
    world.deliver(request, 20)
    world.end(request, request.attempts[0], AttemptEnding.LOST)
    if arithmetic_id == "same" or not is_stream:  # a response in one piece may start over
        assert request.attempts[0].replica in world.replicas[1:]
    else:
        assert request.state is RequestState.DISPLACED
        world.report_state(world.replicas[0], "ready")
        world.advance(2.0)
        assert [attempt.replica for attempt in request.attempts] == world.replicas[:1]
