"""The queue and those that move, whatever happens: no seat is lost or taken twice, nobody waits beside a free one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.limit_harness import request

from argosy.gateway import GatewayConfig, ModelConfig, QueueConfig, ReplicaConfig
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.pool.pool import Pool, RoutingDecision
from argosy.gateway.principal import Principal
from argosy.gateway.proxy.dispatcher import Dispatcher
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_fields import parse_request_fields
from argosy.policy import AttemptOutcome
from argosy.protocol import ApiError

STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "end", "fail", "leave"]), st.integers(0, 30)),
    max_size=60,
)


class World:
    """Three replicas with two seats each; what runs on them and what waits."""

    def __init__(self) -> None:
        behind = [
            ReplicaConfig(url=f"http://127.0.0.1:{port}", kind="openai", max_requests=2)
            for port in (7, 8, 9)
        ]
        config = GatewayConfig(models=[ModelConfig(name="big", replicas=behind)])
        (self.pool,) = build_model_router(build_model_entries(config)).pools
        self.queue = Dispatcher(self.pool, QueueConfig(), lambda: 0.0)
        self.running: list[RequestContext] = []
        self.waiting: list[tuple[RequestContext, asyncio.Task[object]]] = []

    async def step(self, what: str, number: int) -> None:
        """Something happens; who gets a seat by it runs."""
        queue = self.queue
        if what == "ask":
            context = request(Principal(project=f"p{number % 4}", tier=number % 3))
            self.waiting.append((context, asyncio.create_task(queue.acquire_replica(context))))
        elif what == "leave" and self.waiting:
            context, task = self.waiting.pop(number % len(self.waiting))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            queue.release(context)
        elif what == "end" and self.running:
            context = self.running.pop(number % len(self.running))
            self.pool.replicas[context.replica_name].on_request_ended(AttemptOutcome.SUCCESS, 0.0)
            queue.release(context)
        elif what == "fail" and self.running:
            context = self.running.pop(number % len(self.running))
            context.failed_replicas = {context.replica_name}
            self.pool.replicas[context.replica_name].on_request_ended(None, 0.0)
            self.waiting.append(
                (context, asyncio.create_task(queue.reacquire_replica(context, 1000.0)))
            )
        for _ in range(4):
            await asyncio.sleep(0)
        self.running += [context for context, task in self.waiting if task.done()]
        self.waiting = [(context, task) for context, task in self.waiting if not task.done()]

    def check(self) -> None:
        """What always holds."""
        replicas = self.pool.replicas.values()
        assert all(0 <= replica.load.in_flight <= 2 for replica in replicas)
        assert sum(replica.load.in_flight for replica in replicas) == len(self.running)
        free = {replica.name for replica in replicas if replica.has_free_slot(0, 0.0)}
        assert all(free <= context.failed_replicas for context, _ in self.waiting)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_seat_is_lost_or_taken_twice_and_nobody_waits_beside_a_free_one(
    steps: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        world = World()
        for what, number in steps:
            await world.step(what, number)
            world.check()
        while world.running:
            await world.step("end", 0)
            world.check()
        assert not world.waiting
        assert not len(world.queue)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("most", "told", "seats"),
    [(None, 0, 256), (None, 8, 8), (None, 512, 512), (2, 0, 2), (2, 8, 2), (9, 8, 8)],
)
def test_a_replica_gets_what_it_says_that_it_runs_and_no_more_than_was_set(
    most: int | None, told: int, seats: int
) -> None:
    behind = ReplicaConfig(url="http://127.0.0.1:7", kind="sglang", max_requests=most)
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[behind])])
    (replica,) = build_model_router(build_model_entries(config)).pools[0].replicas.values()
    replica.load.max_seqs = told
    assert replica.slots == seats


def test_what_was_set_is_no_less_for_what_other_gateways_have() -> None:
    behind = ReplicaConfig(url="http://127.0.0.1:7", kind="argosy", max_requests=4)
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[behind])])
    (replica,) = build_model_router(build_model_entries(config)).pools[0].replicas.values()
    replica.load.max_seqs = 8
    replica.update_slot_shares([{1: 4}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [4, 4, 4]
    replica.update_slot_shares([{1: 6}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [4, 4, 2]
    replica.update_slot_shares([])
    assert replica.slot_share(1, 0.0) == 4


@pytest.mark.parametrize("moves", [False, True])
async def test_who_leaves_as_a_seat_comes_leaves_nothing_there(moves: bool) -> None:
    world = World()
    running = [request(Principal()) for _ in range(6)]
    for context in running:
        replica = await world.queue.acquire_replica(context)
        replica.on_prefill_done(10, 0.0)
    late = request(Principal())
    waits = (
        world.queue.reacquire_replica(late, 1000.0) if moves else world.queue.acquire_replica(late)
    )
    task = asyncio.create_task(waits)
    await asyncio.sleep(0)
    task.cancel()
    replica.on_request_ended(AttemptOutcome.SUCCESS, 0.0)
    await asyncio.gather(task, return_exceptions=True)
    assert (replica.load.in_flight, replica.load.sent_tokens) == (1, 0)
    assert [tried.outcome for tried in late.trace.attempts] == ["ended"]


async def test_old_requests_wait_on_while_only_higher_tiers_have_seats_beside_other_gateways() -> (
    None
):
    behind = ReplicaConfig(url="http://127.0.0.1:7", kind="argosy")
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[behind])])
    (pool,) = build_model_router(build_model_entries(config)).pools
    (replica,) = pool.replicas.values()
    replica.load.max_seqs, now = 4, 0.0
    replica.update_slot_shares([{1: 3}])
    assert [replica.slot_share(tier, now) for tier in range(3)] == [2, 2, 1]
    queue = Dispatcher(pool, QueueConfig(), lambda: now)
    for _ in range(2):
        await queue.acquire_replica(request(Principal(tier=0)))
    old = asyncio.create_task(queue.acquire_replica(request(Principal(tier=2))))
    await asyncio.sleep(0)
    now = 40.0
    others = [
        asyncio.create_task(queue.acquire_replica(request(Principal(tier=0)))) for _ in range(8)
    ]
    for _ in others:
        await asyncio.sleep(0)
        replica.on_request_ended(AttemptOutcome.SUCCESS, now)
        assert replica.load.in_flight == 2
    replica.update_slot_shares([])
    queue.dispatch_waiting()
    await asyncio.gather(old, *others)


async def refused(queue: Dispatcher, context: RequestContext) -> str:
    """What a request is told that may not wait; empty where it does."""
    task = asyncio.create_task(queue.acquire_replica(context))
    for _ in range(4):
        await asyncio.sleep(0)
    if not task.done():
        return ""
    error = task.exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1.0)
    return error.message


async def test_all_who_wait_are_told_as_soon_as_that_makes_no_sense_any_more() -> None:
    world, now = World(), 0.0
    queue = Dispatcher(world.pool, QueueConfig(), lambda: now)
    for _ in range(6):
        await queue.acquire_replica(request(Principal()))
    waiting = [
        asyncio.create_task(queue.acquire_replica(request(Principal(tier=tier))))
        for tier in range(3)
    ]
    for replica in world.pool.replicas.values():
        replica.outage.mark_up()
        replica.outage.mark_down(now)
    await asyncio.sleep(0)
    now = 29.0
    queue.dispatch_waiting()
    assert len(queue) == 3
    now = 31.0
    queue.dispatch_waiting()
    for told in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(told, ApiError)
        assert (told.status, told.code, told.retry_after_s) == (503, "no_replica", 10.0)


async def test_no_more_bytes_wait_than_may() -> None:
    world = World()
    world.queue = queue = Dispatcher(world.pool, QueueConfig(max_bytes=5000), lambda: 0.0)
    for _ in range(6):
        await queue.acquire_replica(request(Principal()))
    assert "the queue is full" in await refused(queue, request(Principal(tier=0), prompt=2000))
    assert not await refused(queue, request(Principal(tier=0, project="a"), prompt=500))
    assert not await refused(queue, request(Principal(tier=0, project="b"), prompt=500))
    assert "the queue is full" in await refused(queue, request(Principal(tier=0), prompt=500))


async def test_what_can_be_served_soon_is_for_higher_tiers() -> None:
    """By how long a tenant's own requests have waited, and by what waits in the replicas."""
    world, now = World(), 0.0
    queue = Dispatcher(world.pool, QueueConfig(timeout_s=60.0), lambda: now)
    for _ in range(6):
        await queue.acquire_replica(request(Principal(tier=0)))
    free, paid = Principal(tier=2, project="free"), Principal(tier=1, project="paid")
    assert not await refused(queue, request(free))
    assert not await refused(queue, request(paid))
    now = 29.0
    assert not await refused(queue, request(free))
    now = 31.0
    assert "capacity is for higher tiers" in await refused(queue, request(free))
    assert not await refused(queue, request(Principal(tier=2, project="another")))
    assert not await refused(queue, request(paid))
    now = 46.0
    assert "capacity is for higher tiers" in await refused(queue, request(paid))
    for replica in world.pool.replicas.values():
        replica.load.max_seqs, replica.load.waiting = 10, 9
    assert "capacity is for higher tiers" in await refused(queue, request(Principal(tier=1, project="new")))
    assert not await refused(queue, request(Principal(tier=0, project="new")))


