"""Placement of requests in a gateway's pools: slots, admission to the queue, turns of tiers, and shares of tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import msgspec
import pytest
from tests.support.limit_harness import make_context
from tests.support.placed_requests import PlacedByHand, arrive, end_attempt, new_driver

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.pool import ModelStartup, Pool, ReplicaEndpoint
from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import parse_request_fields
from argosy.policy import weighted_tokens
from argosy.policy.placement import (
    AttemptEnding,
    CapacityChanged,
    PlacementLimits,
    PlacementPool,
    QueueLimits,
    RefusalReason,
    Selection,
    Tick,
)


def make_pool(*replicas: ReplicaConfig) -> Pool:
    config = GatewayConfig(models=[ModelConfig(name="big", replicas=list(replicas))])
    return build_model_router(build_model_entries(config)).pools[0]


class GatewayWithoutReplicas:
    """The placement of a gateway with three replicas of two slots each, whose replicas answer when a test says so."""

    def __init__(self, pool: Pool | None = None, limits: QueueLimits | None = None) -> None:
        self.now = 0.0
        replicas = [
            ReplicaConfig(url=f"http://127.0.0.1:{port}", kind="openai", max_requests=2)
            for port in (7, 8, 9)
        ]
        self.pool = pool or make_pool(*replicas)
        self.driver = new_driver(lambda: self.now, PlacementLimits(limits or QueueLimits()))

    def send(
        self,
        sender: int | Principal = 1,
        project: str = "project",
        *,
        prompt_tokens: int = 10,
        max_tokens: int = 5,
        body: bytes | None = None,
        start_wait_s: float = 0.0,
    ) -> PlacedByHand:
        """Send a request of a principal, or of a project in a tier."""
        if isinstance(sender, int):
            sender = Principal(project=project, tier=sender)
        context = make_context(sender, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        context.pool, context.start_wait_s = self.pool, start_wait_s
        if body is not None:
            context.fields = parse_request_fields(body, "messages")
        placed = arrive(self.driver, context)
        if placed.refusal is not None:
            self.driver.end(placed.request)
        return placed

    def answer(self, placed: PlacedByHand) -> None:
        """Complete the response of a request."""
        end_attempt(self.driver, placed.request)
        self.driver.end(placed.request)

    def advance(self, now: float) -> None:
        """Let the time pass until `now`, with all timers."""
        while self.now < now:
            self.now = min(now, self.now + 1.0)
            self.driver.handle(Tick())

    @property
    def queued(self) -> int:
        return self.driver.queue_depths[self.pool]


@pytest.mark.parametrize(
    ("configured", "reported", "slots"),
    [(None, 0, 256), (None, 8, 8), (None, 512, 512), (2, 0, 2), (2, 8, 2), (9, 8, 8)],
)
def test_slots_follow_reported_capacity_up_to_configured_maximum(
    configured: int | None, reported: int, slots: int
) -> None:
    pool = make_pool(
        ReplicaConfig(url="http://127.0.0.1:7", kind="sglang", max_requests=configured)
    )
    (replica,) = pool.replicas.values()
    replica.load.max_seqs = reported
    assert replica.slots == slots


def test_configured_maximum_is_not_reduced_by_other_gateways() -> None:
    pool = make_pool(ReplicaConfig(url="http://127.0.0.1:7", kind="argosy", max_requests=4))
    (replica,) = pool.replicas.values()
    replica.load.max_seqs = 8
    replica.update_slot_shares([{1: 4}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [4, 4, 4]
    replica.update_slot_shares([{1: 6}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [4, 4, 2]
    replica.update_slot_shares([])
    assert replica.slot_share(1, 0.0) == 4


async def test_reserved_slots_do_not_end_wait_of_old_requests() -> None:
    pool = make_pool(ReplicaConfig(url="http://127.0.0.1:7", kind="argosy"))
    gateway = GatewayWithoutReplicas(pool)
    (replica,) = pool.replicas.values()
    replica.load.max_seqs = 4
    replica.update_slot_shares([{1: 3}])
    assert [replica.slot_share(tier, 0.0) for tier in range(3)] == [2, 2, 1]
    running = [gateway.send(0) for _ in range(2)]
    old = gateway.send(2)
    gateway.now = 40.0
    others = [gateway.send(0) for _ in range(8)]
    for placed in others:
        gateway.answer(running.pop(0))
        running.append(placed)
        assert replica.load.in_flight == 2
    replica.update_slot_shares([])
    gateway.driver.handle(CapacityChanged(pool))
    assert old.request.attempts


def reason_of(placed: PlacedByHand) -> RefusalReason | None:
    return None if placed.refusal is None else placed.refusal.reason


async def test_capacity_is_reserved_for_higher_tiers() -> None:
    """Depends on how long the tenant's own requests have waited, and on the queues of the replicas."""
    gateway = GatewayWithoutReplicas(limits=QueueLimits(timeout_s=60.0))
    for _ in range(6):
        gateway.send(0)
    assert reason_of(gateway.send(2, "free")) is None
    assert reason_of(gateway.send(1, "paid")) is None
    gateway.now = 29.0
    assert reason_of(gateway.send(2, "free")) is None
    gateway.now = 31.0
    reserved = RefusalReason.RESERVED_FOR_HIGHER_TIERS
    assert reason_of(gateway.send(2, "free")) is reserved
    assert reason_of(gateway.send(2, "another")) is None
    assert reason_of(gateway.send(1, "paid")) is None
    gateway.now = 46.0
    assert reason_of(gateway.send(1, "paid")) is reserved
    for replica in gateway.pool.replicas.values():
        replica.load.max_seqs, replica.load.waiting = 10, 9
        replica.load.demand_by_tenant["flood"] = 9, 900
    assert reason_of(gateway.send(1, "new")) is None
    for replica in gateway.pool.replicas.values():
        replica.load.demand_by_tenant |= {f"t{number}": (1, 100) for number in range(9)}
    assert reason_of(gateway.send(1, "new")) is reserved
    assert reason_of(gateway.send(0, "new")) is None


