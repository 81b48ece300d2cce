"""A fleet under a virtual clock: a simulated cluster, gateways, and a controller that observes, reconciles and acts.

Observation and actions are those of real controllers. After each action the fleet checks by what really serves, and not
by what a controller believes, that it was permitted.

Never compared with a real fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import msgspec

from argosy.deployment import FleetRecords, LaunchResources
from argosy.fleet.control import fleet_observer, replica_actions
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.replica_actions import ReplicaActions
from argosy.fleet.control.replica_monitor import CheckPaths, ReplicaHealthReading
from argosy.fleet.control.term_journal import TermJournal
from argosy.fleet.launchers import LaunchedReplica, LaunchError, LaunchSpec, LaunchState
from argosy.policy.reconciliation import (
    Action,
    Admit,
    DesiredFleet,
    DesiredPool,
    Drain,
    ObservedFleet,
    Reconciliation,
    Remove,
    ReplicaPhase,
    Start,
    Stop,
    WarmUpState,
    Withdraw,
    continue_observation,
    reconcile,
    replica_name,
)
from tests.support.fake_clock import FakeClock
from tests.support.simulated_cluster import (
    NODES,
    SimulatedBehaviour,
    SimulatedCluster,
    SimulatedLauncher,
    SimulatedMonitor,
)

LAUNCHER = "simulated"
OBSERVATION_INTERVAL_S = 2.0
WARM_UP_S = 1.5


@dataclass
class VirtualGateway:
    """A gateway that takes in the published rotation some time later, and keeps it while it is cut off."""

    lag_s: float
    routed: frozenset[str] = frozenset()
    is_reachable: bool = True
    syncs_at: float = math.inf


class VirtualFleet:
    """The environment of a controller, with its records."""

    def __init__(
        self,
        pools: list[DesiredPool],
        seed: int = 0,
        gateways: int = 2,
        accelerators: float = math.inf,
        cores: int | None = None,
    ) -> None:
        random = Random(seed)
        self.cores = {} if cores is None else {LAUNCHER: cores}
        self.clock = FakeClock(1000.0)
        self.cluster = SimulatedCluster(self.clock, seed, accelerators)
        self.records = FleetRecords()
        self.warm_ups: list[float] = []
        """Times at which warm-ups end."""
        self.gateways = [VirtualGateway(random.uniform(0.0, 3.0)) for _ in range(gateways)]
        self.pools: dict[str, DesiredPool] = {}
        self.candidates: dict[str, DesiredPool] = {}
        """Second versions of pools that are divided, by name of the pool."""
        self.max_sizes: Counter[str] = Counter()
        """Largest number of replicas that each pool was ever allowed to have."""
        self.broken: set[tuple[str, int]] = set()
        """Pools and generations that the launcher cannot start."""
        self.health_fails_since = math.inf
        """Time since which the controllers' health checks fail, although the replicas serve."""
        self.has_had_wrong_health = False
        self.num_actions: Counter[type[Action]] = Counter()
        for pool in pools:
            self.declare(pool)

    @property
    def now(self) -> float:
        return self.clock.now

    def declare(self, pool: DesiredPool, candidate: DesiredPool | None = None) -> None:
        self.pools[pool.name] = pool
        self.candidates.pop(pool.name, None)
        if candidate is not None:
            self.candidates[pool.name] = candidate
        versions = [pool] if candidate is None else [pool, candidate]
        size = sum(each.replicas + each.spares + each.max_surge for each in versions)
        self.max_sizes[pool.name] = max(self.max_sizes[pool.name], size)

    def remove(self, name: str) -> None:
        self.pools.pop(name, None)
        self.candidates.pop(name, None)

    @property
    def desired(self) -> tuple[DesiredPool, ...]:
        """Pools, with their second versions after them."""
        return (*self.pools.values(), *self.candidates.values())

    def find_version(self, pool: str, generation: int) -> DesiredPool | None:
        """Return the version that a replica belongs to. That of an outdated one is the first."""
        candidate = self.candidates.get(pool)
        if candidate is not None and candidate.generation == generation:
            return candidate
        return self.pools.get(pool)

    def launch_spec(self, pool: str, generation: int, ordinal: int) -> LaunchSpec:
        if (pool, generation) in self.broken:
            raise LaunchError("no such program")
        return LaunchSpec(
            name=replica_name(pool, generation, ordinal),
            pool=pool,
            generation=generation,
            ordinal=ordinal,
            command=("server",),
            resources=LaunchResources(accelerators=1),
        )

    async def warm_up(self, url: str, model: str) -> None:
        """Stand for the warm-up requests to a replica."""
        del url, model
        ends_at = self.now + WARM_UP_S
        self.warm_ups.append(ends_at)
        while self.now < ends_at:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0)

    @property
    def rotation(self) -> frozenset[str]:
        """Replicas that gateways shall route to."""
        return frozenset(name for name, each in self.records.replicas.items() if each.in_rotation)

    def set_health_signal(self, *, is_wrong: bool) -> None:
        """Let the health checks of all replicas fail from now on, or no longer."""
        self.health_fails_since = min(self.health_fails_since, self.now) if is_wrong else math.inf
        self.has_had_wrong_health |= is_wrong

    def serves(self, name: str) -> bool:
        """Return whether a replica really serves."""
        health = self.cluster.check_health(name)
        return health.is_serving and health.last_step_at == self.now

    def list_version(self, version: DesiredPool) -> list[LaunchedReplica]:
        """Return the replicas of a version, with those that it replaces."""
        return [
            each
            for each in self.cluster.list_replicas().values()
            if self.find_version(each.pool, each.generation) is version
        ]

    def available(self, version: DesiredPool) -> set[str]:
        """Return the replicas in the rotation that answer, and to which all reachable gateways route."""
        return {
            replica.name
            for replica in self.list_version(version)
            if replica.name in self.rotation
            and self.cluster.check_health(replica.name).is_serving
            and self.is_routed(replica.name)
        }

    def is_routed(self, name: str) -> bool:
        reachable = [each for each in self.gateways if each.is_reachable]
        if not self.gateways:
            return True
        return bool(reachable) and all(name in each.routed for each in reachable)

    def is_routed_by_any(self, name: str) -> bool:
        return any(each.is_reachable and name in each.routed for each in self.gateways)

    def use_own_urls(self, urls: dict[str, str]) -> None:
        """Ignore the addresses of gateways, which need none here."""

    def worst_view(self, name: str) -> None:
        """The gateways say nothing about replicas but whether they route to them."""

    def publish(self) -> None:
        """Let the gateways take in the rotation after their lags."""
        for gateway in self.gateways:
            gateway.syncs_at = min(gateway.syncs_at, self.now + gateway.lag_s)

    def advance(self, to: float) -> None:
        """Let the time pass for the cluster and the gateways."""
        self.clock.now = to
        for gateway in self.gateways:
            if gateway.is_reachable and gateway.syncs_at <= to:
                gateway.routed, gateway.syncs_at = self.rotation, math.inf

    def next_change_at(self) -> float:
        syncs = [each.syncs_at for each in self.gateways if each.is_reachable]
        warm_ups = [at for at in self.warm_ups if at > self.now]
        return min([self.cluster.next_change_at, *syncs, *warm_ups])

    def check_permitted(self, action: Action, *, is_suspended: bool) -> None:
        """Check an action before it is carried out, by what really exists.

        Args:
            action: The action.
            is_suspended: Whether its controller was suspended, so that it knows only what was before.
        """
        pool = self.find_version(action.pool, int(action.replica.rsplit("-", 2)[1]))
        match action:
            case Start():
                assert pool is not None
                existing = [
                    each for each in self.list_version(pool) if each.state is not LaunchState.EXITED
                ]
                size = pool.replicas + pool.spares + pool.max_surge
                is_new = action.replica not in self.cluster.list_replicas()
                assert len(existing) < (size if is_new else self.max_sizes[pool.name])
            case Withdraw() if pool is not None and not is_suspended:
                available = self.available(pool)
                if action.replica in available and self.serves(action.replica):
                    waits = any(
                        each.generation == pool.generation
                        and each.state is LaunchState.PROVISIONING
                        for each in self.cluster.list_replicas().values()
                    )
                    tolerance = pool.max_unavailable if waits or not pool.max_surge else 0
                    if self.has_had_wrong_health:
                        tolerance = max(1, pool.max_unavailable)
                    assert len(available) - 1 >= pool.replicas - tolerance
            case Drain() | Stop() | Remove():
                assert action.replica not in self.rotation
                if isinstance(action, Drain):
                    assert not self.is_routed_by_any(action.replica)
                elif isinstance(action, Stop) and not self.has_had_wrong_health:
                    has_served = self.records.replicas[action.replica].ready_at is not None
                    assert not (has_served and self.serves(action.replica))
            case Admit() if not is_suspended:
                assert self.cluster.check_health(action.replica).is_serving


