"""Decision about a fleet: who is kept, who is in the rotation, who leaves, and what is started, pool by pool."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import count, islice

from argosy.policy.reconciliation.actions import (
    Action,
    Admit,
    Drain,
    PhaseReport,
    Reconciliation,
    Remove,
    ReplicaPhase,
    Start,
    Stop,
    Warm,
    Withdraw,
)
from argosy.policy.reconciliation.fleet_state import (
    DesiredFleet,
    DesiredPool,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    WarmUpState,
    replica_name,
)
from argosy.policy.reconciliation.member import Member, MemberState, describe_member, describe_start
from argosy.policy.reconciliation.restarts import ended_run, limit_starts, plan_restart


def reconcile(desired: DesiredFleet, observed: ObservedFleet, now: float) -> Reconciliation:
    """Compare the desired with the observed state of a fleet.

    The result depends on the arguments alone: the same arguments give the same actions in the same order, and none is
    left once the fleet is as desired. Call it after each change, and at `Reconciliation.wake_at`.

    Args:
        desired: What the fleet shall consist of.
        observed: What exists.
        now: Seconds since the epoch.
    """
    by_pool = defaultdict[str, list[ObservedReplica]](list)
    for replica in observed.replicas:
        by_pool[replica.pool].append(replica)
    actions: list[Action] = []
    phases: dict[str, PhaseReport] = {}
    wake_at = math.inf
    declared = defaultdict[str, list[DesiredPool]](list)
    for pool in desired.pools:
        declared[pool.name].append(pool)
    for name in [*declared, *sorted(by_pool.keys() - declared.keys())]:
        is_declared = name in declared
        versions = declared.get(name) or [
            DesiredPool(name=name, launcher="", generation=-1, replicas=0)
        ]
        others = {pool.generation: pool for pool in versions[1:]}
        for pool in versions:
            replicas = [
                each
                for each in by_pool.get(name, ())
                if others.get(each.generation, versions[0]) is pool
            ]
            reconciler = PoolReconciler(pool, replicas, observed, now, is_declared=is_declared)
            reconciler.run()
            actions += reconciler.actions
            phases |= reconciler.phases
            wake_at = min(wake_at, reconciler.wake_at)
    for launcher, cores in desired.cores.items():
        waiting, next_at = limit_starts(launcher, cores, desired, observed, actions, now)
        phases |= waiting
        actions = [
            each for each in actions if not (isinstance(each, Start) and each.replica in waiting)
        ]
        wake_at = min(wake_at, next_at)
    return Reconciliation(
        actions=tuple(actions),
        wake_at=None if math.isinf(wake_at) else wake_at,
        phases=phases,
    )


PROVISIONING_PATIENCE_S = 30.0
"""How long a replacement waits for a machine before an outdated replica makes room for it."""


class PoolReconciler:
    """Decides about the replicas of one pool at one moment. Call `run` once.

    The actions follow from the observation alone. A replica that was withdrawn in order to drain it is, until it is
    drained, the same as a spare, so that no decision has to be remembered.
    """

    def __init__(
        self,
        pool: DesiredPool,
        replicas: Iterable[ObservedReplica],
        observed: ObservedFleet,
        now: float,
        *,
        is_declared: bool,
    ) -> None:
        self._pool = pool
        self._is_declared = is_declared
        self._now = now
        self._observing_since = observed.observing_since
        self._unavailable_launchers = observed.unavailable_launchers
        self._size = pool.replicas + pool.spares
        self._unlisted: dict[str, ObservedReplica] = {}
        """Replicas that no launcher lists, by name."""
        self._members: list[Member] = []
        """Listed replicas, in the order in which they are kept."""
        for replica in replicas:
            if replica.state is None:
                self._unlisted[replica.name] = replica
            else:
                self._members.append(Member(replica, pool, observed, now))
        self._members.sort(key=Member.sort_key)
        self._budget = DisruptionBudget(pool, self._members)
        self._num_early = 0
        """Outdated replicas that may leave before their replacements are ready."""
        self.actions: list[Action] = []
        self.phases: dict[str, PhaseReport] = {}
        self.wake_at = math.inf

    def run(self) -> None:
        """Fill `actions`, `phases` and `wake_at`."""
        self._select_leaving()
        rotation = self._select_rotation()
        self._withdraw_dead()
        self._stop_failed()
        self._withdraw_superfluous(rotation)
        self._restart_exited()
        self._start_missing()
        self._warm_up()
        self._remove_leaving()
        for member in self._members:
            name = member.replica.name
            if name not in self.phases:
                self.phases[name] = self._describe(member)

    def _select_leaving(self) -> None:
        """Decide which replicas leave: those beyond the size of the pool, and those that others have replaced.

        Outdated replicas leave as replacements become ready. Without surge, as many as may be unavailable, and as many
        as there are spares, leave before their replacements are started. With surge these leave early too, but only
        for replacements that have waited for a machine for a while, since it may be the outdated ones that occupy all.
        """
        pool = self._pool
        live = [each for each in self._members if each.replica.state is not LaunchState.DRAINING]
        current = [each for each in live if each.is_current]
        surplus = current[self._size :]
        if not pool.serves_model:
            surplus = [each for each in current if each.replica.ordinal >= self._size]
        for member in surplus:
            member.leaving_reason = pool.surplus_reason or f"the pool needs only {self._size}"
        usable = [each for each in current[: self._size] if each.is_usable]
        num_routed = sum(each.is_available for each in usable[: pool.replicas])
        num_spares = len(usable[pool.replicas :])
        outdated = [each for each in live if not each.is_current]
        self._num_early = pool.max_unavailable + pool.spares
        if pool.max_surge:
            waiting = [each for each in current[: self._size] if self._waits_for_machine(each)]
            if outdated and not self._num_early:
                for member in waiting:
                    member.held_reason = (
                        "set max_unavailable to 1 if old replicas occupy all machines"
                    )
            self._num_early = min(self._num_early, len(waiting))
        if not pool.serves_model:
            served = {each.replica.ordinal for each in usable if each.is_available}
            outdated.sort(key=lambda each: _is_replaced(each, served))
        num_kept = self._size - num_routed - num_spares - self._num_early
        for member in outdated[max(0, num_kept) :]:
            member.leaving_reason = (
                f"generation {pool.generation} replaces it"
                if self._is_declared
                else "its pool is not declared any more"
            )

    def _waits_for_machine(self, member: Member) -> bool:
        replica = member.replica
        if not member.is_known or replica.state is not LaunchState.PROVISIONING:
            return False
        waits_long_at = replica.started_at + PROVISIONING_PATIENCE_S
        if self._now < waits_long_at:
            self.wake_at = min(self.wake_at, waits_long_at)
        return self._now >= waits_long_at

    def _select_rotation(self) -> set[str]:
        """Admit usable replicas until the rotation is complete. Return the names of those that it shall contain."""
        usable = [each for each in self._members if each.is_usable and not each.leaving_reason]
        selected = usable[: self._pool.replicas]
        for member in selected:
            if not member.in_rotation:
                self._act(Admit, member.replica, "it is ready, and the rotation has room")
                member.in_rotation = True
        return {each.replica.name for each in selected}

    def _withdraw_dead(self) -> None:
        """Withdraw replicas that cannot serve according to their launcher."""
        for replica in self._unlisted.values():
            if replica.in_rotation and self._is_known(replica.launcher):
                self._act(Withdraw, replica, "its launcher does not list it any more")
        for member in self._members:
            replica = member.replica
            if member.in_rotation and replica.state is not LaunchState.RUNNING:
                self._withdraw(member, replica.reason or f"it is {replica.state}")

    def _stop_failed(self) -> None:
        """Kill hung replicas, as far as the budget permits, and those whose warm-up failed. They are restarted."""
        for member in reversed(self._members):
            replica = member.replica
            if not member.is_known or replica.state is not LaunchState.RUNNING:
                continue
            if member.state is MemberState.HUNG:
                reason = member.deadline.reason
            elif member.state is MemberState.NOT_WARM and not member.in_rotation:
                reason = f"its warm-up failed: {replica.warm_up_error}"
            else:
                self.wake_at = min(self.wake_at, member.deadline.at)
                continue
            if self._budget.take_out_failed(member):
                self._withdraw(member, reason)
                self._stop(member, reason)
            else:
                member.held_reason = "it stays, because too many replicas of the pool are out"

    def _withdraw_superfluous(self, rotation: set[str]) -> None:
        """Withdraw replicas that leave or that are not needed in the rotation, as far as the budget permits."""
        for member in reversed(self._members):
            replica = member.replica
            if not (member.in_rotation and member.is_known) or replica.name in rotation:
                continue
            if not (member.leaving_reason or member.is_usable) or member.held_reason:
                continue
            leaves_early = bool(self._num_early and member.leaving_reason) and not member.is_current
            if self._budget.take_out(member, replaces_first=not leaves_early):
                self._withdraw(
                    member, member.leaving_reason or "the rotation is complete without it"
                )
            else:
                member.held_reason = "it stays in the rotation until enough others are routed"

    def _restart_exited(self) -> None:
        """Restart what has exited, current replicas first, as far as others have not taken its room."""
        states = [each.replica.state for each in self._members]
        num_running = len(states) - states.count(LaunchState.EXITED)
        room = self._size + self._pool.max_surge - num_running
        for member in self._members:
            replica = member.replica
            if (
                replica.state is not LaunchState.EXITED
                or not member.is_known
                or member.leaving_reason
            ):
                continue
            if room > 0:
                self._start(replica, replica.launcher)
            else:
                waiting = f"it waits until another of the {num_running} replicas exits"
                self.phases[replica.name] = PhaseReport(ReplicaPhase.PENDING, waiting)
            room -= 1

    def _start_missing(self) -> None:
        """Start replicas with the lowest free ordinals, unless too many exist already."""
        pool = self._pool
        num_kept = num_existing = 0
        for member in self._members:
            state, is_leaving = member.replica.state, bool(member.leaving_reason)
            num_existing += not (is_leaving and state is LaunchState.EXITED)
            num_kept += member.is_current and not is_leaving and state is not LaunchState.DRAINING
        if num_kept >= self._size:
            return
        room = self._size + pool.max_surge - num_existing
        taken = {each.replica.ordinal for each in self._members if each.is_current}
        ordinals = count() if pool.serves_model else range(self._size)
        free = (ordinal for ordinal in ordinals if ordinal not in taken)
        for number, ordinal in enumerate(islice(free, self._size - num_kept)):
            name = replica_name(pool.name, pool.generation, ordinal)
            if not self._is_known(pool.launcher):
                waiting = self._unavailable_reason(pool.launcher)
            elif number >= room:
                waiting = f"it waits until another of the {num_existing} replicas exits"
            else:
                replica = self._unlisted.pop(name, None) or ObservedReplica(
                    name=name,
                    pool=pool.name,
                    generation=pool.generation,
                    ordinal=ordinal,
                    launcher=pool.launcher,
                )
                self._start(replica, pool.launcher)
                continue
            self._unlisted.pop(name, None)
            self.phases[name] = PhaseReport(ReplicaPhase.PENDING, waiting)

    def _start(self, replica: ObservedReplica, launcher: str) -> None:
        """Start a replica unless it has to wait after a crash."""
        plan = plan_restart(replica, self._pool.restart_limits)
        self.phases[replica.name] = describe_start(plan, self._now)
        if self._now < plan.starts_at:
            self.wake_at = min(self.wake_at, plan.starts_at)
            return
        self.actions.append(
            Start(
                pool=replica.pool,
                replica=replica.name,
                launcher=launcher,
                reason=plan.reason,
                generation=replica.generation,
                ordinal=replica.ordinal,
                ended_run=ended_run(replica),
            )
        )

    def _warm_up(self) -> None:
        if not self._pool.requires_warm_up:
            return
        for member in self._members:
            replica = member.replica
            if (
                replica.warm_up is WarmUpState.NOT_STARTED
                and replica.is_serving
                and replica.state is LaunchState.RUNNING
                and not (member.leaving_reason or member.is_stopped)
            ):
                self._act(Warm, replica, "it serves for the first time")

    def _remove_leaving(self) -> None:
        """Drain, stop and remove replicas that leave and have been withdrawn."""
        for member in self._members:
            replica, reason = member.replica, member.leaving_reason
            if not reason or member.in_rotation or member.is_stopped:
                continue
            if replica.state is LaunchState.EXITED:
                self._act(Remove, replica, reason)
            elif replica.ready_at is None and not (replica.is_serving or replica.is_routed_by_any):
                self._stop(member, reason)
            elif not (replica.in_rotation or replica.is_routed_by_any):
                self._act(Drain, replica, reason)
        for replica in self._unlisted.values():
            self._act(Remove, replica, "its launcher does not list it any more")

    def _withdraw(self, member: Member, reason: str) -> None:
        if member.in_rotation and member.is_known:
            self._act(Withdraw, member.replica, reason)
            member.in_rotation = False

    def _stop(self, member: Member, reason: str) -> None:
        self._act(Stop, member.replica, reason)
        member.is_stopped = True

    def _act(self, action: type[Action], replica: ObservedReplica, reason: str) -> None:
        if self._is_known(replica.launcher):
            self.actions.append(
                action(
                    pool=replica.pool,
                    replica=replica.name,
                    launcher=replica.launcher,
                    reason=reason,
                )
            )

    def _is_known(self, launcher: str) -> bool:
        return launcher not in self._unavailable_launchers

    def _unavailable_reason(self, launcher: str) -> str:
        return (
            f"launcher {launcher} cannot list its replicas: {self._unavailable_launchers[launcher]}"
        )

    def _describe(self, member: Member) -> PhaseReport:
        report = describe_member(member, self._pool, self._observing_since, self._now)
        if member.is_known:
            return report
        return PhaseReport(report.phase, self._unavailable_reason(member.replica.launcher))


def _is_replaced(member: Member, served: set[int]) -> bool:
    """Return whether another gateway serves the address of a gateway. Adds its ordinal to those that are served."""
    ordinal = member.replica.ordinal
    is_replaced = ordinal in served
    served.add(ordinal)
    return is_replaced


class DisruptionBudget:
    """Counts the replicas of one pool that serve, and refuses to take out too many of them.

    A usable replica is taken out only if enough *available* ones remain, to which every gateway routes. For a replica
    that the health check finds unusable, enough have to remain that *may* serve, because the health check can be wrong
    about all of them.
    """

    def __init__(self, pool: DesiredPool, members: Iterable[Member]) -> None:
        self._pool = pool
        self._num_available = self._num_serving = 0
        for member in members:
            self._num_available += member.is_available
            self._num_serving += member.may_serve

    def take_out(self, member: Member, *, replaces_first: bool) -> bool:
        """Count a member that leaves the rotation or the fleet. Return False if it has to stay for now.

        Args:
            member: The member.
            replaces_first: Whether one that is usable leaves only if the rotation is complete without it.
        """
        tolerance = 0 if member.is_usable and replaces_first else self._pool.max_unavailable
        return self._take_out(member, tolerance)

    def take_out_failed(self, member: Member) -> bool:
        """Count a hung member that is restarted in place. Return False if it has to stay for now."""
        return self._take_out(member, max(1, self._pool.max_unavailable))

    def _take_out(self, member: Member, tolerance: int) -> bool:
        if not member.may_serve:
            return True
        min_remaining = self._pool.replicas - tolerance
        if member.is_usable:
            if self._num_available - member.is_available < min_remaining:
                return False
        elif self._num_serving - 1 < min_remaining:
            return False
        self._num_available -= member.is_available
        self._num_serving -= 1
        return True
