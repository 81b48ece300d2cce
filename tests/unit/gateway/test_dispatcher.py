"""Dispatcher invariants: no slot is lost or used twice, and no request waits while a replica has a free slot."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.limit_harness import make_context

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


class DispatcherHarness:
    """Dispatcher of three replicas with two slots each, and its running and waiting requests."""

    def __init__(self) -> None:
        replica_configs = [
            ReplicaConfig(url=f"http://127.0.0.1:{port}", kind="openai", max_requests=2)
            for port in (7, 8, 9)
        ]
        config = GatewayConfig(models=[ModelConfig(name="big", replicas=replica_configs)])
        (self.pool,) = build_model_router(build_model_entries(config)).pools
        self.queue = Dispatcher(self.pool, QueueConfig(), lambda: 0.0)
        self.running: list[RequestContext] = []
        self.waiting: list[tuple[RequestContext, asyncio.Task[object]]] = []

    async def step(self, action: str, index: int) -> None:
        """Perform an action, and collect the requests that it dispatches."""
        queue = self.queue
        if action == "ask":
            context = make_context(Principal(project=f"p{index % 4}", tier=index % 3))
            self.waiting.append((context, asyncio.create_task(queue.acquire_replica(context))))
        elif action == "leave" and self.waiting:
            context, task = self.waiting.pop(index % len(self.waiting))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            queue.release(context)
        elif action == "end" and self.running:
            context = self.running.pop(index % len(self.running))
            self.pool.replicas[context.replica_name].on_request_ended(AttemptOutcome.SUCCESS, 0.0)
            queue.release(context)
        elif action == "fail" and self.running:
            context = self.running.pop(index % len(self.running))
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
        """Assert the invariants."""
        replicas = self.pool.replicas.values()
        assert all(0 <= replica.load.in_flight <= 2 for replica in replicas)
        assert sum(replica.load.in_flight for replica in replicas) == len(self.running)
        others_running = {replica.name for replica in replicas if replica.has_free_slot(0, 0.0)}
        assert all(others_running <= context.failed_replicas for context, _ in self.waiting)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_slots_are_never_lost_shared_or_idle_while_requests_wait(
    steps: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        harness = DispatcherHarness()
        for action, index in steps:
            await harness.step(action, index)
            harness.check()
        while harness.running:
            await harness.step("end", 0)
            harness.check()
        assert not harness.waiting
        assert not len(harness.queue)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("configured", "reported", "slots"),
    [(None, 0, 256), (None, 8, 8), (None, 512, 512), (2, 0, 2), (2, 8, 2), (9, 8, 8)],
)
def test_slots_follow_reported_capacity_up_to_configured_maximum(
    configured: int | None, reported: int, slots: int
) -> None:
    replica_configs = ReplicaConfig(
        url="http://127.0.0.1:7", kind="sglang", max_requests=configured
    )
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[replica_configs])])
    (replica,) = build_model_router(build_model_entries(config)).pools[0].replicas.values()
    replica.load.max_seqs = reported
    assert replica.slots == slots


def test_configured_maximum_is_not_reduced_by_other_gateways() -> None:
    replica_configs = ReplicaConfig(url="http://127.0.0.1:7", kind="argosy", max_requests=4)
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[replica_configs])])
    (replica,) = build_model_router(build_model_entries(config)).pools[0].replicas.values()
    replica.load.max_seqs = 8
    replica.update_slot_shares([{1: 4}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [4, 4, 4]
    replica.update_slot_shares([{1: 6}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [4, 4, 2]
    replica.update_slot_shares([])
    assert replica.slot_share(1, 0.0) == 4


@pytest.mark.parametrize("has_failed_over", [False, True])
async def test_cancellation_during_dispatch_frees_slot(has_failed_over: bool) -> None:
    harness = DispatcherHarness()
    running = [make_context(Principal()) for _ in range(6)]
    for context in running:
        replica = await harness.queue.acquire_replica(context)
        replica.on_prefill_done(10, 0.0)
    cancelled = make_context(Principal())
    acquisition = (
        harness.queue.reacquire_replica(cancelled, 1000.0)
        if has_failed_over
        else harness.queue.acquire_replica(cancelled)
    )
    task = asyncio.create_task(acquisition)
    await asyncio.sleep(0)
    task.cancel()
    replica.on_request_ended(AttemptOutcome.SUCCESS, 0.0)
    await asyncio.gather(task, return_exceptions=True)
    assert (replica.load.in_flight, replica.load.sent_tokens) == (1, 0)
    assert [attempt.outcome for attempt in cancelled.trace.attempts] == ["ended"]


async def test_reserved_slots_do_not_end_wait_of_old_requests() -> None:
    replica_configs = ReplicaConfig(url="http://127.0.0.1:7", kind="argosy")
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[replica_configs])])
    (pool,) = build_model_router(build_model_entries(config)).pools
    (replica,) = pool.replicas.values()
    replica.load.max_seqs, now = 4, 0.0
    replica.update_slot_shares([{1: 3}])
    assert [replica.slot_share(tier, now) for tier in range(3)] == [2, 2, 1]
    queue = Dispatcher(pool, QueueConfig(), lambda: now)
    for _ in range(2):
        await queue.acquire_replica(make_context(Principal(tier=0)))
    old = asyncio.create_task(queue.acquire_replica(make_context(Principal(tier=2))))
    await asyncio.sleep(0)
    now = 40.0
    others = [
        asyncio.create_task(queue.acquire_replica(make_context(Principal(tier=0))))
        for _ in range(8)
    ]
    for _ in others:
        await asyncio.sleep(0)
        replica.on_request_ended(AttemptOutcome.SUCCESS, now)
        assert replica.load.in_flight == 2
    replica.update_slot_shares([])
    queue.dispatch_waiting()
    await asyncio.gather(old, *others)


async def find_rejection(queue: Dispatcher, context: RequestContext) -> str:
    """Return the message with which the queue rejects a request, or "" if the request waits."""
    task = asyncio.create_task(queue.acquire_replica(context))
    for _ in range(4):
        await asyncio.sleep(0)
    if not task.done():
        return ""
    error = task.exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1.0)
    return error.message


async def test_waiting_requests_fail_once_replicas_are_down_for_too_long() -> None:
    harness, now = DispatcherHarness(), 0.0
    queue = Dispatcher(harness.pool, QueueConfig(), lambda: now)
    for _ in range(6):
        await queue.acquire_replica(make_context(Principal()))
    waiting = [
        asyncio.create_task(queue.acquire_replica(make_context(Principal(tier=tier))))
        for tier in range(3)
    ]
    for replica in harness.pool.replicas.values():
        replica.health.on_reported_state("ready", now)
        replica.health.on_reported_state("draining", now)
    await asyncio.sleep(0)
    now = 29.0
    queue.dispatch_waiting()
    assert len(queue) == 3
    now = 31.0
    queue.dispatch_waiting()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, ApiError)
        assert (result.status, result.code, result.retry_after_s) == (503, "no_replica", 10.0)


async def test_queue_is_bounded_in_bytes() -> None:
    harness = DispatcherHarness()
    harness.queue = queue = Dispatcher(harness.pool, QueueConfig(max_bytes=5000), lambda: 0.0)
    for _ in range(6):
        await queue.acquire_replica(make_context(Principal()))
    assert "the queue is full" in await find_rejection(
        queue, make_context(Principal(tier=0), prompt_tokens=2000)
    )
    assert not await find_rejection(
        queue, make_context(Principal(tier=0, project="a"), prompt_tokens=500)
    )
    assert not await find_rejection(
        queue, make_context(Principal(tier=0, project="b"), prompt_tokens=500)
    )
    assert "the queue is full" in await find_rejection(
        queue, make_context(Principal(tier=0), prompt_tokens=500)
    )


async def test_capacity_is_reserved_for_higher_tiers() -> None:
    """Depends on how long the tenant's own requests have waited, and on the queues of the replicas."""
    harness, now = DispatcherHarness(), 0.0
    queue = Dispatcher(harness.pool, QueueConfig(timeout_s=60.0), lambda: now)
    for _ in range(6):
        await queue.acquire_replica(make_context(Principal(tier=0)))
    others_running, paid = Principal(tier=2, project="free"), Principal(tier=1, project="paid")
    assert not await find_rejection(queue, make_context(others_running))
    assert not await find_rejection(queue, make_context(paid))
    now = 29.0
    assert not await find_rejection(queue, make_context(others_running))
    now = 31.0
    assert "capacity is for higher tiers" in await find_rejection(
        queue, make_context(others_running)
    )
    assert not await find_rejection(queue, make_context(Principal(tier=2, project="another")))
    assert not await find_rejection(queue, make_context(paid))
    now = 46.0
    assert "capacity is for higher tiers" in await find_rejection(queue, make_context(paid))
    for replica in harness.pool.replicas.values():
        replica.load.max_seqs, replica.load.waiting = 10, 9
    assert "capacity is for higher tiers" in await find_rejection(
        queue, make_context(Principal(tier=1, project="new"))
    )
    assert not await find_rejection(queue, make_context(Principal(tier=0, project="new")))