class VirtualMonitor(SimulatedMonitor):
    """Health checks, which fail or stand still with their controller."""

    def __init__(self, fleet: VirtualFleet) -> None:
        super().__init__(fleet.cluster)
        self._fleet = fleet
        self._readings: dict[tuple[str, int], ReplicaHealthReading] = {}
        """Latest readings by replica and attempt."""
        self.is_suspended = False
        """Whether the controller was suspended before its last observation, and has not checked since."""

    def reading(self, replica: LaunchedReplica) -> ReplicaHealthReading:
        key, since = (replica.name, replica.attempt), self._fleet.health_fails_since
        if not self.is_suspended:
            self._readings[key] = super().reading(replica)
        health = self._readings.setdefault(key, ReplicaHealthReading(attempt=replica.attempt))
        if self._fleet.now < since:
            return health
        responded_at = min(health.last_response_at or math.inf, since)
        return msgspec.structs.replace(
            health,
            is_serving=False,
            last_response_at=None if responded_at < replica.started_at else responded_at,
        )


class VirtualController:
    """A controller that leads."""

    def __init__(self, fleet: VirtualFleet, epoch: int) -> None:
        self.fleet = fleet
        self.epoch = epoch
        self.monitor = VirtualMonitor(fleet)
        for name, record in fleet.records.replicas.items():
            if record.warm_up is WarmUpState.RUNNING:
                fleet.records.replicas[name] = msgspec.structs.replace(
                    record, warm_up=WarmUpState.NOT_STARTED
                )
        context: Any = SimpleNamespace(fleet="virtual", store=None, clock=fleet.clock)
        journal = TermJournal(
            context, cast("Any", SimpleNamespace(lease=SimpleNamespace(epoch=epoch)))
        )
        journal.records = fleet.records
        journal.save = AsyncMock()  # type: ignore[method-assign] # the records outlive the controller
        with patch.object(fleet_observer, "ReplicaMonitor", lambda *_: self.monitor):
            self.observer = FleetObserver(
                journal, cast("Any", fleet), lambda _: SimulatedLauncher(fleet.cluster)
            )
        self.actions = ReplicaActions(journal, self.observer, AsyncMock())
        self._declared: Any = SimpleNamespace(
            number=1,
            launchers=[LAUNCHER],
            check_paths=lambda *_: CheckPaths(),
            source=lambda _: "",
            model_name=str,
            launch_spec=fleet.launch_spec,
        )
        self._observed_at = self._observing_since = fleet.now

    async def close(self) -> None:
        await self.actions.close()
        await self.observer.close()

    async def observe(self) -> ObservedFleet:
        now = self.fleet.now
        await asyncio.sleep(0)  # warm-ups end
        unavailable = await self.observer.list_replicas(self._declared, self.epoch)
        self._observing_since = continue_observation(
            self._observing_since, self._observed_at, now, OBSERVATION_INTERVAL_S * 1.5
        )
        self.monitor.is_suspended = now - self._observed_at > OBSERVATION_INTERVAL_S * 1.5
        self._observed_at = now
        return ObservedFleet(
            replicas=tuple(self.observer.observe(self._declared, now)),
            observing_since=self._observing_since,
            unavailable_launchers=unavailable,
        )

    async def decide(self) -> Reconciliation:
        """Reconcile twice with one observation, which must give the same result."""
        desired = DesiredFleet(pools=self.fleet.desired, cores=self.fleet.cores)
        observed = await self.observe()
        result = reconcile(desired, observed, self.fleet.now)
        assert reconcile(desired, observed, self.fleet.now) == result
        if observed.unavailable_launchers:
            assert not result.actions
        return result

    async def carry_out(self, action: Action) -> None:
        self.actions.start([action], self._declared, frozenset())
        await asyncio.sleep(0)
        while self.actions.busy_pools:  # noqa: ASYNC110 - of the same loop
            await asyncio.sleep(0)
        if isinstance(action, Admit | Withdraw):
            self.fleet.publish()
        self.fleet.num_actions[type(action)] += 1


