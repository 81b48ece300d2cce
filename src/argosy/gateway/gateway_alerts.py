"""Conditions of alerts that a gateway without a controller sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.policy import ReplicaStatus
from argosy.policy.alerting import (
    NO_REPLICA_S,
    NOT_HEALED_S,
    AlertCondition,
    ConditionTimer,
    describe_no_replica,
    describe_not_healed,
)

_SERVING = frozenset({ReplicaStatus.READY, ReplicaStatus.BACKOFF, ReplicaStatus.SLEEPING})
_LOST = frozenset({ReplicaStatus.EJECTED, ReplicaStatus.UNREACHABLE, ReplicaStatus.STARTING})


class GatewayAlerts:
    """Source of conditions about replicas and models. Use it from one event loop.

    Args:
        list_pools: Returns the pools of all models.
    """

    def __init__(self, list_pools: Callable[[], Sequence[Pool]]) -> None:
        self._list_pools = list_pools
        self._timer = ConditionTimer()

    async def read(self, now: float) -> list[AlertCondition]:
        """Return the conditions as this gateway sees them."""
        self._timer.forget_old(now)
        return [each for pool in self._list_pools() for each in self._judge_pool(pool, now)]

    def _judge_pool(self, pool: Pool, now: float) -> Iterator[AlertCondition]:
        replicas = list(pool.replicas.values())
        statuses = {each.name: each.health.status(time.monotonic()) for each in replicas}
        is_missing = not pool.is_answered_by_others and not _SERVING & set(statuses.values())
        missing_s, is_firing = self._timer.judge(
            ("pool", pool.model), holds=is_missing, limit_s=NO_REPLICA_S, now=now
        )
        yield describe_no_replica(
            {"model": pool.model},
            missing_s,
            is_firing=is_firing,
            states=[f"{name} is {status}" for name, status in statuses.items()],
        )
        for replica in replicas:
            yield self._judge_replica(pool, replica, statuses[replica.name], now)

    def _judge_replica(
        self, pool: Pool, replica: ReplicaEndpoint, status: ReplicaStatus, now: float
    ) -> AlertCondition:
        lost_s, is_firing = self._timer.judge(
            ("replica", replica.name), holds=status in _LOST, limit_s=NOT_HEALED_S, now=now
        )
        reasons = (
            each.reason for each in reversed(pool.status_changes) if each.replica == replica.name
        )
        return describe_not_healed(
            {"model": pool.model, "replica": replica.name},
            lost_s,
            is_firing=is_firing,
            state=f"It is {status}: {next(reasons, '') or 'no reason'}",
        )