async def test_requests_wait_for_a_start_as_long_as_their_clients_and_then_for_a_slot() -> None:
    gateway = GatewayWithoutReplicas(make_pool(), QueueLimits(max_requests=8, timeout_s=60.0))
    pool = gateway.pool
    assert reason_of(gateway.send()) is RefusalReason.NO_REPLICA
    pool.set_startup(ModelStartup(state="stopped"), gateway.now)
    assert reason_of(gateway.send(start_wait_s=0.0)) is RefusalReason.STARTING
    short, *others = (gateway.send(start_wait_s=wait_s) for wait_s in (25.0, 600.0, 600.0))
    gateway.advance(24.0)
    assert short.refusal is None
    gateway.advance(26.0)
    assert reason_of(short) is RefusalReason.STARTING
    gateway.driver.end(short.request)
    gateway.advance(290.0)
    assert [reason_of(other) for other in others] == [None, None], "beyond the limit of the queue"
    assert reason_of(gateway.send(2, "new", start_wait_s=300.0)) is None, "age is no sign of load"
    while reason_of(gateway.send(start_wait_s=300.0)) is None:
        pass
    assert gateway.queued < 8, "tenants share the queue as at any time"

    pool.set_startup(None, gateway.now)
    replica = ReplicaConfig(url="http://127.0.0.1:7", kind="openai", max_requests=1)
    pool.replicas |= make_pool(replica).replicas
    gateway.driver.handle(CapacityChanged(pool))
    assert others[0].attempt is not None
    gateway.advance(349.0)
    assert reason_of(others[1]) is None
    gateway.advance(351.0)
    assert reason_of(others[1]) is RefusalReason.QUEUE_TIMEOUT


