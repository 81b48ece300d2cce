"""Fair scheduling while one tenant floods, simulated with the real queue and one replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast

import pytest
from tests.support.limit_harness import make_context

from argosy.gateway import GatewayConfig, ModelConfig, QueueConfig, ReplicaConfig
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.principal import Principal
from argosy.gateway.proxy.dispatcher import Dispatcher
from argosy.gateway.request_context import RequestContext
from argosy.policy import AttemptOutcome, weighted_tokens
from argosy.protocol import ApiError

SLOTS = 32
PROMPT = 10
TICKS_PER_S = 50


@dataclass
class RunningRequest:
    """A request that occupies a slot."""

    context: RequestContext
    replica: ReplicaEndpoint
    tokens_left: int
    """Output tokens that are still to come."""
    uncached_tokens: int
    """Uncached tokens of the prompt, until the first output token."""


@dataclass
class Simulation:
    """A queue before one replica, with a clock that each `step` advances."""

    config: QueueConfig = field(default_factory=lambda: QueueConfig(timeout_s=1e6))
    tick: int = 0
    running: list[RunningRequest] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    """Weighted tokens by project, including prompts."""
    completed: Counter[str] = field(default_factory=Counter)
    """Responses by project."""
    wait_ticks: dict[str, list[int]] = field(default_factory=dict)
    """Ticks until a slot was free, by project."""

    def __post_init__(self) -> None:
        replica_configs = [
            ReplicaConfig(url="http://127.0.0.1:9", kind="openai", max_requests=SLOTS)
        ]
        config = GatewayConfig(models=[ModelConfig(name="big", replicas=replica_configs)])
        models = build_model_router(build_model_entries(config))
        self.pool = models.pools[0]
        self.queue = Dispatcher(self.pool, self.config, lambda: self.tick / TICKS_PER_S)

    def submit(
        self, project: str, tokens: int, tier: int = 1, *, prompt: int = PROMPT, cached: int = 0
    ) -> None:
        """Submit a request for a response of `tokens` tokens, whatever its `max_tokens`."""
        self.submit_for(Principal(project=project, tier=tier), tokens, prompt=prompt, cached=cached)

    def submit_for(
        self, principal: Principal, tokens: int, *, prompt: int = PROMPT, cached: int = 0
    ) -> None:
        """Submit a request of this principal."""
        context = make_context(principal, prompt_tokens=prompt, max_tokens=64)
        self.waiting[principal.project or principal.organisation] += 1
        self.tasks.add(asyncio.create_task(self._acquire(context, tokens, prompt - cached)))

    async def _acquire(self, context: RequestContext, tokens: int, uncached_tokens: int) -> None:
        principal, submitted = context.principal, self.tick
        project = principal.project or principal.organisation
        try:
            replica = await self.queue.acquire_replica(context)
        except ApiError:
            self.rejected[project] += 1
            return
        finally:
            self.waiting[project] -= 1
            self.tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        self.wait_ticks.setdefault(project, []).append(self.tick - submitted)
        self.running.append(RunningRequest(context, replica, tokens, uncached_tokens))

    async def step(self) -> None:
        """Give each running request a token, then dispatch."""
        self.tick += 1
        now = self.tick / TICKS_PER_S
        for request in list(self.running):
            request.tokens_left -= 1
            project = request.context.principal.project
            cost, request.uncached_tokens = weighted_tokens(request.uncached_tokens, 1), 0
            self.served[project] += round(cost)
            self.queue.charge_tenant(request.context, cost)
            if request.tokens_left == 0:
                self.completed[project] += 1
                self.running.remove(request)
                request.replica.on_request_ended(AttemptOutcome.SUCCESS, now)
                self.queue.release(request.context)
        for _ in range(4):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Cancel all waiting requests."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def jain(shares: list[int]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


LENGTHS = {"short": 16, "middle": 32, "long": 64, "flood": 32}


async def run_flood(
    simulation: Simulation, ticks: int, premium_each: int | None = None
) -> list[int]:
    """Keep 40 requests of each project waiting and 400 of the flood. Returns the running requests per tick."""
    running_counts = []
    for _ in range(ticks):
        for project, tokens in LENGTHS.items():
            for _ in range(40 * (10 if project == "flood" else 1) - simulation.waiting[project]):
                simulation.submit(project, tokens)
        if premium_each is not None and simulation.tick % premium_each == 0:
            simulation.submit("premium", 16, tier=0)
        await simulation.step()
        running_counts.append(len(simulation.running))
    return running_counts


async def test_flooding_tenant_gets_its_share_and_all_slots_are_used() -> None:
    simulation = Simulation()
    await run_flood(simulation, 200)
    simulation.served.clear()
    running_counts = await run_flood(simulation, 1500)
    assert jain([simulation.served[project] for project in LENGTHS]) >= 0.98
    assert set(running_counts) == {SLOTS}
    others = [
        wait for project in ("short", "middle", "long") for wait in simulation.wait_ticks[project]
    ]
    assert max(others) <= max(simulation.wait_ticks["flood"]) / 3
    await simulation.end()


async def test_premium_requests_start_at_once_and_reserve_few_slots() -> None:
    simulation = Simulation()
    await run_flood(simulation, 200, premium_each=8)
    simulation.wait_ticks.clear()
    simulation.served.clear()
    running_counts = await run_flood(simulation, 1500, premium_each=8)
    assert max(simulation.wait_ticks["premium"]) == 0
    assert len(simulation.wait_ticks["premium"]) >= 180
    assert min(running_counts) >= SLOTS - SLOTS // 8
    assert jain([simulation.served[project] for project in LENGTHS]) >= 0.97
    await simulation.end()


async def test_shares_are_fair_within_seconds() -> None:
    simulation = Simulation()
    await run_flood(simulation, 200)
    shares = []
    for _ in range(10):
        simulation.served.clear()
        await run_flood(simulation, 200)
        shares.append(jain([simulation.served[project] for project in LENGTHS]))
    assert min(shares) >= 0.9
    await simulation.end()


async def test_lower_tiers_are_served_during_flood_of_higher_tiers() -> None:
    simulation = Simulation()
    lengths = cycle((16, 32, 64))
    for _ in range(3000):
        for tier, project in enumerate(("premium", "standard", "free")):
            for _ in range(80 - simulation.waiting[project]):
                simulation.submit(project, next(lengths), tier)
        await simulation.step()
    assert simulation.served["premium"] > simulation.served["standard"] + simulation.served["free"]
    assert simulation.served["standard"] >= 0.04 * sum(simulation.served.values())
    assert simulation.served["free"] >= 0.03 * sum(simulation.served.values())
    assert max(simulation.wait_ticks["free"]) <= 45 * TICKS_PER_S
    await simulation.end()


@pytest.mark.parametrize(
    "make_principal",
    [
        lambda tenant: Principal(project=tenant, tier=1),
        lambda tenant: Principal(organisation=tenant, user=f"{tenant}-user"),
    ],
    ids=["project", "user-without-project"],
)
async def test_new_tenant_is_admitted_and_served_soon_after_flood(
    make_principal: Callable[[str], Principal],
) -> None:
    simulation = Simulation(QueueConfig(max_requests=200, timeout_s=1e6))
    for _ in range(50):
        for _ in range(20):
            simulation.submit_for(make_principal("flood"), 32)
        await simulation.step()
    assert simulation.rejected["flood"] > 500
    before = simulation.tick
    for _ in range(8):
        simulation.submit_for(make_principal("late"), 32)
    while simulation.waiting["late"]:
        await simulation.step()
    assert simulation.rejected["late"] == 0
    assert simulation.tick - before <= 2 * 32
    await simulation.end()


@pytest.mark.parametrize("tokens", [1, 64])
async def test_wrong_length_estimate_does_not_change_share(tokens: int) -> None:
    simulation = Simulation()
    for _ in range(1200):
        for project, length in (("wrong", tokens), ("right", 32)):
            for _ in range(40 - simulation.waiting[project]):
                simulation.submit(project, length)
        await simulation.step()
    assert jain([simulation.served["wrong"], simulation.served["right"]]) >= 0.97
    await simulation.end()


async def test_cached_prompt_tokens_are_free_and_output_counts_double() -> None:
    simulation = Simulation()
    kinds = {"cached": (400, 390, 32), "computed": (400, 0, 32), "long": (10, 0, 64)}
    for ticks in (400, 4000):
        simulation.completed.clear()
        simulation.served.clear()
        for _ in range(ticks):
            for project, (prompt, cached, tokens) in kinds.items():
                for _ in range(40 - simulation.waiting[project]):
                    simulation.submit(project, tokens, prompt=prompt, cached=cached)
            await simulation.step()
    assert jain([simulation.served[project] for project in kinds]) >= 0.97
    cost = {"cached": 10 + 2 * 32, "computed": 400 + 2 * 32, "long": 10 + 2 * 64}
    shares = [simulation.completed[project] * cost[project] for project in kinds]
    assert max(shares) <= 1.15 * min(shares)
    await simulation.end()


async def test_undelivered_output_is_refunded_and_prompt_is_not() -> None:
    simulation = Simulation()
    order: list[str] = []

    async def run(project: str, *, leaves: bool) -> None:
        context = make_context(Principal(project=project), prompt_tokens=300, max_tokens=64)
        replica = await simulation.queue.acquire_replica(context)
        order.append(project)
        if not leaves:
            simulation.queue.charge_tenant(context, weighted_tokens(300, 64))
        replica.on_request_ended(AttemptOutcome.SUCCESS, 0.0)
        simulation.queue.release(context)

    seats = [make_context(Principal(project="other")) for _ in range(SLOTS)]
    taken = [await simulation.queue.acquire_replica(context) for context in seats]
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