async def test_whole_body_counts_towards_queue_bytes() -> None:
    replica_configs = ReplicaConfig(url="http://127.0.0.1:7", kind="openai", max_requests=1)
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=[replica_configs])])
    (pool,) = build_model_router(build_model_entries(config)).pools
    queue = Dispatcher(pool, QueueConfig(max_bytes=50_000), lambda: 0.0)
    await queue.acquire_replica(make_context(Principal()))
    body = {"model": "big", "messages": [], "metadata": {"of": "x" * 20_000}}
    contexts = [make_context(Principal()) for _ in range(3)]
    for context in contexts:
        context.fields = parse_request_fields(msgspec.json.encode(body), "messages")
    waiting = [asyncio.create_task(queue.acquire_replica(context)) for context in contexts[:2]]
    await asyncio.sleep(0)
    assert len(queue) == 2
    with pytest.raises(ApiError) as error:
        async with asyncio.timeout(1.0):
            await queue.acquire_replica(contexts[2])
    assert (error.value.status, error.value.code) == (429, "overloaded")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not len(queue)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_failed_over_requests_are_not_all_reexamined_for_each(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed replica has slots again, but these requests need another one, all at the same moment."""
    count, selections, select_replica_original = 300, 0, Pool.select_replica

    def count_selections(self: Pool, *args: Any) -> RoutingDecision | None:  # noqa: ANN401 - as they come
        nonlocal selections
        selections += 1
        return select_replica_original(self, *args)

    replica_configs = [
        ReplicaConfig(url=f"http://127.0.0.1:{port}", kind="openai", max_requests=count)
        for port in range(7, 7 + replicas)
    ]
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=replica_configs)])
    (pool,) = build_model_router(build_model_entries(config)).pools
    queue, running = Dispatcher(pool, QueueConfig(), lambda: 0.0), list[RequestContext]()
    for number in range(replicas * count):
        context = make_context(Principal(project=f"p{number % 4}"))
        await queue.acquire_replica(context)
        running.append(context)
    failed_over = [
        context for context in running if context.replica_name == running[0].replica_name
    ]
    monkeypatch.setattr(Pool, "select_replica", count_selections)
    moves = []
    for context in failed_over:
        context.failed_replicas = {context.replica_name}
        pool.replicas[context.replica_name].on_request_ended(None, 0.0)
        moves.append(asyncio.create_task(queue.reacquire_replica(context, 1000.0)))
        await asyncio.sleep(0)
    assert selections <= 3 * count
    others_running = [context for context in running if context not in failed_over]
    for context in (
        others_running
    ):  # each slot of the other replica goes to the request that has waited longest
        pool.replicas[context.replica_name].on_request_ended(AttemptOutcome.SUCCESS, 0.0)
    for _ in range(4):
        await asyncio.sleep(0)
    assert [move.done() for move in moves] == [bool(others_running)] * count
    for move in moves:
        move.cancel()
    await asyncio.gather(*moves, return_exceptions=True)
    selections = 0
    queue.dispatch_waiting()
    assert selections == 0


@pytest.mark.parametrize("tier", [1, 2])
async def test_lower_tier_gets_a_slot_within_a_short_queue_timeout(tier: int) -> None:
    """A slot becomes free every second, and a premium request always waits for it."""
    harness, now = DispatcherHarness(), 0.0
    harness.queue = queue = Dispatcher(harness.pool, QueueConfig(timeout_s=10.0), lambda: now)
    for _ in range(12):
        await harness.step("ask", 0)
    patient = make_context(Principal(project="patient", tier=tier))
    harness.waiting.append((patient, asyncio.create_task(queue.acquire_replica(patient))))
    while patient not in harness.running and now < 10.0:
        now += 1.0
        await harness.step("ask", 0)
        await harness.step("end", 0)
    assert now < 10.0
    for _, task in harness.waiting:
        task.cancel()
    await asyncio.gather(*(task for _, task in harness.waiting), return_exceptions=True)
