"""Control plane of a simulated fleet: the production's reconciliation and autoscaler, and a launcher of replicas."""

from __future__ import annotations

from collections import Counter
from functools import partial

import msgspec

from argosy.engine.scheduling import BatchingPolicy, SchedulerLimits
from argosy.policy import ReplicaStatus
from argosy.policy.autoscaling import (
    ArrivedTokens,
    Autoscaler,
    AutoscalerSettings,
    CapacityEstimator,
    PoolObservation,
    ReplicaReport,
)
from argosy.policy.placement import CapacityChanged, PlacementReplica
from argosy.policy.reconciliation import (
    MAX_PAST_RUNS,
    Action,
    Admit,
    DesiredFleet,
    DesiredPool,
    Drain,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    Remove,
    ReplicaRun,
    Start,
    Stop,
    Withdraw,
    continue_observation,
    reconcile,
    replica_name,
)
from argosy.twin.gateway import SimulatedGateway
from argosy.twin.prober import Prober
from argosy.twin.replica import Fidelity, SimulatedReplica, Version
from argosy.twin.rollout import SimulatedRollout
from argosy.twin.scenario import PoolSettings
from argosy.twin.simulation import NS_PER_S, Simulation, require
from argosy.twin.step_cost import StepCost

POOL = "pool"
LAUNCHER = "simulated"
MAX_GAP_INTERVALS = 1.5
"""Intervals without an observation after which the controller has not seen what happened."""
SCALING_INTERVAL_S = 5.0
PUBLISH_S = 0.5
"""Time until a gateway follows a published rotation."""
DRAIN_TIMEOUT_S = 60.0
MAX_ROUNDS = 4
"""Reconciliations at one time after which no action may be left."""


class _Member(msgspec.Struct, eq=False):
    """Replica of the pool, as its launcher and the controller's records have it."""

    process: SimulatedReplica
    generation: int
    ordinal: int
    attempt: int = 0
    started_at: float = 0.0
    ready_at: float | None = None
    state: LaunchState = LaunchState.EXITED
    reason: str = ""
    exited_at: float | None = None
    last_response_at: float | None = None
    in_rotation: bool = False
    past_runs: tuple[ReplicaRun, ...] = ()


