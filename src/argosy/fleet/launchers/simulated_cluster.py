"""Simulated machines: replicas that start, load, crash, hang and drain at random times under a virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from argosy.fleet.launchers.launcher import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    refuse_stale_epoch,
)
from argosy.policy.reconciliation import LaunchState


class SimulatedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated machine."""

    accelerators: float = math.inf
    zone: str = ""
    labels: Mapping[str, str] = {}


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


class SimulatedHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulated health check."""

    last_response_at: float | None = None
    last_step_at: float | None = None
    is_serving: bool = False


@dataclass(kw_only=True)
class _Replica:
    """A replica that was started and not removed."""

    spec: LaunchSpec
    attempt: int = 0
    state: LaunchState = LaunchState.PROVISIONING
    reason: str = ""
    node: str = ""
    started_at: float = 0.0
    exited_at: float | None = None
    exit_status: int | None = None
    random: Random = field(default_factory=Random)
    is_loaded: bool = False
    unresponsive_since: float = math.inf
    """When its HTTP server stopped responding."""
    stepless_since: float = math.inf
    """When its engine stopped stepping."""


class SimulatedCluster:
    """A set of simulated machines, which remembers the replicas on them and the highest epoch of a controller.

    Each attempt to start a replica draws its random times from the seed and its own name, so that they do not depend on
    the order of the calls.

    Args:
        clock: Returns the virtual time in seconds since the epoch.
        seed: Decides all random times.
        nodes: Machines by name. By default there is one without limits.
        behaviour: Random behaviour of the replicas.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        seed: int = 0,
        nodes: Mapping[str, SimulatedNode] | None = None,
        behaviour: SimulatedBehaviour | None = None,
    ) -> None:
        self._clock = clock
        self._seed = seed
        self._nodes = dict(nodes or {"node-0": SimulatedNode()})
        self.behaviour = behaviour or SimulatedBehaviour()
        """Behaviour of the attempts that start from now on."""
        self.unreachable_reason = ""
        """Why the cluster cannot be reached; empty if it can."""
        self._lost_nodes: set[str] = set()
        self._epoch = 0
        self._replicas: dict[str, _Replica] = {}
        self._logs = defaultdict[str, list[str]](list)
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
        return self._timers[0][0] if self._timers else math.inf

    def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        """Return all replicas by name."""
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
                zone=self._nodes[replica.node].zone if replica.node else "",
                attempt=replica.attempt,
                started_at=replica.started_at,
                exited_at=replica.exited_at,
                exit_status=replica.exit_status,
            )
            for name, replica in self._replicas.items()
        }

    def check_health(self, name: str) -> SimulatedHealth:
        """Return what a health check of the replica finds."""
        self._advance()
        replica = self._replicas.get(name)
        is_running = replica is not None and replica.state in _ALIVE
        if replica is None or not is_running:
            return SimulatedHealth()
        return SimulatedHealth(
            last_response_at=min(self._now, replica.unresponsive_since),
            last_step_at=min(self._now, replica.unresponsive_since, replica.stepless_since),
            is_serving=replica.is_loaded
            and replica.state is LaunchState.RUNNING
            and self._now < replica.unresponsive_since,
        )

    def read_log(self, name: str) -> str:
        """Return what happened to a replica. It outlives the replica."""
        self._advance()
        return "\n".join(self._logs[name])

    def check_epoch(self, epoch: int) -> None:
        """Remember the epoch of an action.

        Raises:
            StaleEpochError: A controller with a higher epoch has acted already.
        """
        refuse_stale_epoch(epoch, self._epoch)
        self._epoch = epoch

    def start(self, spec: LaunchSpec) -> None:
        """Start a replica unless it runs."""
        self._advance()
        replica = self._replicas.get(spec.name)
        if replica is not None and replica.state is not LaunchState.EXITED:
            return
        attempt = 1 if replica is None else replica.attempt + 1
        random = Random(f"{self._seed} {spec.name} {attempt}")  # noqa: S311 - a simulation
        replica = self._replicas[spec.name] = _Replica(
            spec=spec, attempt=attempt, random=random, started_at=self._now
        )
        self._log(replica, f"attempt {attempt} starts")
        self._set_timer(replica, random.uniform(*self.behaviour.provisioning_s), self._provision)

    def drain(self, name: str) -> None:
        """Let a running replica exit when its requests have ended, or at its drain deadline."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is None or replica.state in (LaunchState.EXITED, LaunchState.DRAINING):
            return
        if replica.state is LaunchState.PROVISIONING:
            self._exit(replica, "it was drained before it ran", 0)
            return
        replica.state = LaunchState.DRAINING
        self._log(replica, "it drains")
        deadline_s = replica.spec.drain_deadline_s
        drain_s = replica.random.uniform(*self.behaviour.drain_s)
        if drain_s < deadline_s and replica.unresponsive_since == math.inf:
            self._set_timer(replica, drain_s, lambda each: self._exit(each, "it was drained", 0))
        else:
            message = f"it was killed at its drain deadline of {deadline_s:g} s"
            self._set_timer(replica, deadline_s, lambda each: self._exit(each, message, -9))

    def kill(self, name: str, reason: str) -> None:
        """Let a replica exit now, unless it has exited."""
        self._advance()
        replica = self._replicas.get(name)
        if replica is not None and replica.state is not LaunchState.EXITED:
            self._exit(replica, reason, -9)

    def remove(self, name: str) -> None:
        """Forget a replica that has exited.

        Raises:
            LaunchError: It has not exited.
        """
        self._advance()
        replica = self._replicas.get(name)
        if replica is None:
            return
        if replica.state is not LaunchState.EXITED:
            raise LaunchError(f"Replica {name} has not exited; stop it first")
        del self._replicas[name]
        self._log(replica, "it is removed")

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
        """Place the waiting replicas for which a machine has room."""
        for name in list(self._waiting):
            replica = self._replicas[name]
            node = self._select_node(replica.spec)
            if node is None:
                replica.reason = _waiting_reason(replica.spec)
            else:
                del self._waiting[name]
                self._run(replica, node)

    def _select_node(self, spec: LaunchSpec) -> str | None:
        """Return the machine with room in the best zone that has the fewest replicas; None if there is none."""
        resources = spec.resources
        accelerators, replicas = Counter[str](), Counter[str]()
        for replica in self._replicas.values():
            if replica.state in _ALIVE:
                accelerators[replica.node] += replica.spec.resources.accelerators
                replicas[replica.node] += 1
        candidates = [
            (resources.zones.index(node.zone) if resources.zones else 0, replicas[name], name)
            for name, node in self._nodes.items()
            if name not in self._lost_nodes
            and (not resources.zones or node.zone in resources.zones)
            and resources.labels.items() <= node.labels.items()
            and accelerators[name] + resources.accelerators <= node.accelerators
        ]
        return min(candidates)[-1] if candidates else None

    def _run(self, replica: _Replica, node: str) -> None:
        behaviour, random = self.behaviour, replica.random
        replica.state, replica.node, replica.reason = LaunchState.RUNNING, node, ""
        replica.started_at = self._now
        self._log(replica, f"it runs on {node}")
        loading_s = random.uniform(*behaviour.loading_s)
        if random.random() < behaviour.slow_start_share:
            loading_s *= 10.0
        if random.random() < behaviour.failed_start_share:
            message = "it exited with status 1"
            self._set_timer(replica, loading_s, lambda each: self._exit(each, message, 1))
        else:
            self._set_timer(replica, loading_s, self._finish_loading)

    def _finish_loading(self, replica: _Replica) -> None:
        replica.is_loaded = True
        self._log(replica, "it serves")
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
        self._log(replica, "its engine hangs" if engine_only else "it hangs")

    def _exit(self, replica: _Replica, reason: str, status: int | None) -> None:
        replica.state, replica.reason = LaunchState.EXITED, reason
        replica.exited_at, replica.exit_status = self._now, status
        self._waiting.pop(replica.spec.name, None)
        self._log(replica, reason)
        self._place_waiting()

    def _log(self, replica: _Replica, message: str) -> None:
        self._logs[replica.spec.name].append(f"{self._now:.3f} {message}")
        for listener in self.listeners:
            listener.set()


_ALIVE = (LaunchState.RUNNING, LaunchState.DRAINING)


def _waiting_reason(spec: LaunchSpec) -> str:
    resources = spec.resources
    wanted = f"{resources.accelerators} GPUs" if resources.accelerators > 1 else "a GPU"
    what = wanted if resources.accelerators else "room"
    return f"waiting for {what} on any node{resources.place}"
