"""Simulated machines and their launcher: replicas start, load, crash, hang and drain under a virtual clock.

Never compared with a real cluster: the contract of launchers needs processes. Each attempt to start a replica draws its
random times from the seed and its own name, so that they do not depend on the order of the calls.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from argosy.fleet.control.replica_monitor import CheckPaths, ReplicaHealthReading
from argosy.fleet.launchers import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    LaunchState,
    StaleEpochError,
)

NODES = ("node-0", "node-1")
_ALIVE = (LaunchState.RUNNING, LaunchState.DRAINING)


class SimulatedBehaviour(msgspec.Struct, frozen=True, kw_only=True):
    """Random behaviour of simulated replicas. Ranges are the shortest and the longest time in seconds."""

    provisioning_s: tuple[float, float] = (0.0, 2.0)
    loading_s: tuple[float, float] = (2.0, 10.0)
    slow_start_share: float = 0.0
    """Share of the starts that take ten times as long."""
    failed_start_share: float = 0.0
    """Share of the starts that exit while they load."""
    lifetime_s: float = math.inf
    """Mean time after which a replica that serves crashes or hangs."""
    hang_share: float = 0.0
    """Share of the failures that are hangs instead of crashes."""
    drain_s: tuple[float, float] = (0.0, 10.0)
    """Time that the running requests of a draining replica take."""


@dataclass(kw_only=True)
class _Replica:
    spec: LaunchSpec
    attempt: int
    started_at: float
    random: Random
    state: LaunchState = LaunchState.PROVISIONING
    reason: str = ""
    node: str = ""
    exited_at: float | None = None
    exit_status: int | None = None
    is_loaded: bool = False
    unresponsive_since: float = math.inf
    stepless_since: float = math.inf


class SimulatedCluster:
    """Two machines, which remember the replicas on them and the highest epoch of a controller.

    Args:
        clock: Returns the virtual time in seconds since the epoch.
        seed: Decides all random times.
        accelerators: GPUs of each machine.
        behaviour: Random behaviour of the attempts that start from now on.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        seed: int = 0,
        accelerators: float = math.inf,
        behaviour: SimulatedBehaviour | None = None,
    ) -> None:
        self._clock = clock
        self._seed = seed
        self._accelerators = accelerators
        self.behaviour = behaviour or SimulatedBehaviour()
        self.unreachable_reason = ""
        """Why the cluster cannot be reached; empty if it can."""
        self._lost_nodes: set[str] = set()
        self._epoch = 0
        self._replicas: dict[str, _Replica] = {}
        self._waiting: dict[str, None] = {}
        """Replicas that wait for a machine, in the order of their starts."""
        self._timers: list[tuple[float, int, str, int, Callable[[_Replica], None]]] = []
        """Heap of time, sequence number, name, attempt and what happens."""
        self._num_timers = 0
        self._now = -math.inf
        self.listeners: list[asyncio.Event] = []
        """Events to set at each change."""

    @property
    def next_change_at(self) -> float:
        """Time of the next change; infinite if there is none."""
        self._advance()
        return self._timers[0][0] if self._timers else math.inf

    def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        self._advance()
        return {
            name: LaunchedReplica(
                name=name,
                pool=replica.spec.pool,
                generation=replica.spec.generation,
                ordinal=replica.spec.ordinal,
                state=replica.state,
                reason=replica.reason,
                url=f"http://{name}.simulated" if replica.node else None,
                node=replica.node,
                attempt=replica.attempt,
                started_at=replica.started_at,
                exited_at=replica.exited_at,
                exit_status=replica.exit_status,
            )
            for name, replica in self._replicas.items()
        }

    def check_health(self, name: str) -> ReplicaHealthReading:
        """Return what a health check of the replica finds."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is None or replica.state not in _ALIVE:
            return ReplicaHealthReading(attempt=0 if replica is None else replica.attempt)
        return ReplicaHealthReading(
            attempt=replica.attempt,
            last_response_at=min(self._now, replica.unresponsive_since),
            last_step_at=min(self._now, replica.unresponsive_since, replica.stepless_since),
            is_serving=replica.is_loaded
            and replica.state is LaunchState.RUNNING
            and self._now < replica.unresponsive_since,
        )

    def check_epoch(self, epoch: int) -> None:
        """Remember the epoch of an action. Raises StaleEpochError if a controller with a higher one has acted."""
        if epoch < self._epoch:
            raise StaleEpochError(str(epoch))
        self._epoch = epoch

    def start(self, spec: LaunchSpec) -> None:
        """Start a replica unless it runs."""
        self._advance()
        last = self._replicas.get(spec.name)
        if last is not None and last.state is not LaunchState.EXITED:
            return
        attempt = 1 if last is None else last.attempt + 1
        random = Random(f"{self._seed} {spec.name} {attempt}")
        replica = _Replica(spec=spec, attempt=attempt, started_at=self._now, random=random)
        self._replicas[spec.name] = replica
        self._set_timer(replica, random.uniform(*self.behaviour.provisioning_s), self._provision)
        self._notify()

    def drain(self, name: str) -> None:
        """Let a running replica exit when its requests have ended, or at its drain deadline."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is None or replica.state in {LaunchState.EXITED, LaunchState.DRAINING}:
            return
        if replica.state is LaunchState.PROVISIONING:
            self._exit(replica, "it was drained before it ran", 0)
            return
        replica.state = LaunchState.DRAINING
        deadline_s = replica.spec.drain_deadline_s
        drain_s = replica.random.uniform(*self.behaviour.drain_s)
        is_killed = drain_s >= deadline_s or replica.unresponsive_since != math.inf
        end_s, status = (deadline_s, -9) if is_killed else (drain_s, 0)
        self._set_timer(replica, end_s, lambda each: self._exit(each, "it was drained", status))
        self._notify()

    def kill(self, name: str, reason: str) -> None:
        """Let a replica exit now, unless it has exited."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is not None and replica.state is not LaunchState.EXITED:
            self._exit(replica, reason, -9)

    def remove(self, name: str) -> None:
        """Forget a replica that has exited. Raises LaunchError if it has not."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is None:
            return
        if replica.state is not LaunchState.EXITED:
            raise LaunchError(f"Replica {name} has not exited; stop it first")
        del self._replicas[name]
        self._notify()

    def hang(self, name: str, *, engine_only: bool = False) -> None:
        """Let a running replica stop responding, or only its engine stop stepping."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is not None:
            self._hang(replica, engine_only=engine_only)

    def lose_node(self, node: str) -> None:
        """Let a machine fail with all replicas on it. Nothing is placed there until `restore_node`."""
        self._advance()
        self._lost_nodes.add(node)
        for replica in self._replicas.values():
            if replica.node == node and replica.state in _ALIVE:
                self._exit(replica, f"its node {node} was lost", None)

    def restore_node(self, node: str) -> None:
        """Let a lost machine return, without its replicas."""
        self._advance()
        self._lost_nodes.discard(node)
        self._place_waiting()

    def _advance(self) -> None:
        """Let everything happen that is due by the clock."""
        target = max(self._now, self._clock())
        while self._timers and self._timers[0][0] <= target:
            self._now, _, name, attempt, happen = heapq.heappop(self._timers)
            replica = self._replicas.get(name)
            if replica is not None and replica.attempt == attempt and replica.exited_at is None:
                happen(replica)
        self._now = target

    def _set_timer(
        self, replica: _Replica, delay_s: float, happen: Callable[[_Replica], None]
    ) -> None:
        self._num_timers += 1
        entry = (self._now + delay_s, self._num_timers, replica.spec.name, replica.attempt, happen)
        heapq.heappush(self._timers, entry)

    def _provision(self, replica: _Replica) -> None:
        self._waiting[replica.spec.name] = None
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place each waiting replica on the machine with room that has the fewest, if there is one."""
        for name in list(self._waiting):
            used, replicas = Counter[str](), Counter[str]()
            for each in self._replicas.values():
                if each.state in _ALIVE:
                    used[each.node] += each.spec.resources.accelerators
                    replicas[each.node] += 1
            wanted = self._replicas[name].spec.resources.accelerators
            nodes = [
                node
                for node in NODES
                if node not in self._lost_nodes and used[node] + wanted <= self._accelerators
            ]
            if nodes:
                del self._waiting[name]
                self._run(self._replicas[name], min(nodes, key=replicas.__getitem__))
            else:
                self._replicas[name].reason = "waiting for a GPU on any node"

    def _run(self, replica: _Replica, node: str) -> None:
        behaviour, random = self.behaviour, replica.random
        replica.state, replica.node, replica.reason = LaunchState.RUNNING, node, ""
        replica.started_at = self._now
        loading_s = random.uniform(*behaviour.loading_s)
        if random.random() < behaviour.slow_start_share:
            loading_s *= 10.0
        if random.random() < behaviour.failed_start_share:
            message = "it exited with status 1"
            self._set_timer(replica, loading_s, lambda each: self._exit(each, message, 1))
        else:
            self._set_timer(replica, loading_s, self._finish_loading)
        self._notify()

    def _finish_loading(self, replica: _Replica) -> None:
        replica.is_loaded = True
        self._notify()
        if math.isinf(self.behaviour.lifetime_s):
            return
        random = replica.random
        lifetime_s = random.uniform(0.0, 2.0 * self.behaviour.lifetime_s)
        if random.random() < self.behaviour.hang_share:
            engine_only = random.random() < 0.5
            self._set_timer(
                replica, lifetime_s, lambda each: self._hang(each, engine_only=engine_only)
            )
        else:
            message = "it crashed with SIGSEGV"
            self._set_timer(replica, lifetime_s, lambda each: self._exit(each, message, -11))

    def _hang(self, replica: _Replica, *, engine_only: bool) -> None:
        if replica.state not in _ALIVE:
            return
        if engine_only:
            replica.stepless_since = min(replica.stepless_since, self._now)
        else:
            replica.unresponsive_since = min(replica.unresponsive_since, self._now)
        self._notify()

    def _exit(self, replica: _Replica, reason: str, status: int | None) -> None:
        replica.state, replica.reason = LaunchState.EXITED, reason
        replica.exited_at, replica.exit_status = self._now, status
        self._waiting.pop(replica.spec.name, None)
        self._place_waiting()
        self._notify()

    def _notify(self) -> None:
        for listener in self.listeners:
            listener.set()


