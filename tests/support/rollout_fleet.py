"""A fleet with a real controller and store, a simulated cluster under a virtual clock, and scripted gateways.

The virtual clock advances by two seconds, or by `round_s`, whenever the controller has reconciled.

Never compared with real gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import pytest

from argosy.deployment import (
    FleetConfig,
    append_command,
    pool_digests,
    read_rollout_documents,
    roll_back_route,
)
from argosy.fleet.control import (
    Controller,
    FleetContext,
    fleet_observer,
    gateway_publisher,
    leader_term,
    rollout_evidence,
)
from argosy.fleet.launchers import (
    LaunchedReplica,
    LaunchState,
)
from argosy.gateway import (
    DemandReport,
    FleetPools,
    ModelDemand,
    OutcomeQuery,
    OutcomeReport,
    PoolsStatus,
    PublishedVersions,
    RoutedReplica,
)
from argosy.policy import ReplicaStatus
from argosy.policy.reconciliation import ObservedFleet, Reconciliation
from argosy.policy.rollout import (
    EVENTS,
    CommandKind,
    EventCell,
    OutcomeBatch,
    PoolRollouts,
    RolloutCommand,
    RolloutRecord,
    RolloutState,
)
from argosy.policy.traffic import PoolRoute
from argosy.store import FleetRevision, GatewayRecord
from tests.support.controlled_fleet import FLEET, Fleet, build_fleet
from tests.support.fake_clock import FakeClock
from tests.support.simulated_cluster import (
    SimulatedBehaviour,
    SimulatedCluster,
    SimulatedLauncher,
    SimulatedMonitor,
)

POOL = "chat"
PLAN: dict[str, object] = {
    "steps": [0.25],
    "shadow": 0,
    "min_candidate_replicas": 1,
    "min_step_s": 10,
    "soak_s": 10,
    "max_step_s": 300,
    "prompts": [],
}
ROUND_S = 0.005
CONDITION_INTERVAL_S = 0.02


def declare(mode: str = "v1", *, replicas: int | None = 2, **pool: object) -> FleetConfig:
    """Return a fleet of one pool with rollouts. Another mode is another version."""
    settings: dict[str, object] = {
        "name": POOL,
        "model": "chat",
        "engine": "scripted",
        "replicas": replicas,
        "warm_up": False,
        "environment": {"MODE": mode},
        "rollout": PLAN,
    }
    return build_fleet(["server", "{port}"], settings | pool)


@cache
def digest_of(mode: str) -> str:
    return pool_digests(declare(mode))[POOL]


@dataclass
class ScriptedGateways:
    """All gateways of the fleet, in place of the client that reaches them. They follow what is published at once."""

    clock: FakeClock
    pools: FleetPools = field(default_factory=lambda: FleetPools(fleet=FLEET))
    error_factor: float = 1.0
    """How many times as many errors the candidate has."""
    ejected_generation: int | None = None
    """Generation whose replicas they eject."""
    tokens_per_s: float = 0.0
    """Demand for the model."""
    has_metrics: bool = True
    """Whether they report demand and the outcomes of requests."""
    sequence: int = 0
    routes: dict[str, int] = field(default_factory=dict)
    """Largest version of each pool's route that was published."""

    def versions(self) -> PublishedVersions | None:
        return next(iter(self.pools.versions), None)

    async def publish(self, gateway: GatewayRecord, pools: FleetPools) -> PoolsStatus:
        self.pools = msgspec.json.decode(msgspec.json.encode(pools), type=FleetPools)
        return await self.read_status(gateway)

    async def read_status(self, gateway: GatewayRecord) -> PoolsStatus:
        del gateway
        replicas = [each for model in self.pools.models for each in model.replicas]
        for versions in self.pools.versions:
            replicas += [each for others in versions.replicas.values() for each in others]
            pool, version = versions.route.pool, versions.route.version
            self.routes[pool] = max(self.routes.get(pool, 0), version)
        return PoolsStatus(
            epoch=self.pools.epoch,
            version=self.pools.version,
            replicas=[
                RoutedReplica(
                    "chat",
                    each.name or "",
                    self._status(each.name or ""),
                    "its requests or probes failed: status 500",
                )
                for each in replicas
            ],
            routes=dict(self.routes),
            demand=self._demand() if self.has_metrics else None,
        )

    def _demand(self) -> DemandReport:
        seconds = [self.tokens_per_s] * 10
        demand = ModelDemand(model="chat", arrived=seconds, served=seconds)
        return DemandReport(second=math.floor(self.clock.now), models=[demand])

    def _status(self, replica: str) -> ReplicaStatus:
        is_ejected = replica.split("-")[-2] == str(self.ejected_generation)
        return ReplicaStatus.EJECTED if is_ejected else ReplicaStatus.READY

    async def read_outcomes(self, gateway: GatewayRecord, query: OutcomeQuery) -> OutcomeReport:
        versions = self.versions()
        comparison = None if versions is None else versions.comparison
        if comparison is None or query.wants_history or not self.has_metrics:
            return OutcomeReport(gateway=gateway.id)
        self.sequence += 1
        share = comparison.share
        cells = [
            EventCell(
                event=index,
                candidate_expected=1000.0 * share,
                stable_expected=1000.0 * (1.0 - share),
                candidate_events=round(200 * share * (1.0 if index else self.error_factor)),
                stable_events=round(200 * (1.0 - share)),
            )
            for index in range(len(EVENTS))
        ]
        batch = OutcomeBatch(
            rollout=comparison.rollout,
            step=comparison.step,
            gateway=gateway.id,
            sequence=self.sequence,
            ended_at=self.clock.now,
            cells=tuple(cells),
            candidate_requests=round(1000 * share),
            stable_requests=round(1000 * (1.0 - share)),
        )
        return OutcomeReport(gateway=gateway.id, batches=[batch])


