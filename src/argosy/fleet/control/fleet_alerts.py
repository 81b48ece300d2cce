"""Conditions of alerts that the controller of a fleet sees."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.deployment import GATEWAY_POOL, PoolConfig, ReplicaRecord, read_fleet_status
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.control.term_journal import TermJournal
from argosy.policy.alerting import (
    NO_REPLICA_S,
    NOT_HEALED_S,
    AlertCondition,
    ConditionTimer,
    describe_no_replica,
    describe_not_healed,
)
from argosy.policy.reconciliation import SERVING_PHASES, Problem, ProblemKind, ReplicaPhase
from argosy.policy.rollout import RolloutRecord
from argosy.process import run_in_daemon_thread
from argosy.store import StoreError

GATEWAY_DOWN_S = 30.0
_UNWANTED = frozenset({ReplicaPhase.DRAINING, ReplicaPhase.STOPPED, ReplicaPhase.OUT_OF_SERVICE})

_ROLLOUT_ALERTS = {
    ProblemKind.ROLLING_BACK: ("RolloutRolledBack", "The rollout of {} is rolled back"),
    ProblemKind.ROLLED_BACK: ("RolloutRolledBack", "The rollout of {} is rolled back"),
    ProblemKind.ROLLOUT_WAITS: ("RolloutWaits", "The rollout of {} waits for a person"),
}


class FleetAlerts:
    """Source of conditions about replicas, pools, gateways and rollouts. Use it from one event loop."""

    def __init__(self, journal: TermJournal, declared: Callable[[], DeclaredFleet | None]) -> None:
        self._records = journal.records
        self._store = journal.store.fleets
        self._fleet = journal.fleet
        self._declared = declared
        self._timer = ConditionTimer()
        self._rollouts: list[AlertCondition] = []
        """Conditions of rollouts by the last answer of the store."""

    async def read(self, now: float) -> list[AlertCondition]:
        """Return the conditions of the fleet as it was observed last."""
        declared = self._declared()
        if declared is None:
            return []
        self._timer.forget_old(now)
        replicas = list(self._records.replicas.values())
        conditions = [
            self._judge_pool(pool, [each for each in replicas if each.pool == pool.name], now)
            for pool in declared.config.pools
        ]
        conditions += [
            self._judge_replica(each, declared, now)
            for each in replicas
            if each.phase not in _UNWANTED
        ]
        try:
            status = await run_in_daemon_thread(read_fleet_status, self._store, self._fleet)
        except StoreError:
            self._rollouts = [
                msgspec.structs.replace(each, is_firing=None) for each in self._rollouts
            ]
        else:
            models = {pool.name: pool.model for pool in declared.config.pools}
            current = {
                pool.pool: pool.rollout.rollouts.current
                for pool in status.pools
                if pool.rollout is not None
            }
            self._rollouts = [
                _judge_rollout(each, models.get(each.pool, ""), current.get(each.pool))
                for each in status.problems
                if each.kind in _ROLLOUT_ALERTS
            ]
        return conditions + self._rollouts

    def _judge_pool(
        self, pool: PoolConfig, replicas: list[ReplicaRecord], now: float
    ) -> AlertCondition:
        wanted = [each for each in replicas if each.phase not in _UNWANTED]
        is_ready = any(each.phase in SERVING_PHASES for each in wanted)
        had_one = any(each.ready_at is not None for each in replicas)
        limit_s = NO_REPLICA_S if had_one else pool.start_timeout_s
        missing_s, is_firing = self._timer.judge(
            ("pool", pool.name), holds=bool(wanted) and not is_ready, limit_s=limit_s, now=now
        )
        return describe_no_replica(
            {"model": pool.model, "pool": pool.name},
            missing_s,
            is_firing=is_firing,
            states=[f"{each.name} is {each.phase}: {each.reason}" for each in wanted],
        )

    def _judge_replica(
        self, replica: ReplicaRecord, declared: DeclaredFleet, now: float
    ) -> AlertCondition:
        is_lost = replica.phase not in SERVING_PHASES and (
            replica.ready_at is not None
            or replica.problem is not None
            or replica.phase is ReplicaPhase.FAILED
        )
        is_gateway = replica.pool == GATEWAY_POOL
        lost_s, is_firing = self._timer.judge(
            ("replica", replica.name),
            holds=is_lost,
            limit_s=GATEWAY_DOWN_S if is_gateway else NOT_HEALED_S,
            now=now,
        )
        state = f"It is {replica.phase}: {replica.reason or 'no reason'}"
        labels = {"pool": replica.pool, "replica": replica.name}
        model = declared.model_name(replica.pool)
        if model is not None:
            labels["model"] = model
        if not is_gateway:
            return describe_not_healed(labels, lost_s, is_firing=is_firing, state=state)
        return AlertCondition(
            name="GatewayDown",
            labels=labels,
            severity="page",
            is_firing=is_firing,
            summary=f"The gateway {replica.name} does not answer",
            description=f"{replica.name} has not answered for {lost_s:.0f} s. {state}.",
            runbook="gatewaydown",
        )


def _judge_rollout(problem: Problem, model: str, rollout: RolloutRecord | None) -> AlertCondition:
    """Return the condition of a rollout. Each rollout is an alert of its own."""
    name, summary = _ROLLOUT_ALERTS[problem.kind]
    number = "" if rollout is None else rollout.id
    return AlertCondition(
        name=name,
        labels={"model": model, "pool": problem.pool, "rollout": number},
        severity="ticket",
        is_firing=True,
        summary=summary.format(problem.pool),
        description=problem.text,
        runbook=name.lower(),
    )
