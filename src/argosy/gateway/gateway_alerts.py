"""Alerts of a gateway without a controller: the conditions that it sees, and the part that evaluates them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from argosy.alerting import (
    STANDALONE_FLEET,
    AlertAdmin,
    AlertLoop,
    AlertRecords,
    AlertSource,
    BackupAlerts,
    BudgetAlerts,
    IncidentKeeper,
    MachineAlerts,
    ObjectiveAlerts,
    OrderBook,
    ReceivedAlerts,
    TrafficWatch,
    read_alerts,
)
from argosy.deployment import FleetControl, GatewayConfig, ObjectiveReader
from argosy.folders import state_folder
from argosy.gateway.event_loop import CoroutineFactory
from argosy.gateway.gateway_part import GatewayPart
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.objective_recorder import ObjectiveRecorder
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
from argosy.policy.detection import CellMinute
from argosy.store import Store

_SERVING = frozenset({ReplicaStatus.READY, ReplicaStatus.BACKOFF, ReplicaStatus.SLEEPING})
_LOST = frozenset({ReplicaStatus.EJECTED, ReplicaStatus.UNREACHABLE, ReplicaStatus.STARTING})


def build_alerting(
    config: GatewayConfig,
    gateway_id: str,
    store: Store | None,
    models: ModelRouter,
    read_new_cells: Callable[[], Awaitable[Sequence[CellMinute]]],
    *,
    fleet_control: FleetControl | None,
    objective_reader: ObjectiveReader | None,
    objectives: ObjectiveRecorder,
) -> tuple[GatewayPart, AlertAdmin]:
    """Return the part that evaluates alerts, which is empty if a controller does, and what operators use.

    Args:
        config: Settings of the gateway.
        gateway_id: Id of this process.
        store: Its store. None for none.
        models: Its models.
        read_new_cells: Returns the minutes of traffic since the last call.
        fleet_control: Control of a fleet whose events belong to incidents.
        objective_reader: Counts of objectives. None without a store.
        objectives: The objectives.
    """
    fleets = None if store is None else store.fleets
    fleet = config.fleet or STANDALONE_FLEET
    orders = OrderBook(fleets, fleet)
    records = AlertRecords(fleets, fleet, gateway_id)
    part = GatewayPart()
    if config.fleet is None:
        tls, tasks = config.tls, list[CoroutineFactory]()
        machine = MachineAlerts(
            None if store is None else store.gateways,
            state_folder(),
            lambda: None if tls is None else Path(tls.certificate),
        )
        watch = TrafficWatch(read_new_cells, fleets, fleet, lambda: config.alerting)
        sources: list[AlertSource] = [
            GatewayAlerts(lambda: models.pools).read,
            machine.read,
            watch.read,
        ]
        alerts: ObjectiveAlerts | None = None
        if objective_reader is not None:
            alerts = ObjectiveAlerts(objective_reader, lambda: objectives.objectives)
            sources.append(alerts.read)
        if store is not None:
            sources.append(ReceivedAlerts(store.fleets, fleet).read)
            sources.append(BackupAlerts(store.fleets).read)
            sources.append(BudgetAlerts(store.ledger, store.limits_and_prices).read)
            events = None if fleet_control is None else (fleet_control.store, fleet_control.name)
            keeper = IncidentKeeper(
                records,
                store,
                fleet,
                watch,
                list_serving=lambda: _list_serving(models.pools),
                objectives=alerts,
                events=events,
            )
            tasks.append(keeper.run)
        tasks.append(AlertLoop(records, orders, sources, lambda: config.alerting).run)
        part = GatewayPart(
            tasks=tasks, read_gauges=lambda: {"firing_alerts": records.state.count_firing()}
        )
    if fleets is None:
        return part, AlertAdmin(orders, lambda: records.state)
    return part, AlertAdmin(orders, partial(read_alerts, fleets, fleet))


def _list_serving(pools: Sequence[Pool]) -> set[str]:
    now = time.monotonic()
    return {
        each.name
        for pool in pools
        for version in pool.all_versions
        for each in version.replicas.values()
        if each.health.status(now) in _SERVING
    }


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
