"""The placement core under a virtual clock: thousands of requests with faults, and any order of single events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.virtual_placement import WAITING, PlacementSimulation, PlacementWorld

from argosy.policy import AttemptOutcome
from argosy.policy.placement import (
    AttemptEnding,
    GivingWay,
    PlacementError,
    PlacementLimits,
    PlacementRequest,
    PoolQueue,
    QueueLimits,
    RequestState,
)
from argosy.policy.placement import core as core_module
from argosy.policy.placement.attempt import MAX_CANDIDATES
from argosy.policy.placement.pauses import PausePlan
from argosy.policy.placement.request import MAX_ATTEMPT_RECORDS

SLOTS = 8
DEFAULT = GivingWay()


@pytest.mark.parametrize(
    ("num_requests", "num_replicas", "num_stable"),
    [
        (10_000, 20, 0),
        (2000, 4, 12),
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
    assert len(simulation.ended) == num_requests
    assert not simulation.core.requests
    kinds = ("moved", "moved streams") if num_stable else ("paused", "drained", "hedge")
    for kind in (*kinds, "resume", "retry", "left"):
        assert counts[kind] > 0, kind
    completed = [each for each in simulation.ended if each.end == "completed"]
    assert len(completed) == counts["completed"] > num_requests / 2
    assert all(each.delivered == each.target for each in completed)
    assert not counts["refused: INTERRUPTED"]


@pytest.mark.parametrize("num_stable", [0, 4])
def test_same_seed_gives_same_effects_with_and_without_previews(num_stable: int) -> None:
    """Each preview is what happens then, and changes nothing."""
    first, second = (PlacementSimulation(400, 6, 5, 3, num_stable) for _ in range(2))
    second.previews = True
    first.run()
    second.run()
    assert first.log == second.log
    assert second.counts["previewed"] > 10


def forget_to_withdraw(queue: PoolQueue, request: PlacementRequest) -> None:
    """Leave the request of a client that has gone in the queue."""
    queue.beneficiaries.pop(request, None)
    queue.withdraw_displaced(request)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        pytest.param(PoolQueue, "withdraw", forget_to_withdraw, id="queue"),
        pytest.param(core_module, "record_failure", lambda *_: None, id="retry"),
        pytest.param(PausePlan, "_may_lose", lambda *_: True, id="giving-way"),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, planted: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, PlacementError, KeyError)):
        PlacementSimulation(2000, 20, 5, seed=7).run()


class PlacementMachine(RuleBasedStateMachine):
    """Any order of arrivals, answers, failures, drains, pauses and departures at three replicas with two slots."""

    num_stable_replicas = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = PlacementWorld(
            3,
            2,
            0,
            giving_way=GivingWay(max_paused_share=1.0),
            hedge_after_s=1.0,
            limits=PlacementLimits(QueueLimits(max_requests=10, timeout_s=20.0), 5.0, 3),
            num_stable_replicas=self.num_stable_replicas,
        )

    @rule(
        tier=st.integers(0, 2),
        tenant=st.integers(0, 2),
        tokens=st.integers(1, 50),
        stream=st.booleans(),
    )
    def arrive(self, tier: int, tenant: int, tokens: int, *, stream: bool) -> None:
        self.world.arrive(f"t{tenant}", tier, tokens, is_stream=stream)

    def calls(self, state: RequestState) -> list[Any]:
        return [
            (request, attempt)
            for request, each in self.world.requests.items()
            if request.state is state
            for attempt in each.calls
        ]

    @precondition(lambda self: self.calls(RequestState.SENT))
    @rule(index=st.integers(0, 20))
    def answer(self, index: int) -> None:
        calls = self.calls(RequestState.SENT)
        self.world.answer(*calls[index % len(calls)])

    @precondition(lambda self: self.calls(RequestState.STREAMING))
    @rule(index=st.integers(0, 20), tokens=st.integers(1, 30))
    def stream(self, index: int, tokens: int) -> None:
        calls = self.calls(RequestState.STREAMING)
        request, attempt = calls[index % len(calls)]
        self.world.deliver(request, tokens)
        if self.world.requests[request].delivered >= self.world.requests[request].target:
            self.world.end(request, attempt, AttemptEnding.COMPLETED)
        else:
            self.world.report(request)

    @precondition(lambda self: self.calls(RequestState.SENT) or self.calls(RequestState.STREAMING))
    @rule(
        index=st.integers(0, 20),
        ending=st.sampled_from(
            [AttemptEnding.LOST, AttemptEnding.REFUSED, AttemptEnding.UNSUITABLE]
        ),
        status=st.sampled_from([429, 500]),
    )
    def fail(self, index: int, ending: AttemptEnding, status: int) -> None:
        calls = self.calls(RequestState.SENT) + self.calls(RequestState.STREAMING)
        request, attempt = calls[index % len(calls)]
        self.world.end(request, attempt, ending, status)

    @precondition(lambda self: self.world.requests)
    @rule(index=st.integers(0, 20))
    def leave(self, index: int) -> None:
        requests = list(self.world.requests)
        self.world.finish(requests[index % len(requests)], "left")

    @rule(index=st.integers(0, 4), state=st.sampled_from(["ready", "draining", "starting"]))
    def report_state(self, index: int, state: str) -> None:
        replicas = self.world.replicas
        self.world.report_state(replicas[index % len(replicas)], state)

    @precondition(lambda self: self.num_stable_replicas)
    @rule(is_withdrawn=st.booleans())
    def withdraw(self, *, is_withdrawn: bool) -> None:
        self.world.withdraw(is_withdrawn=is_withdrawn)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 3.0, 10.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @invariant()
    def ends(self) -> None:
        assert len(self.world.core.requests) == len(self.world.requests)

    def teardown(self) -> None:
        """Every request ends, and every slot is free then."""
        world = self.world
        for replica in world.replicas:
            if not replica.health.breaker.is_closed:
                replica.health.breaker.record_probe_outcome(AttemptOutcome.SUCCESS, world.now)
            world.report_state(replica, "ready")
        for _ in range(2000):
            for request, attempt in self.calls(RequestState.SENT):
                if attempt in request.attempts:
                    world.answer(request, attempt)
            for request, attempt in self.calls(RequestState.STREAMING):
                if request in world.requests:
                    each = world.requests[request]
                    world.deliver(request, each.target)
                    world.end(request, attempt, AttemptEnding.COMPLETED)
            if not world.requests:
                break
            world.advance(1.0)
        assert not world.requests
        assert not any(replica.load.in_flight for replica in world.replicas)


class TakeoverMachine(PlacementMachine):
    """The same with a pool of two replicas that takes over."""

    num_stable_replicas = 2


@pytest.mark.parametrize("machine", [PlacementMachine, TakeoverMachine])
def test_any_order_of_events_keeps_the_invariants(machine: type[PlacementMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


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