async def test_whole_body_counts_towards_queue_bytes() -> None:
    pool = make_pool(ReplicaConfig(url="http://127.0.0.1:7", kind="openai", max_requests=1))
    gateway = GatewayWithoutReplicas(pool, QueueLimits(max_bytes=50_000))
    gateway.send()
    body = {"model": "big", "messages": [], "metadata": {"of": "x" * 20_000}}
    encoded = msgspec.json.encode(body)
    waiting = [gateway.send(body=encoded) for _ in range(2)]
    assert gateway.queued == 2
    assert reason_of(gateway.send(body=encoded)) is RefusalReason.QUEUE_FULL
    for placed in waiting:
        gateway.driver.end(placed.request)
    assert gateway.queued == 0


@pytest.mark.parametrize("replicas", [1, 2])
async def test_failed_over_requests_are_not_all_reexamined_for_each(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed replica has slots again, but these requests need another one, all at the same moment."""
    count, selections, select_replica_original = 300, 0, PlacementPool.select_replica

    def count_selections(self: Pool, *args: object) -> Selection | None:
        nonlocal selections
        selections += 1
        return select_replica_original(self, *args)  # type: ignore[arg-type]

    configs = [
        ReplicaConfig(url=f"http://127.0.0.1:{port}", kind="openai", max_requests=count)
        for port in range(7, 7 + replicas)
    ]
    gateway = GatewayWithoutReplicas(make_pool(*configs))
    running = [gateway.send(project=f"p{number % 4}") for number in range(replicas * count)]
    failed: ReplicaEndpoint = gateway.pool.replicas[running[0].context.replica_name]
    failed_over = [each for each in running if each.context.replica_name == failed.name]
    monkeypatch.setattr(PlacementPool, "select_replica", count_selections)
    for placed in failed_over:
        end_attempt(gateway.driver, placed.request, AttemptEnding.LOST, None)
    assert selections <= 3 * count
    for (
        placed
    ) in running:  # each slot of the other replica goes to the request that has waited longest
        if placed not in failed_over:
            gateway.answer(placed)
    assert [bool(each.request.attempts) for each in failed_over] == [replicas > 1] * count
    for placed in failed_over:
        gateway.driver.end(placed.request)
    selections = 0
    gateway.driver.handle(CapacityChanged(gateway.pool))
    assert selections == 0


@pytest.mark.parametrize("tier", [1, 2])
async def test_lower_tier_gets_a_slot_within_a_short_queue_timeout(tier: int) -> None:
    """A slot becomes free every second, and a premium request always waits for it."""
    gateway = GatewayWithoutReplicas(limits=QueueLimits(timeout_s=10.0))
    requests = [gateway.send(0) for _ in range(12)]
    patient = gateway.send(tier, "patient")
    while not patient.request.attempts and gateway.now < 10.0:
        gateway.now += 1.0
        requests.append(gateway.send(0))
        running = next(each for each in requests if each.request.attempts)
        requests.remove(running)
        gateway.answer(running)
    assert gateway.now < 10.0


# --- fairness while one tenant floods -------------------------------------------------------------


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
        replica = ReplicaConfig(url="http://127.0.0.1:9", kind="openai", max_requests=SLOTS)
        self.gateway = GatewayWithoutReplicas(make_pool(replica), self.limits)
        self.driver = self.gateway.driver

    def submit(
        self, sender: str | Principal, tokens: int, *, prompt: int = PROMPT, cached: int = 0
    ) -> None:
        """Submit a request of a project or a principal for `tokens` tokens, whatever its `max_tokens`."""
        principal = Principal(project=sender) if isinstance(sender, str) else sender
        placed = self.gateway.send(principal, prompt_tokens=prompt, max_tokens=64)
        if placed.refusal is not None:
            self.rejected[principal.tenant] += 1
            return
        self.waiting[principal.tenant] += 1
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
        self.gateway.now = self.tick / TICKS_PER_S
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
                self.gateway.answer(running.placed)
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
        simulation.gateway.answer(running.placed)
        simulation.running.clear()
        simulation.collect()
    assert first["leaves"] / first["stays"] == pytest.approx((300 + 128) / 300, rel=0.2)