class RolloutFleet(Fleet):
    """A fleet with its store, and one controller at a time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.clock = FakeClock(1_000_000.0)
        behaviour = SimulatedBehaviour(
            provisioning_s=(0.0, 0.0), loading_s=(4.0, 5.0), drain_s=(0.0, 1.0)
        )
        self.cluster = SimulatedCluster(self.clock, behaviour=behaviour)
        self.gateways = ScriptedGateways(self.clock)
        self.store.gateways.record_heartbeat(
            GatewayRecord(id="gateway", url="http://127.0.0.1:9", secret="x")
        )
        self._task: asyncio.Task[None] | None = None
        self._generations: dict[str, int] = {}
        """Generation of each version by its digest."""
        self.num_controllers = 0
        self.round_s = 2.0
        """Virtual seconds per round of the controller."""
        self.on_reconciled: Callable[[ObservedFleet], None] = lambda _: None
        monkeypatch.setattr(leader_term, "OBSERVATION_INTERVAL_S", ROUND_S)
        monkeypatch.setattr(leader_term, "MAX_OBSERVATION_GAP_S", 1e9)
        monkeypatch.setattr(gateway_publisher, "FIRST_POLL_INTERVAL_S", ROUND_S)
        monkeypatch.setattr(gateway_publisher, "POLL_INTERVAL_S", ROUND_S)
        monkeypatch.setattr(rollout_evidence, "POLL_INTERVAL_S", ROUND_S)
        monkeypatch.setattr(gateway_publisher, "GatewayPoolsClient", lambda: self.gateways)
        monkeypatch.setattr(
            fleet_observer, "ReplicaMonitor", lambda *_: SimulatedMonitor(self.cluster)
        )

    def apply(self, config: FleetConfig, renewed: Collection[str] = ()) -> FleetRevision:
        revision = super().apply(config, renewed)
        for generation in revision.generations.values():
            self._generations[generation.digest] = generation.generation
        return revision

    def lead(self) -> None:
        """Start a controller."""
        self.num_controllers += 1
        context = FleetContext(
            store=self.store,
            store_url=self.url,
            fleet=FLEET,
            create_launcher=lambda _: SimulatedLauncher(self.cluster),
            folder=self.folder,
            clock=self.clock,
            on_reconciled=self._on_reconciled,
        )
        controller = Controller(context, f"controller-{self.num_controllers}")
        self._task = asyncio.create_task(controller.run(until_empty=True))

    def _on_reconciled(self, observed: ObservedFleet, result: Reconciliation) -> None:
        del result
        self.on_reconciled(observed)
        self.clock.now += self.round_s

    async def stop_controller(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._task = None

    async def take_over(self) -> None:
        """Replace the controller by one that knows only what is stored."""
        await self.stop_controller()
        self.lead()

    async def close(self) -> None:
        await self.stop_controller()
        self.store.close()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition. Fails if the controller ends."""
        while not condition():
            assert self._task is not None
            if self._task.done():
                await self._task
                assert condition(), "the controller has ended"
            await asyncio.sleep(CONDITION_INTERVAL_S)

    async def wait(self, seconds: float) -> None:
        """Wait until virtual time has passed."""
        ends_at = self.clock.now + seconds
        await self.until(lambda: self.clock.now >= ends_at)

    async def until_states(self, *states: str) -> None:
        """Wait until these are the last recorded states."""
        await self.until(lambda: self.states()[-len(states) :] == [*states])

    async def until_state(self, state: RolloutState, mode: str = "v2") -> None:
        await self.until(
            lambda: (
                (record := self.rollouts.current) is not None
                and record.candidate == digest_of(mode)
                and record.state is state
            )
        )

    async def deploy(self, config: FleetConfig | None = None) -> None:
        """Deploy the first version, and wait until it serves."""
        self.apply(config or declare())
        self.lead()
        await self.until(lambda: self.ready("v1") == 2)

    async def start_rollout(self, state: RolloutState = RolloutState.STEP, **plan: object) -> None:
        """Deploy the first version, and roll the second one out until the rollout is in a state."""
        await self.deploy(declare(rollout=PLAN | plan))
        self.apply(declare("v2", rollout=PLAN | plan))
        await self.until_state(state)

    # --- state -----------------------------------------------------------------------------------

    @property
    def rollouts(self) -> PoolRollouts:
        documents = read_rollout_documents(self.store.fleets, FLEET).get(POOL)
        return PoolRollouts(pool=POOL) if documents is None else documents.rollouts

    @property
    def record(self) -> RolloutRecord:
        record = self.rollouts.current
        assert record is not None
        return record

    @property
    def route(self) -> PoolRoute:
        route = read_rollout_documents(self.store.fleets, FLEET)[POOL].route
        assert route is not None
        return route

    @property
    def follows_route(self) -> bool:
        """Whether the gateways follow the stored route."""
        return self.gateways.routes.get(POOL) == self.route.version

    def replicas(self, mode: str) -> list[LaunchedReplica]:
        """Return the replicas of a version that have not exited."""
        generation = self._generations.get(digest_of(mode))
        return [
            each
            for each in self.cluster.list_replicas().values()
            if (each.pool, each.generation) == (POOL, generation)
            and each.state is not LaunchState.EXITED
        ]

    def ready(self, mode: str) -> int:
        """Return the number of replicas of a version that serve and are published."""
        names = {each.name for model in self.gateways.pools.models for each in model.replicas}
        for versions in self.gateways.pools.versions:
            names |= {each.name for others in versions.replicas.values() for each in others}
        return sum(
            each.name in names and self.cluster.check_health(each.name).is_serving
            for each in self.replicas(mode)
        )

    def num_default_serving(self) -> int:
        """Return the number of published replicas of the stable version that serve."""
        replicas = [each for model in self.gateways.pools.models for each in model.replicas]
        return sum(self.cluster.check_health(each.name or "").is_serving for each in replicas)

    def states(self) -> list[str]:
        """Return the recorded states of rollouts, oldest first."""
        events = sorted(self.events("rollout_state"), key=lambda event: event.number)
        return [event.outcome for event in events]

    # --- interventions ---------------------------------------------------------------------------

    def command(self, kind: CommandKind, **fields: object) -> None:
        command = msgspec.structs.replace(RolloutCommand(kind=kind, by="ann"), **fields)
        append_command(self.store.fleets, FLEET, POOL, command)

    def abort(self) -> None:
        """Abort as `argosy rollout abort` does."""
        roll_back_route(self.store.fleets, FLEET, POOL, "abort by ann", self.clock.now)
        self.command(CommandKind.ABORT)

    def lose_document(self, name: str) -> None:
        stored = self.store.fleets.read_documents(FLEET)[name]
        assert self.store.fleets.replace_document(FLEET, name, None, after=stored.version)
