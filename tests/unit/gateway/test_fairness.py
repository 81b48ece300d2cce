"""Who is dispatched when one tenant floods: the real queue before a replica with known seats, a token each tick."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast

import pytest
from tests.support.limit_harness import request

from argosy.gateway import GatewayConfig, ModelConfig, QueueConfig, ReplicaConfig
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.principal import Principal
from argosy.gateway.proxy.dispatcher import Dispatcher
from argosy.gateway.request_context import RequestContext
from argosy.policy import AttemptOutcome, weighted_tokens
from argosy.protocol import ApiError

SEATS = 32
PROMPT = 10
TICKS_PER_S = 50


@dataclass
class Running:
    """A request that has a seat."""

    context: RequestContext
    replica: ReplicaEndpoint
    left: int
    """Tokens to come."""
    computed: int
    """Tokens of its prompt that are not cached, until the first token tells."""


@dataclass
class World:
    """A queue before one replica, and time that goes on when a test says so."""

    limits: QueueConfig = field(default_factory=lambda: QueueConfig(timeout_s=1e6))
    tick: int = 0
    running: list[Running] = field(default_factory=list)
    asking: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    """Weighted tokens by project, prompts included."""
    ended: Counter[str] = field(default_factory=Counter)
    """Answers by project."""
    waits: dict[str, list[int]] = field(default_factory=dict)
    """Ticks until a seat."""

    def __post_init__(self) -> None:
        behind = [ReplicaConfig(url="http://127.0.0.1:9", kind="openai", max_requests=SEATS)]
        config = GatewayConfig(models=[ModelConfig(name="big", replicas=behind)])
        models = build_model_router(build_model_entries(config))
        self.pool = models.pools[0]
        self.queue = Dispatcher(self.pool, self.limits, lambda: self.tick / TICKS_PER_S)

    def ask(
        self, project: str, tokens: int, tier: int = 1, *, prompt: int = PROMPT, cached: int = 0
    ) -> None:
        """A request whose answer has so many tokens, whatever it said it would have."""
        self.take(Principal(project=project, tier=tier), tokens, prompt=prompt, cached=cached)

    def take(
        self, principal: Principal, tokens: int, *, prompt: int = PROMPT, cached: int = 0
    ) -> None:
        """The same, of this caller."""
        context = request(principal, prompt=prompt, most=64)
        self.waiting[principal.project or principal.organisation] += 1
        self.asking.add(asyncio.create_task(self._ask(context, tokens, prompt - cached)))

    async def _ask(self, context: RequestContext, tokens: int, computed: int) -> None:
        principal, asked = context.principal, self.tick
        project = principal.project or principal.organisation
        try:
            replica = await self.queue.acquire_replica(context)
        except ApiError:
            self.refused[project] += 1
            return
        finally:
            self.waiting[project] -= 1
            self.asking.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        self.waits.setdefault(project, []).append(self.tick - asked)
        self.running.append(Running(context, replica, tokens, computed))

    async def step(self) -> None:
        """A token for each that runs; who has a seat from now on is known after it."""
        self.tick += 1
        now = self.tick / TICKS_PER_S
        for one in list(self.running):
            one.left -= 1
            project = one.context.principal.project
            got, one.computed = weighted_tokens(one.computed, 1), 0
            self.served[project] += round(got)
            self.queue.charge_tenant(one.context, got)
            if one.left == 0:
                self.ended[project] += 1
                self.running.remove(one)
                one.replica.on_request_ended(AttemptOutcome.SUCCESS, now)
                self.queue.release(one.context)
        for _ in range(4):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Nobody asks any more."""
        for task in self.asking:
            task.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)


