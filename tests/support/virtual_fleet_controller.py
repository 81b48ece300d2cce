"""A fleet under a virtual clock: a simulated cluster, gateways, a store, and controllers that reconcile.

After each action the fleet checks by what really serves, and not by what a controller believes, that it was permitted.

Never compared with a real fleet.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, cast

import msgspec

from argosy.deployment import LaunchResources
from argosy.fleet.control.replica_monitor import ReplicaHealthReading
from argosy.fleet.launchers import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    LaunchState,
    StaleEpochError,
)
from argosy.policy.reconciliation import (
    MAX_PAST_RUNS,
    Action,
    Admit,
    DesiredFleet,
    DesiredPool,
    Drain,
    ObservedFleet,
    ObservedReplica,
    Reconciliation,
    Remove,
    ReplicaPhase,
    ReplicaRun,
    Start,
    Stop,
    Warm,
    WarmUpState,
    Withdraw,
    continue_observation,
    reconcile,
)
from tests.support.fake_clock import FakeClock
from tests.support.simulated_cluster import (
    NODES,
    SimulatedBehaviour,
    SimulatedCluster,
    SimulatedLauncher,
)

LAUNCHER = "simulated"
OBSERVATION_INTERVAL_S = 2.0
WARM_UP_S = 1.5

_Result = TypeVar("_Result")


def run_now(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast("_Result", stop.value)
    raise AssertionError("the coroutine waits")


@dataclass
class VirtualGateway:
    """A gateway that takes in the published rotation some time later, and keeps it while it is cut off."""

    lag_s: float
    routed: frozenset[str] = frozenset()
    is_reachable: bool = True
    syncs_at: float = math.inf


@dataclass
class VirtualStore:
    """Durable state that outlives a controller. Refuses writes of controllers with an outdated epoch."""

    epoch: int = 0
    rotation: frozenset[str] = frozenset()
    ready_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """Times by replica and attempt."""
    warm_ups: dict[tuple[str, int], float] = field(default_factory=dict)
    """Time at which each warm-up ends, by replica and attempt."""
    past_runs: defaultdict[str, list[ReplicaRun]] = field(
        default_factory=lambda: defaultdict[str, list[ReplicaRun]](list)
    )

    def check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError


class VirtualFleet:
    """The environment of the controllers."""

    def __init__(
        self,
        pools: list[DesiredPool],
        seed: int = 0,
        gateways: int = 2,
        accelerators: float = math.inf,
    ) -> None:
        self.random = Random(seed)
        self.clock = FakeClock(1000.0)
        self.cluster = SimulatedCluster(self.clock, seed, accelerators)
        self.store = VirtualStore()
        self.gateways = [VirtualGateway(self.random.uniform(0.0, 3.0)) for _ in range(gateways)]
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
        self.removals: Counter[str] = Counter()
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

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return a version of each replica, which changes with each start and each removal."""
        listed = self.cluster.list_replicas()
        names = listed.keys() | self.removals.keys()
        return {
            name: (self.removals[name], listed[name].attempt if name in listed else 0)
            for name in names
        }

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
            if replica.name in self.store.rotation
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

    def publish(self, rotation: frozenset[str], epoch: int) -> None:
        self.store.check_epoch(epoch)
        self.store.rotation = rotation
        for gateway in self.gateways:
            gateway.syncs_at = min(gateway.syncs_at, self.now + gateway.lag_s)

    def advance(self, to: float) -> None:
        """Let the time pass for the cluster and the gateways."""
        self.clock.now = to
        for gateway in self.gateways:
            if gateway.is_reachable and gateway.syncs_at <= to:
                gateway.routed, gateway.syncs_at = self.store.rotation, math.inf

    def next_change_at(self) -> float:
        syncs = [each.syncs_at for each in self.gateways if each.is_reachable]
        warm_ups = [at for at in self.store.warm_ups.values() if at > self.now]
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
                assert action.replica not in self.store.rotation
                if isinstance(action, Drain):
                    assert not self.is_routed_by_any(action.replica)
                elif isinstance(action, Stop) and not self.has_had_wrong_health:
                    version = self.versions()[action.replica]
                    assert not (
                        self.serves(action.replica)
                        and (action.replica, version[1]) in self.store.ready_at
                    )
            case Admit() if not is_suspended:
                assert self.cluster.check_health(action.replica).is_serving


