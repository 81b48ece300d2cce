"""Fair scheduling while one tenant floods, simulated with the real queue and one replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from tests.support.limit_harness import make_context
from tests.support.placed_requests import PlacedByHand, arrive, end_attempt, new_driver

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.principal import Principal
from argosy.policy import weighted_tokens
from argosy.policy.placement import PlacementLimits, QueueLimits

SLOTS = 32
PROMPT = 10
TICKS_PER_S = 50


@dataclass
class RunningRequest:
    """A request that occupies a slot."""

    placed: PlacedByHand
    tokens_left: int
    """Output tokens that are still to come."""
    uncached_tokens: int
    """Uncached tokens of the prompt, until the first output token."""


@dataclass
class Simulation:
    """A queue before one replica, with a clock that each `step` advances."""

    limits: QueueLimits = field(default_factory=lambda: QueueLimits(timeout_s=1e6))
    tick: int = 0
    running: list[RunningRequest] = field(default_factory=list)
    queue: list[tuple[RunningRequest, int]] = field(default_factory=list)
    """Waiting requests, with the ticks at which they were submitted."""
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
        self.driver = new_driver(lambda: self.tick / TICKS_PER_S, PlacementLimits(self.limits))

    def submit(
        self, sender: str | Principal, tokens: int, *, prompt: int = PROMPT, cached: int = 0
    ) -> None:
        """Submit a request of a project or a principal for `tokens` tokens, whatever its `max_tokens`."""
        principal = Principal(project=sender) if isinstance(sender, str) else sender
        context = make_context(principal, prompt_tokens=prompt, max_tokens=64)
        context.pool = self.pool
        placed = arrive(self.driver, context)
        project = principal.tenant
        if placed.refusal is not None:
            self.rejected[project] += 1
            self.driver.end(placed.request)
            return
        self.waiting[project] += 1
        self.queue.append((RunningRequest(placed, tokens, prompt - cached), self.tick))
        self.collect()

    def collect(self) -> None:
        """Collect the requests that have got a slot."""
        for request, submitted in self.queue:
            if request.placed.request.attempts:
                project = request.placed.context.principal.tenant
                self.waiting[project] -= 1
                self.wait_ticks.setdefault(project, []).append(self.tick - submitted)
                self.running.append(request)
        self.queue = [each for each in self.queue if not each[0].placed.request.attempts]

    def step(self) -> None:
        """Give each running request a token."""
        self.tick += 1
        for running in list(self.running):
            running.tokens_left -= 1
            request = running.placed.request
            project = running.placed.context.principal.project
            cost, running.uncached_tokens = weighted_tokens(running.uncached_tokens, 1), 0
            self.served[project] += round(cost)
            self.driver.record_progress(request, request.output_tokens + 1, cost)
            if running.tokens_left == 0:
                self.completed[project] += 1
                self.running.remove(running)
                end_attempt(self.driver, request)
                self.driver.end(request)
        self.collect()


def jain(shares: list[int]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


LENGTHS = {"short": 16, "middle": 32, "long": 64, "flood": 32}


def run_flood(simulation: Simulation, ticks: int, premium_each: int | None = None) -> list[int]:
    """Keep 40 requests of each project waiting and 400 of the flood. Returns the running requests per tick."""
    running_counts = []
    for _ in range(ticks):
        for project, tokens in LENGTHS.items():
            for _ in range(40 * (10 if project == "flood" else 1) - simulation.waiting[project]):
                simulation.submit(project, tokens)
        if premium_each is not None and simulation.tick % premium_each == 0:
            simulation.submit(Principal(project="premium", tier=0), 16)
        simulation.step()
        running_counts.append(len(simulation.running))
    return running_counts


async def test_flooding_tenant_gets_its_share_and_all_slots_are_used() -> None:
    """Within seconds, and closer over half a minute."""
    simulation = Simulation()
    run_flood(simulation, 200)
    total = Counter[str]()
    for _ in range(8):
        simulation.served.clear()
        assert set(run_flood(simulation, 200)) == {SLOTS}
        assert jain([simulation.served[project] for project in LENGTHS]) >= 0.9
        total += simulation.served
    assert jain([total[project] for project in LENGTHS]) >= 0.98
    others = [
        wait for project in ("short", "middle", "long") for wait in simulation.wait_ticks[project]
    ]
    assert max(others) <= max(simulation.wait_ticks["flood"]) / 3


async def test_premium_requests_start_at_once_and_reserve_few_slots() -> None:
    simulation = Simulation()
    run_flood(simulation, 200, premium_each=8)
    simulation.wait_ticks.clear()
    simulation.served.clear()
    running_counts = run_flood(simulation, 1500, premium_each=8)
    assert max(simulation.wait_ticks["premium"]) == 0
    assert len(simulation.wait_ticks["premium"]) >= 180
    assert min(running_counts) >= SLOTS - SLOTS // 8
    assert jain([simulation.served[project] for project in LENGTHS]) >= 0.97


async def test_lower_tiers_are_served_during_flood_of_higher_tiers() -> None:
    simulation = Simulation()
    lengths = cycle((16, 32, 64))
    for _ in range(3000):
        for tier, project in enumerate(("premium", "standard", "free")):
            for _ in range(80 - simulation.waiting[project]):
                simulation.submit(Principal(project=project, tier=tier), next(lengths))
        simulation.step()
    assert simulation.served["premium"] > simulation.served["standard"] + simulation.served["free"]
    assert simulation.served["standard"] >= 0.04 * sum(simulation.served.values())
    assert simulation.served["free"] >= 0.03 * sum(simulation.served.values())
    assert max(simulation.wait_ticks["free"]) <= 45 * TICKS_PER_S


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
    simulation = Simulation(QueueLimits(max_requests=200, timeout_s=1e6))
    for _ in range(50):
        for _ in range(20):
            simulation.submit(make_principal("flood"), 32)
        simulation.step()
    assert simulation.rejected["flood"] > 500
    before = simulation.tick
    for _ in range(8):
        simulation.submit(make_principal("late"), 32)
    while simulation.waiting["late"]:
        simulation.step()
    assert simulation.rejected["late"] == 0
    assert simulation.tick - before <= 2 * 32


@pytest.mark.parametrize("tokens", [1, 64])
async def test_wrong_length_estimate_does_not_change_share(tokens: int) -> None:
    simulation = Simulation()
    for _ in range(800):
        for project, length in (("wrong", tokens), ("right", 32)):
            for _ in range(40 - simulation.waiting[project]):
                simulation.submit(project, length)
        simulation.step()
    assert jain([simulation.served["wrong"], simulation.served["right"]]) >= 0.97


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
            simulation.step()
    assert jain([simulation.served[project] for project in kinds]) >= 0.97
    cost = {"cached": 10 + 2 * 32, "computed": 400 + 2 * 32, "long": 10 + 2 * 64}
    shares = [simulation.completed[project] * cost[project] for project in kinds]
    assert max(shares) <= 1.15 * min(shares)


async def test_undelivered_output_is_refunded_and_prompt_is_not() -> None:
    simulation = Simulation()
    driver = simulation.driver
    for _ in range(SLOTS):
        simulation.submit("other", 1)
    for _ in range(40):
        simulation.submit("leaves", 64, prompt=300)
        simulation.submit("stays", 64, prompt=300)
    first = Counter[str]()
    simulation.running[SLOTS - 1].tokens_left = 1
    del simulation.running[: SLOTS - 1]  # one slot becomes free
    simulation.step()
    for _ in range(40):
        (running,) = simulation.running
        request, project = running.placed.request, running.placed.context.principal.project
        first[project] += 1
        if project == "stays":
            driver.record_progress(request, 64, weighted_tokens(300, 64))
        end_attempt(driver, request)
        driver.end(request)
        simulation.running.clear()
        simulation.collect()
    assert first["leaves"] / first["stays"] == pytest.approx((300 + 128) / 300, rel=0.2)
