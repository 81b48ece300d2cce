"""Conditions of alerts that the controller of a fleet sees."""

from __future__ import annotations

from collections.abc import Callable

from argosy.deployment import GATEWAY_POOL, PoolConfig, ReplicaRecord
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
from argosy.policy.reconciliation import SERVING_PHASES, ReplicaPhase

GATEWAY_DOWN_S = 30.0
_UNWANTED = frozenset({ReplicaPhase.DRAINING, ReplicaPhase.STOPPED, ReplicaPhase.OUT_OF_SERVICE})


class FleetAlerts:
    """Source of conditions about replicas, pools and gateways. Use it from one event loop."""

    def __init__(self, journal: TermJournal, declared: Callable[[], DeclaredFleet | None]) -> None:
        self._records = journal.records
        self._declared = declared
        self._timer = ConditionTimer()

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
        return conditions + [
            self._judge_replica(each, now) for each in replicas if each.phase not in _UNWANTED
        ]

    def _judge_pool(
        self, pool: PoolConfig, replicas: list[ReplicaRecord], now: float
    ) -> AlertCondition:
        wanted = [each for each in replicas if each.phase not in _UNWANTED]
        is_ready = any(each.phase in SERVING_PHASES for each in wanted)
        had_one = any(each.ready_at is not None for each in replicas)
        limit_s = NO_REPLICA_S if had_one else pool.start_timeout_s
        missing_s = self._timer.observe(
            ("pool", pool.name), holds=bool(wanted) and not is_ready, now=now
        )
        return describe_no_replica(
            {"model": pool.model, "pool": pool.name},
            missing_s,
            limit_s=limit_s,
            states=[f"{each.name} is {each.phase}: {each.reason}" for each in wanted],
        )

    def _judge_replica(self, replica: ReplicaRecord, now: float) -> AlertCondition:
        is_lost = replica.phase not in SERVING_PHASES and (
            replica.ready_at is not None
            or replica.problem is not None
            or replica.phase is ReplicaPhase.FAILED
        )
        lost_s = self._timer.observe(("replica", replica.name), holds=is_lost, now=now)
        state = f"It is {replica.phase}: {replica.reason or 'no reason'}"
        labels = {"pool": replica.pool, "replica": replica.name}
        if replica.pool != GATEWAY_POOL:
            return describe_not_healed(labels, lost_s, limit_s=NOT_HEALED_S, state=state)
        return AlertCondition(
            name="GatewayDown",
            labels=labels,
            severity="page",
            is_firing=lost_s >= GATEWAY_DOWN_S,
            summary=f"The gateway {replica.name} does not answer",
            description=f"{replica.name} has not answered for {lost_s:.0f} s. {state}.",
            runbook="gatewaydown",
        )