class SimulatedFleet:
    """Fleet of one pool.

    Args:
        simulation: Clock and events.
        pool: Settings of the pool.
        desired: Pool as it is declared.
        limits: Limits of each replica's scheduler.
        batching: Its policy by which sequences join the batch.
        cost: Price of the steps.
        fidelity: Fidelity of the replicas.
        rollout: Decides which versions run.
        scaling: Limits of the autoscaler; None if it is off.
    """

    def __init__(
        self,
        simulation: Simulation,
        pool: PoolSettings,
        desired: DesiredPool,
        *,
        limits: SchedulerLimits,
        batching: BatchingPolicy,
        cost: StepCost,
        fidelity: Fidelity,
        rollout: SimulatedRollout,
        scaling: AutoscalerSettings | None,
    ) -> None:
        self.desired = desired
        self.processes: dict[str, SimulatedReplica] = {}
        self.clock_offset_s = 0.0
        """How far the controller's clock is ahead."""
        self.num_actions: Counter[str] = Counter()
        self.replica_s = 0.0
        """Time in which replicas ran, all together."""
        self.busy_s = 0.0
        """Part of it in which they computed steps."""
        self._simulation = simulation
        self._limits = limits
        self._batching = batching
        self._scaling_interval_s = max(SCALING_INTERVAL_S, pool.control_interval_s)
        self._cost = cost
        self._fidelity = fidelity
        self._pool = pool
        self._lost_regions: Counter[int] = Counter()
        """How often each region is lost now."""
        self._rollout = rollout
        self._versions = [Version(desired.generation)]
        """All versions that were declared, by generation from 1."""
        self._members: dict[str, _Member] = {}
        self._observed_at = self._observing_since = simulation.now
        self._scaling = scaling
        self.autoscaler = None if scaling is None else Autoscaler(scaling)
        self._capacity = CapacityEstimator(None, None)
        self._tokens_before = (0.0, 0.0)

    def start(self, gateway: SimulatedGateway) -> None:
        """Begin with all declared replicas ready, and control them from now on."""
        self._gateway = gateway
        self._prober = Prober(
            self._simulation, gateway, self.processes, self._pool.probe_interval_s
        )
        for ordinal in range(self.desired.replicas):
            name = replica_name(POOL, self.desired.generation, ordinal)
            member = self._launch(name, self.desired.generation, ordinal)
            self._become_ready(member, member.attempt)
            member.in_rotation = True
            self._publish(name)
        self._simulation.call_later(self._pool.control_interval_s, self._control)
        if self._scaling is not None:
            self._simulation.call_later(self._scaling_interval_s, self._scale)

    def declare(self, slowdown: float, *, fails_to_start: bool) -> None:
        """Declare another version, which a rollout introduces."""
        version = Version(len(self._versions) + 1, slowdown, fails_to_start)
        self._versions.append(version)
        self._rollout.declared = version.generation

    def _is_available(self, name: str, member: _Member) -> bool:
        """Return whether a replica serves the requests of the gateway."""
        process = member.process
        is_serving = process.state == "ready" and not process.is_cut
        return member.in_rotation and is_serving and self._is_routed(name, member)

    def _is_routed(self, name: str, member: _Member) -> bool:
        return name in self._gateway.pool_of(member.generation).replicas

    def _desired_versions(self) -> tuple[DesiredPool, ...]:
        split = self._rollout.split or {self.desired.generation: self.desired.replicas}
        return tuple(
            msgspec.structs.replace(self.desired, generation=generation, replicas=replicas)
            for generation, replicas in split.items()
        )

    def find_running(self, ordinal: int) -> SimulatedReplica | None:
        """Return the process of the replica with this number, counted around; None if none runs."""
        running = [each.process for each in self._members.values() if each.process.state != "down"]
        return running[ordinal % len(running)] if running else None

    def crash(self, process: SimulatedReplica, reason: str) -> None:
        """Let a process exit at once."""
        member = self._members.get(process.name)
        if member is None or member.process is not process or process.state == "down":
            return
        now = self._simulation.now
        process.restart()
        process.state = "down"
        self._count_time(member)
        member.state, member.reason, member.exited_at = LaunchState.EXITED, reason, now
        self._simulation.trace(f"exit {process.name} {reason}")
        self._gateway.lose_replica(process, reason)

    def lose_zone(self, zone: int) -> None:
        """Let all replicas of a zone exit, counted around."""
        for name, process in tuple(self.processes.items()):
            if self._zone_of(name) == zone % self._pool.zones:
                self.crash(process, "its zone is gone")

    def lose_region(self, region: int) -> None:
        """Let all replicas of a region exit, counted around. None starts there until `restore_region`."""
        region %= self._pool.regions
        self._lost_regions[region] += 1
        for name, process in tuple(self.processes.items()):
            if self._zone_of(name) % self._pool.regions == region:
                self.crash(process, "its region is gone")

    def restore_region(self, region: int) -> None:
        """End a loss of a region."""
        self._lost_regions[region % self._pool.regions] -= 1

    def _zone_of(self, name: str) -> int:
        return int(name.rsplit("-", 1)[1]) % self._pool.zones

    def is_settled(self) -> bool:
        """Whether all declared replicas serve and get requests, and there are no others."""
        now = self._simulation.now
        wanted = {each.generation: each.replicas for each in self._desired_versions()}
        found = dict.fromkeys(wanted, 0)
        for name, member in self._members.items():
            if not self._is_available(name, member) or member.generation not in found:
                return False
            routed = self._gateway.pool_of(member.generation).replicas[name]
            if routed.health.status(now) is not ReplicaStatus.READY:
                return False
            found[member.generation] += 1
        return found == wanted

    def finish(self) -> None:
        """Count the time of the replicas that still run."""
        for member in self._members.values():
            if member.process.state != "down":
                self._count_time(member)

    def _count_time(self, member: _Member) -> None:
        self.replica_s += self._simulation.now - member.started_at
        self.busy_s += member.process.busy_ns / NS_PER_S

    # --- launcher --------------------------------------------------------------------------------

    def _launch(self, name: str, generation: int, ordinal: int) -> _Member:
        member = self._members.get(name)
        process = SimulatedReplica(
            name,
            self._simulation,
            limits=self._limits,
            batching=self._batching,
            cost=self._cost,
            fidelity=self._fidelity,
            version=self._versions[generation - 1],
            on_tokens=self._gateway.on_tokens,
        )
        process.state = "starting"
        if member is None:
            member = self._members[name] = _Member(process, generation, ordinal)
        member.process = self.processes[name] = process
        member.attempt += 1
        member.state, member.reason, member.exited_at = LaunchState.RUNNING, "", None
        member.started_at, member.ready_at = self._simulation.now, None
        member.last_response_at = None
        return member

    def _become_ready(self, member: _Member, attempt: int) -> None:
        if member.attempt != attempt or member.process.state != "starting":
            return
        region = self._zone_of(member.process.name) % self._pool.regions
        if self._versions[member.generation - 1].fails_to_start or self._lost_regions[region]:
            self.crash(member.process, "exited with status 1")
            return
        member.process.state = "ready"

    def _exit_if_drained(self, member: _Member, deadline: float) -> None:
        if member.state is not LaunchState.DRAINING:
            return
        if not member.process.scheduler.has_work or self._simulation.now >= deadline:
            self.crash(member.process, "drained")
        else:
            self._simulation.call_later(1.0, partial(self._exit_if_drained, member, deadline))

    def reclaim(self, process: SimulatedReplica, notice_s: float) -> None:
        """Let the owner of the machine take it back, with a notice."""
        if process.state == "ready":
            process.state = "draining"
        self._simulation.call_later(notice_s, partial(self.crash, process, "reclaimed"))

    # --- control ---------------------------------------------------------------------------------

    def _control(self) -> None:
        now = self._simulation.now + self.clock_offset_s
        self._observing_since = continue_observation(
            self._observing_since,
            self._observed_at,
            now,
            MAX_GAP_INTERVALS * self._pool.control_interval_s,
        )
        self._observed_at = now
        observed = self._observe_all()
        limits, route = self.desired.restart_limits, self._rollout.route
        self._rollout.decide(observed.replicas, limits, self.desired.replicas, now)
        if self._rollout.route is not route:
            self._gateway.follow_route()
        self._reconcile(observed, now)
        self._simulation.call_later(self._pool.control_interval_s, self._control)

    def _reconcile(self, observed: ObservedFleet, now: float) -> None:
        """Act until nothing is left to do, as a controller reconciles again after each change."""
        desired = DesiredFleet(pools=self._desired_versions())
        actions = reconcile(desired, observed, now).actions
        for _ in range(MAX_ROUNDS):
            if not actions:
                return
            for action in actions:
                self._act(action, desired.pools)
            actions = reconcile(desired, self._observe_all(), now).actions
        left = ", ".join(f"{type(each).__name__} {each.replica}" for each in actions)
        require(not actions, f"reconciliation does not come to rest: {left}")

    def _observe_all(self) -> ObservedFleet:
        return ObservedFleet(
            replicas=tuple(self._observe(name, each) for name, each in self._members.items()),
            observing_since=self._observing_since,
        )

    def _observe(self, name: str, member: _Member) -> ObservedReplica:
        process, now = member.process, self._simulation.now + self.clock_offset_s
        is_reachable = process.state != "down" and not process.is_cut
        if is_reachable:
            member.last_response_at = now
            if process.state == "ready" and member.ready_at is None:
                member.ready_at = now
        is_routed = self._is_routed(name, member)
        return ObservedReplica(
            name=name,
            pool=POOL,
            generation=member.generation,
            ordinal=member.ordinal,
            launcher=LAUNCHER,
            attempt=member.attempt,
            started_at=member.started_at,
            ready_at=member.ready_at,
            in_rotation=member.in_rotation,
            past_runs=member.past_runs,
            state=member.state,
            reason=member.reason,
            exited_at=member.exited_at,
            last_response_at=member.last_response_at,
            is_serving=is_reachable and process.state == "ready",
            reported_state=process.state if is_reachable else "",
            is_routed=is_routed,
            is_routed_by_any=is_routed,
        )

    def _act(self, action: Action, versions: tuple[DesiredPool, ...]) -> None:
        name, simulation = action.replica, self._simulation
        self.num_actions[type(action).__name__] += 1
        simulation.trace(f"{type(action).__name__} {name} {action.reason}")
        self._check_permitted(action, versions)
        match action:
            case Start():
                self._start(action)
            case Admit():
                self._members[name].in_rotation = True
                simulation.call_later(PUBLISH_S, partial(self._publish, name))
            case Withdraw():
                self._members[name].in_rotation = False
                simulation.call_later(PUBLISH_S, partial(self._publish, name))
            case Drain():
                member = self._members[name]
                member.state, member.process.state = LaunchState.DRAINING, "draining"
                self._exit_if_drained(member, simulation.now + DRAIN_TIMEOUT_S)
            case Stop():
                self.crash(self._members[name].process, action.reason)
            case Remove():
                del self._members[name]

    def _start(self, action: Start) -> None:
        run = action.ended_run
        member = self._launch(action.replica, action.generation, action.ordinal)
        if run is not None and all(each.attempt != run.attempt for each in member.past_runs):
            member.past_runs = (*member.past_runs, run)[-MAX_PAST_RUNS:]
        self._simulation.call_later(
            self._pool.start_s, partial(self._become_ready, member, member.attempt)
        )

    def _publish(self, name: str) -> None:
        """Let the gateway follow the rotation."""
        process, member, now = self.processes[name], self._members.get(name), self._simulation.now
        pool = self._gateway.pool_of(process.generation)
        in_rotation = member is not None and member.in_rotation
        if in_rotation and name not in pool.replicas:
            replica = PlacementReplica(name, arithmetic_id="simulated")
            replica.load.max_seqs = self._limits.max_seqs
            replica.health.on_report_required()
            pool.add(replica)
            self._prober.watch(replica)
        elif not in_rotation and name in pool.replicas:
            pool.remove(name, now)
        self._gateway.handle(CapacityChanged(pool))

    def _check_permitted(self, action: Action, versions: tuple[DesiredPool, ...]) -> None:
        """Check an action by what really exists."""
        member, name = self._members.get(action.replica), action.replica
        running = sum(each.state is not LaunchState.EXITED for each in self._members.values())
        size = sum(each.replicas + each.spares + each.max_surge for each in versions)
        match action:
            case Start():
                is_running = member is not None and member.state is not LaunchState.EXITED
                require(not is_running, f"{name} is started although it runs")
                require(running < size, f"{name} would be replica {running + 1} of {size}")
            case Withdraw() if member is not None and self._is_available(name, member):
                others = {each.generation: each for each in versions[1:]}
                version = others.get(member.generation, versions[0])
                left = sum(
                    others.get(each.generation, versions[0]) is version
                    and self._is_available(each_name, each)
                    for each_name, each in self._members.items()
                    if each is not member
                )
                needed = version.replicas
                require(left >= needed, f"{name} is withdrawn, which leaves {left} of {needed}")
            case Drain() | Remove() | Stop():
                in_rotation = member is not None and member.in_rotation
                require(not in_rotation, f"{name} is ended while it is in the rotation")
                is_drained = isinstance(action, Drain) and member is not None
                is_routed = is_drained and member is not None and self._is_routed(name, member)
                require(not is_routed, f"{name} is drained while a gateway routes to it")

    # --- autoscaling -----------------------------------------------------------------------------

    def _scale(self) -> None:
        if self.autoscaler is None:
            return
        gateway, now, desired = self._gateway, self._simulation.now, self.desired.replicas
        ready = [
            each.process
            for each in self._members.values()
            if each.in_rotation and each.process.state == "ready"
        ]
        arrived, served = gateway.arrived_tokens, gateway.served_tokens
        before, self._tokens_before = self._tokens_before, (arrived, served)
        queues = [each.queue for each in gateway.core.queues.values()]
        arrivals = [at for each in queues if (at := each.oldest_arrival()) is not None]
        self._learn(ready, (served - before[1]) / self._scaling_interval_s)
        decision = self.autoscaler.decide(
            PoolObservation(
                at=now,
                desired_replicas=desired,
                ready_replicas=len(ready),
                arrivals=(ArrivedTokens(arrived - before[0], self._scaling_interval_s),),
                queued_requests=sum(map(len, queues)),
                queued_tokens=sum(each.cost_tokens for each in queues),
                queue_age_s=max(0.0, now - min(arrivals, default=now)),
                running_requests=len(gateway.active),
                kv_used_replicas=sum(each.kv_usage_ratio for each in ready),
                capacity_tokens_per_s=self._capacity.tokens_per_s,
                startup_s=self._pool.start_s,
                metrics_age_s=0.0,
            )
        )
        if decision.target != desired:
            self._simulation.trace(f"scale {decision.target} {decision.reason}")
            self.desired = msgspec.structs.replace(self.desired, replicas=decision.target)
        self._simulation.call_later(self._scaling_interval_s, self._scale)

    def _learn(self, ready: list[SimulatedReplica], served_per_s: float) -> None:
        """Learn the capacity of a replica, as the controller does from load reports."""
        running = sum(len(each.scheduler.running) for each in ready)
        self._capacity.add(
            ReplicaReport(
                tokens_per_s=served_per_s * len(each.scheduler.running) / max(1, running),
                running=len(each.scheduler.running),
                max_running=self._limits.max_seqs,
                inter_token_s=each.inter_token_s,
                ttft_s=each.scheduler.queued_tokens / each.prefill_tokens_per_s,
            )
            for each in ready
        )