def jain(shares: list[int]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


LENGTHS = {"short": 16, "middle": 32, "long": 64, "flood": 32}


async def flooded(world: World, ticks: int, premium_each: int | None = None) -> list[int]:
    """Each project of the tier keeps 40 waiting, the flood 400; requests that run, tick by tick."""
    at_once = []
    for _ in range(ticks):
        for project, tokens in LENGTHS.items():
            for _ in range(40 * (10 if project == "flood" else 1) - world.waiting[project]):
                world.ask(project, tokens)
        if premium_each is not None and world.tick % premium_each == 0:
            world.ask("premium", 16, tier=0)
        await world.step()
        at_once.append(len(world.running))
    return at_once


async def test_a_flood_takes_no_more_than_its_share_and_no_seat_stays_empty() -> None:
    world = World()
    await flooded(world, 200)
    world.served.clear()
    at_once = await flooded(world, 1500)
    assert jain([world.served[project] for project in LENGTHS]) >= 0.98
    assert set(at_once) == {SEATS}
    others = [wait for project in ("short", "middle", "long") for wait in world.waits[project]]
    assert max(others) <= max(world.waits["flood"]) / 3
    await world.end()


async def test_premium_requests_find_a_seat_at_once_and_few_stay_empty_for_them() -> None:
    world = World()
    await flooded(world, 200, premium_each=8)
    world.waits.clear()
    world.served.clear()
    at_once = await flooded(world, 1500, premium_each=8)
    assert max(world.waits["premium"]) == 0
    assert len(world.waits["premium"]) >= 180
    assert min(at_once) >= SEATS - SEATS // 8
    assert jain([world.served[project] for project in LENGTHS]) >= 0.97
    await world.end()


async def test_users_without_a_project_wait_for_their_own_organisation_only() -> None:
    world = World(QueueConfig(max_requests=200, timeout_s=1e6))
    for _ in range(50):
        for _ in range(20):
            world.take(Principal(organisation="flood", user="ann"), 32)
        await world.step()
    assert world.refused["flood"] > 500
    before = world.tick
    for _ in range(8):
        world.take(Principal(organisation="late", user="bob"), 32)
    while world.waiting["late"]:
        await world.step()
    assert world.refused["late"] == 0
    assert world.tick - before <= 2 * 32
    await world.end()


async def test_a_short_share_of_time_is_fair_too_however_long_answers_are() -> None:
    world = World()
    await flooded(world, 200)
    shares = []
    for _ in range(10):
        world.served.clear()
        await flooded(world, 200)
        shares.append(jain([world.served[project] for project in LENGTHS]))
    assert min(shares) >= 0.9
    await world.end()


async def test_nobody_starves_below_a_flood_of_higher_tiers() -> None:
    world = World()
    lengths = cycle((16, 32, 64))
    for _ in range(3000):
        for tier, project in enumerate(("premium", "standard", "free")):
            for _ in range(80 - world.waiting[project]):
                world.ask(project, next(lengths), tier)
        await world.step()
    assert world.served["premium"] > world.served["standard"] + world.served["free"]
    assert world.served["standard"] >= 0.04 * sum(world.served.values())
    assert world.served["free"] >= 0.03 * sum(world.served.values())
    assert max(world.waits["free"]) <= 45 * TICKS_PER_S
    await world.end()


async def test_a_tenant_that_comes_after_a_flood_gets_in_and_is_served_soon() -> None:
    world = World(QueueConfig(max_requests=200, timeout_s=1e6))
    for _ in range(50):
        for _ in range(20):
            world.ask("flood", 32)
        await world.step()
    assert world.refused["flood"] > 500
    before = world.tick
    for _ in range(8):
        world.ask("late", 32)
    while world.waiting["late"]:
        await world.step()
    assert world.refused["late"] == 0
    assert world.tick - before <= 2 * 32
    await world.end()


@pytest.mark.parametrize("tokens", [1, 64])
async def test_what_was_expected_wrongly_evens_out(tokens: int) -> None:
    world = World()
    for _ in range(1200):
        for project, length in (("wrong", tokens), ("right", 32)):
            for _ in range(40 - world.waiting[project]):
                world.ask(project, length)
        await world.step()
    assert jain([world.served["wrong"], world.served["right"]]) >= 0.97
    await world.end()


async def test_cached_tokens_of_prompts_count_nothing_and_those_of_answers_twice() -> None:
    world = World()
    kinds = {"cached": (400, 390, 32), "computed": (400, 0, 32), "long": (10, 0, 64)}
    for ticks in (400, 4000):
        world.ended.clear()
        world.served.clear()
        for _ in range(ticks):
            for project, (prompt, cached, tokens) in kinds.items():
                for _ in range(40 - world.waiting[project]):
                    world.ask(project, tokens, prompt=prompt, cached=cached)
            await world.step()
    assert jain([world.served[project] for project in kinds]) >= 0.97
    cost = {"cached": 10 + 2 * 32, "computed": 400 + 2 * 32, "long": 10 + 2 * 64}
    shares = [world.ended[project] * cost[project] for project in kinds]
    assert max(shares) <= 1.15 * min(shares)
    await world.end()


async def test_a_prompt_of_which_nothing_came_stays_paid_and_what_of_the_answer_did_not_come_does_not() -> (
    None
):
    world = World()
    order: list[str] = []

    async def run(project: str, *, leaves: bool) -> None:
        context = request(Principal(project=project), prompt=300, most=64)
        replica = await world.queue.acquire_replica(context)
        order.append(project)
        if not leaves:
            world.queue.charge_tenant(context, weighted_tokens(300, 64))
        replica.on_request_ended(AttemptOutcome.SUCCESS, 0.0)
        world.queue.release(context)

    seats = [request(Principal(project="other")) for _ in range(SEATS)]
    taken = [await world.queue.acquire_replica(context) for context in seats]
    waiting = [
        asyncio.create_task(run(project, leaves=project == "leaves"))
        for _ in range(40)
        for project in ("leaves", "stays")
    ]
    await asyncio.sleep(0)
    taken[0].on_request_ended(AttemptOutcome.SUCCESS, 0.0)
    await asyncio.gather(*waiting)
    first = Counter(order[:40])
    assert first["leaves"] / first["stays"] == pytest.approx((300 + 128) / 300, rel=0.2)