@dataclass
class SimulatedLauncher:
    """Launches replicas in a `SimulatedCluster`, which outlives the launcher. Several controllers may share it."""

    cluster: SimulatedCluster
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.cluster.listeners.append(self.changed)

    async def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        self._check_reachable()
        return self.cluster.list_replicas()

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        self._check(epoch)
        self.cluster.start(spec)

    async def prepare_pool(self, spec: LaunchSpec, epoch: int) -> None:
        self._check(epoch)

    async def drain(self, name: str, epoch: int) -> None:
        self._check(epoch)
        self.cluster.drain(name)

    async def stop(self, name: str, epoch: int) -> None:
        self._check(epoch)
        self.cluster.kill(name, "it was stopped")

    async def remove(self, name: str, epoch: int) -> None:
        self._check(epoch)
        self.cluster.remove(name)

    async def read_log(self, name: str, max_bytes: int) -> bytes:
        del name, max_bytes
        return b""

    async def close(self) -> None:
        self.cluster.listeners.remove(self.changed)

    def _check(self, epoch: int) -> None:
        self._check_reachable()
        self.cluster.check_epoch(epoch)

    def _check_reachable(self) -> None:
        if self.cluster.unreachable_reason:
            raise LaunchError(self.cluster.unreachable_reason)


class SimulatedMonitor:
    """Health checks of simulated replicas, in place of those by HTTP."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def watch(
        self, replicas: Collection[LaunchedReplica], paths: Callable[[LaunchedReplica], CheckPaths]
    ) -> None:
        for replica in replicas:
            paths(replica)

    async def wait_first_checks(self) -> None:
        pass

    def reading(self, replica: LaunchedReplica) -> ReplicaHealthReading:
        return self._cluster.check_health(replica.name)

    async def close(self) -> None:
        pass