class VirtualController:
    """Observes, reconciles and carries out, with the epoch that it acquired."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self.fleet = fleet
        self.launcher = SimulatedLauncher(fleet.cluster)
        self.epoch = fleet.store.epoch = fleet.store.epoch + 1
        self._observed_at = fleet.now
        self._observing_since = fleet.now
        self._last_listing: dict[str, LaunchedReplica] = {}
        self._warming: set[tuple[str, int]] = set()
        """Warm-ups that this controller started."""
        self._readings: dict[tuple[str, int], ReplicaHealthReading] = {}
        """Results of health checks by replica and attempt."""
        self.is_suspended = False
        """Whether the controller was suspended before its last observation, and has not checked since."""
        self._versions: dict[str, tuple[int, int]] = {}
        """Versions of the replicas at the last observation."""

    def observe(self) -> ObservedFleet:
        fleet, now, unavailable = self.fleet, self.fleet.now, {}
        try:
            self._last_listing = dict(run_now(self.launcher.list_replicas()))
        except LaunchError as error:
            unavailable[LAUNCHER] = str(error)
        self._observing_since = continue_observation(
            self._observing_since, self._observed_at, now, OBSERVATION_INTERVAL_S * 1.5
        )
        self.is_suspended = now - self._observed_at > OBSERVATION_INTERVAL_S * 1.5
        self._observed_at = now
        self._versions = fleet.versions()
        unlisted = (fleet.store.rotation | fleet.store.past_runs.keys()) - self._last_listing.keys()
        return ObservedFleet(
            replicas=(
                *(self._observe_replica(each) for each in self._last_listing.values()),
                *(self._observe_unlisted(name) for name in sorted(unlisted)),
            ),
            observing_since=self._observing_since,
            unavailable_launchers=unavailable,
        )

    def _observe_unlisted(self, name: str) -> ObservedReplica:
        pool, generation, ordinal = name.rsplit("-", 2)
        store = self.fleet.store
        return ObservedReplica(
            name=name,
            pool=pool,
            generation=int(generation),
            ordinal=int(ordinal),
            launcher=LAUNCHER,
            in_rotation=name in store.rotation,
            is_routed=self.fleet.is_routed(name),
            is_routed_by_any=self.fleet.is_routed_by_any(name),
            past_runs=tuple(store.past_runs.get(name, ())),
        )

    def _observe_replica(self, replica: LaunchedReplica) -> ObservedReplica:
        fleet, store, key = self.fleet, self.fleet.store, (replica.name, replica.attempt)
        health = fleet.cluster.check_health(replica.name)
        if self.is_suspended:
            health = self._readings.get(key, ReplicaHealthReading(attempt=replica.attempt))
        self._readings[key] = health
        is_serving, responded_at = health.is_serving, health.last_response_at
        if fleet.health_fails_since <= fleet.now:
            is_serving = False
            responded_at = min(responded_at or math.inf, fleet.health_fails_since)
            if responded_at < replica.started_at:
                responded_at = None
        if is_serving:
            store.ready_at.setdefault(key, fleet.now)
        warm_up = WarmUpState.NOT_STARTED
        ends_at = store.warm_ups.get(key)
        if ends_at is not None and ends_at <= fleet.now:
            warm_up = WarmUpState.SUCCEEDED
        elif key in self._warming:
            warm_up = WarmUpState.RUNNING
        return msgspec.structs.replace(
            self._observe_unlisted(replica.name),
            state=replica.state,
            reason=replica.reason,
            attempt=replica.attempt,
            started_at=replica.started_at,
            exited_at=replica.exited_at,
            last_response_at=responded_at,
            last_step_at=health.last_step_at,
            is_serving=is_serving,
            ready_at=store.ready_at.get(key),
            warm_up=warm_up,
        )

    def decide(self) -> Reconciliation:
        """Reconcile twice with one observation, which must give the same result."""
        fleet = self.fleet
        desired = DesiredFleet(pools=fleet.desired)
        observed = self.observe()
        result = reconcile(desired, observed, fleet.now)
        assert reconcile(desired, observed, fleet.now) == result
        if observed.unavailable_launchers:
            assert not result.actions
        return result

    def carry_out(self, action: Action) -> None:
        """Carry out one action.

        Raises:
            StaleEpochError: Another controller leads.
        """
        fleet, store, name = self.fleet, self.fleet.store, action.replica
        before, version = fleet.cluster.list_replicas().get(name), fleet.versions().get(name)
        match action:
            case Start():
                self._start(action)
            case Warm():
                store.check_epoch(self.epoch)
                key = (name, self._versions[name][1])
                store.warm_ups[key] = fleet.now + WARM_UP_S
                self._warming.add(key)
            case Admit():
                fleet.publish(store.rotation | {name}, self.epoch)
            case Withdraw():
                fleet.publish(store.rotation - {name}, self.epoch)
            case Drain():
                run_now(self.launcher.drain(name, self.epoch))
            case Stop():
                run_now(self.launcher.stop(name, self.epoch))
            case Remove():
                run_now(self.launcher.remove(name, self.epoch))
                store.past_runs.pop(name, None)
        fleet.num_actions[type(action)] += 1
        if fleet.cluster.list_replicas().get(name) != before:
            assert self._versions.get(name, (0, 0)) == (version or (0, 0))
            fleet.removals[name] += isinstance(action, Remove)

    def _start(self, action: Start) -> None:
        fleet, store, name = self.fleet, self.fleet.store, action.replica
        store.check_epoch(self.epoch)
        runs = store.past_runs[name]
        run = action.ended_run
        if run is not None and run.attempt not in {each.attempt for each in runs}:
            runs.append(run)
        spec = LaunchSpec(
            name=name,
            pool=action.pool,
            generation=action.generation,
            ordinal=action.ordinal,
            command=("server",),
            resources=LaunchResources(accelerators=1),
        )
        if (action.pool, action.generation) in fleet.broken:
            attempt = max((each.attempt for each in runs), default=0) + 1
            failed = ReplicaRun(
                attempt=attempt, started_at=fleet.now, exited_at=fleet.now, reason="no such program"
            )
            runs.append(failed)
        else:
            run_now(self.launcher.start(spec, self.epoch))
        del runs[:-MAX_PAST_RUNS]
        if not runs:
            del store.past_runs[name]


class FleetSimulation:
    """A virtual fleet with one controller, whose actions are all checked."""

    def __init__(self, pools: list[DesiredPool], *world: Any, **settings: Any) -> None:  # noqa: ANN401 - of the fleet
        self.fleet = VirtualFleet(pools, *world, **settings)
        self.controller = VirtualController(self.fleet)
        self.last = self.reconcile()

    def take_over(self) -> None:
        """Replace the controller by a new one, which knows only what the store and the launcher keep."""
        self.controller = VirtualController(self.fleet)

    def reconcile(self) -> Reconciliation:
        """Reconcile once, carry out all actions, and check that none of them is repeated."""
        result = self.controller.decide()
        for action in result.actions:
            self.fleet.check_permitted(action, is_suspended=self.controller.is_suspended)
            self.controller.carry_out(action)
        repeated = set(self.controller.decide().actions) & set(result.actions)
        assert not {each for each in repeated if not isinstance(each, Start)}
        self.last = result
        return result

    def run(self, seconds: float) -> None:
        """Let time pass, and reconcile at each change."""
        fleet, end = self.fleet, self.fleet.now + seconds
        while fleet.now < end:
            wake_at = self.last.wake_at
            soonest = min(fleet.next_change_at(), math.inf if wake_at is None else wake_at)
            next_at = max(soonest, fleet.now + 0.01)
            fleet.advance(min(next_at, fleet.now + OBSERVATION_INTERVAL_S, end))
            self.reconcile()

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
            and all(map(fleet.serves, fleet.store.rotation))
            and len(fleet.store.rotation) == sum(pool.replicas for pool in fleet.desired)
            and all(each.phase is ReplicaPhase.READY for each in self.last.phases.values())
        )