class FleetSimulation(contextlib.AbstractContextManager["FleetSimulation"]):
    """A virtual fleet with one controller, whose actions are all checked."""

    def __init__(self, pools: list[DesiredPool], *world: Any, **settings: Any) -> None:  # noqa: ANN401 - of the fleet
        self.fleet = VirtualFleet(pools, *world, **settings)
        self._runner = asyncio.Runner()
        self._warm_ups = patch.object(replica_actions, "warm_up_replica", self.fleet.warm_up)
        self._warm_ups.start()
        self.controller = VirtualController(self.fleet, 1)
        self.reconcile()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.controller.close())
        self._runner.close()
        self._warm_ups.stop()

    def take_over(self) -> None:
        """Replace the controller by a new one, which knows only what the records and the launcher keep."""
        self._runner.run(self.controller.close())
        self.controller = VirtualController(self.fleet, self.controller.epoch + 1)

    def reconcile(self) -> None:
        """Reconcile once."""
        self._runner.run(self._reconcile())

    async def _reconcile(self) -> None:
        """Reconcile once, carry out all actions, and check that none of them is repeated."""
        result = await self.controller.decide()
        for action in result.actions:
            self.fleet.check_permitted(action, is_suspended=self.controller.monitor.is_suspended)
            await self.controller.carry_out(action)
        repeated = {*(await self.controller.decide()).actions} & {*result.actions}
        assert not {each for each in repeated if not isinstance(each, Start)}
        self.last = result

    def run(self, seconds: float) -> None:
        """Let time pass, and reconcile at each change."""
        self._runner.run(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        fleet, end = self.fleet, self.fleet.now + seconds
        while fleet.now < end:
            wake_at = self.last.wake_at
            soonest = min(fleet.next_change_at(), math.inf if wake_at is None else wake_at)
            next_at = max(soonest, fleet.now + 0.01)
            fleet.advance(min(next_at, fleet.now + OBSERVATION_INTERVAL_S, end))
            await self._reconcile()

    def settle(self, timeout_s: float = 1500.0) -> None:
        """End all disturbances, and check that the fleet becomes what is declared, and stays so."""
        fleet = self.fleet
        fleet.cluster.behaviour = SimulatedBehaviour()
        fleet.cluster.unreachable_reason = ""
        fleet.health_fails_since = math.inf
        fleet.broken.clear()
        for node in NODES:
            fleet.cluster.restore_node(node)
        for gateway in fleet.gateways:
            gateway.is_reachable = True
            gateway.syncs_at = fleet.now + gateway.lag_s
        deadline, actions = fleet.now + timeout_s, None
        while actions != fleet.num_actions:  # replicas that started before may still fail
            while not self.is_settled():
                assert fleet.now < deadline, self.last
                self.run(5.0)
            actions = fleet.num_actions.copy()
            self.run(20.0)

    def is_settled(self) -> bool:
        """Return whether the fleet is exactly as declared."""
        fleet, listed = self.fleet, Counter[tuple[str, int]]()
        for replica in fleet.cluster.list_replicas().values():
            listed[replica.pool, replica.generation] += 1
        wanted = Counter[tuple[str, int]]()
        for pool in fleet.desired:
            wanted[pool.name, pool.generation] = pool.replicas + pool.spares
        return (
            not self.last.actions
            and listed == wanted
            and all(len(fleet.available(pool)) == pool.replicas for pool in fleet.desired)
            and all(map(fleet.serves, fleet.rotation))
            and len(fleet.rotation) == sum(pool.replicas for pool in fleet.desired)
            and all(each.phase is ReplicaPhase.READY for each in self.last.phases.values())
        )