async def test_what_a_body_has_beside_its_prompt_counts_against_the_bound_on_bytes() -> None:
    behind = ReplicaConfig(url="http://127.0.0.1:7", kind="openai", max_requests=1)
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[behind])])
    (pool,) = build_model_router(build_model_entries(config)).pools
    queue = Dispatcher(pool, QueueConfig(max_bytes=50_000), lambda: 0.0)
    await queue.acquire_replica(request(Principal()))
    body = {"model": "big", "messages": [], "metadata": {"of": "x" * 20_000}}
    journeys = [request(Principal()) for _ in range(3)]
    for context in journeys:
        context.fields = parse_request_fields(msgspec.json.encode(body), "messages")
    waiting = [asyncio.create_task(queue.acquire_replica(context)) for context in journeys[:2]]
    await asyncio.sleep(0)
    assert len(queue) == 2
    with pytest.raises(ApiError) as refusal:
        async with asyncio.timeout(1.0):
            await queue.acquire_replica(journeys[2])
    assert (refusal.value.status, refusal.value.code) == (429, "overloaded")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not len(queue)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_thousands_that_lost_their_replica_are_not_all_looked_at_for_each(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seats again, but not for them, and they look for another one at the same moment."""
    count, picks, pick = 300, 0, Pool.select_replica

    def counted(self: Pool, *args: Any) -> RoutingDecision | None:  # noqa: ANN401 - as they come
        nonlocal picks
        picks += 1
        return pick(self, *args)

    behind = [
        ReplicaConfig(url=f"http://127.0.0.1:{port}", kind="openai", max_requests=count)
        for port in range(7, 7 + replicas)
    ]
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=behind)])
    (pool,) = build_model_router(build_model_entries(config)).pools
    queue, running = Dispatcher(pool, QueueConfig(), lambda: 0.0), list[RequestContext]()
    for number in range(replicas * count):
        context = request(Principal(project=f"p{number % 4}"))
        await queue.acquire_replica(context)
        running.append(context)
    lost = [context for context in running if context.replica_name == running[0].replica_name]
    monkeypatch.setattr(Pool, "select_replica", counted)
    moves = []
    for context in lost:
        context.failed_replicas = {context.replica_name}
        pool.replicas[context.replica_name].on_request_ended(None, 0.0)
        moves.append(asyncio.create_task(queue.reacquire_replica(context, 1000.0)))
        await asyncio.sleep(0)
    assert picks <= 3 * count
    free = [context for context in running if context not in lost]
    for context in free:  # each seat of the other goes to the one that has waited for longest
        pool.replicas[context.replica_name].on_request_ended(AttemptOutcome.SUCCESS, 0.0)
    for _ in range(4):
        await asyncio.sleep(0)
    assert [move.done() for move in moves] == [bool(free)] * count
    for move in moves:
        move.cancel()
    await asyncio.gather(*moves, return_exceptions=True)
    picks = 0
    queue.dispatch_waiting()
    assert picks == 0
