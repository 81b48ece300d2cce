"""Autoscaling of the pools of a fleet: observes demand and supply, decides, and remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from argosy.deployment import SCALING_DECISION, PoolConfig, ReplicaRecord, ScalingRecord
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.replica_monitor import ReplicaHealthReading
from argosy.fleet.control.term_journal import TermJournal
from argosy.gateway import DemandReport, ModelDemand
from argosy.policy.autoscaling import (
    ArrivedTokens,
    Autoscaler,
    AutoscalerSettings,
    CapacityEstimator,
    ManualScale,
    PoolObservation,
    ReplicaReport,
    ScalingDecision,
)
from argosy.policy.reconciliation import ReplicaPhase
from argosy.protocol import LoadResponse

MAX_FIRST_SECONDS = 5
"""Seconds of a gateway's past that count when it is first seen."""
DECISION_INTERVAL_S = 5.0
DEFAULT_START_S = 120.0
"""Expected time from the start of a replica until it serves, before the first one has started."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


@dataclass(slots=True)
class FleetDemand:
    """Demand for one model at all gateways, since the last time."""

    arrived: list[float] = field(default_factory=list)
    """Tokens that arrived in each second, oldest first."""
    served_tokens: float = 0.0
    active_requests: int = 0
    """Requests in the queues or at replicas."""
    queued_requests: int = 0
    queued_tokens: float = 0.0
    queue_age_s: float = 0.0


class DemandReader:
    """Reads each second of each gateway once, although gateways count seconds by clocks of their own."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        """Number of the last second that was read of each gateway, by id."""

    def read(self, reports: Mapping[str, DemandReport]) -> dict[str, FleetDemand]:
        """Return the demand in the new seconds, by model.

        It takes the same number of seconds from each gateway, and leaves further ones for the next time.
        """
        available: dict[str, int] = {}
        for gateway, report in reports.items():
            reported = min((len(model.arrived) for model in report.models), default=0)
            unread = report.second - self._read.get(gateway, report.second - MAX_FIRST_SECONDS)
            available[gateway] = max(0, min(unread, reported))
        seconds = min(available.values(), default=0)
        demands: dict[str, FleetDemand] = {}
        for gateway, report in reports.items():
            begin = -available[gateway]
            for model in report.models:
                demand = demands.setdefault(model.model, FleetDemand([0.0] * seconds))
                _add(demand, model, begin, seconds)
        self._read = {
            gateway: report.second - available[gateway] + seconds
            for gateway, report in reports.items()
        }
        return demands


def _add(demand: FleetDemand, model: ModelDemand, begin: int, seconds: int) -> None:
    if seconds:
        first = len(model.arrived) + begin
        for index, tokens in enumerate(model.arrived[first : first + seconds]):
            demand.arrived[index] += tokens
        demand.served_tokens += sum(model.served[first : first + seconds])
    demand.active_requests += model.active_requests
    demand.queued_requests += model.queued_requests
    demand.queued_tokens += model.queued_tokens
    demand.queue_age_s = max(demand.queue_age_s, model.queue_age_s)


class FleetAutoscaler:
    """Autoscalers of the pools that declare one. Not thread-safe: use it from one event loop.

    Args:
        journal: The term, whose records it updates. Each decision that differs from the one before is an event.
    """

    def __init__(
        self, journal: TermJournal, observer: FleetObserver, publisher: GatewayPublisher
    ) -> None:
        self._journal = journal
        self._records = journal.records
        self._observer = observer
        self._publisher = publisher
        self._reader = DemandReader()
        self._decided_at = float("-inf")
        self._revision = 0
        """Number of the revision that the last decisions are about."""
        self._rollouts: Mapping[str, bool] = {}

    def decide(self, declared: DeclaredFleet, rollouts: Mapping[str, bool], now: float) -> None:
        """Decide about all pools: at an interval, after each change of the declaration, and for waiting requests.

        `rollouts` says whether a rollout runs, for each pool that changes versions by rollouts.
        """
        self._rollouts = rollouts
        is_due = self._revision != declared.number or now - self._decided_at >= DECISION_INTERVAL_S
        if not (is_due or self._must_wake(declared)):
            return
        self._revision, self._decided_at = declared.number, now
        pools = [pool for pool in declared.config.pools if pool.autoscaling.mode != "off"]
        scaling = self._records.scaling
        for name in scaling.keys() - {pool.name for pool in pools}:
            del scaling[name]
        if not pools:
            return
        reports = self._find_reports()
        demands = {} if reports is None else self._reader.read(reports)
        for pool in pools:
            self._decide_pool(declared, pool, demands.get(pool.model), now)

    def _must_wake(self, declared: DeclaredFleet) -> bool:
        """Return whether requests have arrived for a pool without replicas."""
        stopped = {
            pool.model
            for pool in declared.config.pools
            if pool.scales_to_zero
            and pool.name in self._records.scaling
            and not self._records.scaling[pool.name].target
        }
        return any(model in stopped for model in self._publisher.waiting_models)

    def desired_counts(self, declared: DeclaredFleet) -> Mapping[str, int]:
        """Return the number of replicas of the pools for which an autoscaler decides."""
        return {
            pool.name: self._records.scaling[pool.name].target
            for pool in declared.config.pools
            if pool.autoscaling.mode == "on" and pool.name in self._records.scaling
        }

    def published_counts(self) -> Mapping[str, int]:
        """Return the number of replicas that each autoscaler wants, also if it is only advisory."""
        decisions = {
            name: record.state.last_decision for name, record in self._records.scaling.items()
        }
        return {
            name: decision.recommended if decision.owner == "declaration" else decision.target
            for name, decision in sorted(decisions.items())
            if decision is not None
        }

    def _find_reports(self) -> Mapping[str, DemandReport] | None:
        """Return the report of each gateway; None if one is missing, or there is no gateway."""
        reports: dict[str, DemandReport] = {}
        for gateway, status in self._publisher.statuses.items():
            if status is None or status.demand is None:
                return None
            reports[gateway] = status.demand
        return reports or None

    def _decide_pool(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        demand: FleetDemand | None,
        now: float,
    ) -> None:
        settings = _build_settings(pool)
        record = self._records.scaling.get(pool.name)
        if record is None:
            record = ScalingRecord(pool=pool.name, target=self._count_present(pool))
            self._records.scaling[pool.name] = record
        if pool.autoscaling.mode != "on":
            record.target = pool.initial_replicas
        observation = self._observe(declared, pool, record, demand, now)
        has_metrics = observation.find_defect(settings.stale_after_s) is None
        last, had_metrics = record.state.last_decision, record.has_metrics
        autoscaler = Autoscaler(settings, record.state)
        decision = autoscaler.decide(observation)
        record.target, record.has_metrics = decision.target, has_metrics
        if last is None or had_metrics != has_metrics or _result(decision) != _result(last):
            self._report(pool.name, decision)

    def _report(self, pool: str, decision: ScalingDecision) -> None:
        log.info("scaling_decision", pool=pool, target=decision.target, reason=decision.reason)
        arithmetic = msgspec.json.encode(decision.arithmetic).decode()
        self._journal.record_event(
            SCALING_DECISION, pool, reason=decision.reason, outcome=arithmetic
        )

    def _observe(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        record: ScalingRecord,
        demand: FleetDemand | None,
        now: float,
    ) -> PoolObservation:
        members = self._members(pool)
        ready = [each for each in members if each.phase is ReplicaPhase.READY and each.in_rotation]
        sleeping = [
            each for each in members if each.phase is ReplicaPhase.SLEEPING and each.in_rotation
        ]
        failing = sum(each.phase is ReplicaPhase.FAILED for each in members)
        readings = [self._observer.reading(each.name) for each in ready]
        needs_load = declared.check_paths(pool.name).load is not None
        loads = [each.load for each in readings if each is not None and each.load is not None]
        metrics_age_s = self._find_age(readings, now)
        if demand is None or (needs_load and len(loads) < len(ready)):
            metrics_age_s = None
        demand = demand or FleetDemand()
        return PoolObservation(
            at=now,
            desired_replicas=record.target,
            ready_replicas=len(ready),
            failing_replicas=min(failing, max(0, record.target - len(ready) - len(sleeping))),
            sleeping_replicas=len(sleeping),
            wake_s=max((self._wake_s(each.name) for each in sleeping), default=0.0),
            arrivals=tuple(ArrivedTokens(tokens, 1.0) for tokens in demand.arrived),
            queued_requests=demand.queued_requests,
            queued_tokens=demand.queued_tokens,
            queue_age_s=demand.queue_age_s,
            running_requests=max(
                demand.active_requests, sum(load.running + load.waiting for load in loads)
            ),
            kv_used_replicas=sum(
                load.kv_blocks_used / load.kv_blocks_total for load in loads if load.kv_blocks_total
            ),
            capacity_tokens_per_s=pool.autoscaling.tokens_per_s
            or _learn_capacity(declared, record, loads, demand),
            startup_s=self._records.expected_start_s(declared.source(pool.name)) or DEFAULT_START_S,
            metrics_age_s=metrics_age_s,
            rollout_in_progress=self._rollouts.get(
                pool.name,
                any(each.generation != declared.generation(pool.name) for each in members),
            ),
            manual_scale=None
            if pool.replicas is None
            else ManualScale(replicas=pool.replicas, set_by="an operator"),
        )

    def _members(self, pool: PoolConfig) -> list[ReplicaRecord]:
        return [each for each in self._records.replicas.values() if each.pool == pool.name]

    def _count_present(self, pool: PoolConfig) -> int:
        """Return the number of replicas to begin with: those that run, so that the first decision stops none."""
        ending = {ReplicaPhase.DRAINING, ReplicaPhase.STOPPED}
        present = sum(each.phase not in ending for each in self._members(pool)) - pool.spares
        return min(max(present, pool.initial_replicas), pool.max_replicas or pool.initial_replicas)

    def _wake_s(self, replica: str) -> float:
        """Return how long a replica took to wake up last; 0 if it has not, or is not observed."""
        reading = self._observer.reading(replica)
        return 0.0 if reading is None or reading.load is None else reading.load.wake_s

    def _find_age(
        self, readings: Sequence[ReplicaHealthReading | None], now: float
    ) -> float | None:
        """Return the age of the oldest report of a replica or gateway; None if one is missing."""
        age_s = self._publisher.status_age_s
        for reading in readings:
            if reading is None or reading.last_response_at is None:
                return None
            age_s = max(age_s, now - reading.last_response_at)
        return age_s


def _learn_capacity(
    declared: DeclaredFleet,
    record: ScalingRecord,
    loads: Sequence[LoadResponse],
    demand: FleetDemand,
) -> float | None:
    """Add the reports of the replicas, and return the capacity of one as far as it is known."""
    objectives = declared.config.objectives
    estimator = CapacityEstimator(objectives.ttft_p95_s, objectives.itl_p95_s, record.capacity)
    running, seconds = sum(load.running for load in loads), len(demand.arrived)
    if seconds and running:
        # Gateways do not say which replica served the tokens. Alike replicas share them by their running requests.
        estimator.add(
            ReplicaReport(
                tokens_per_s=demand.served_tokens / seconds * load.running / running,
                running=load.running,
                max_running=load.max_seqs,
                inter_token_s=load.decode_s,
                ttft_s=load.queued_tokens / load.prefill_tokens_per_s
                if load.prefill_tokens_per_s
                else 0.0,
            )
            for load in loads
        )
    record.capacity = estimator.state
    return estimator.tokens_per_s


def _build_settings(pool: PoolConfig) -> AutoscalerSettings:
    assert pool.min_replicas is not None  # noqa: S101 - the declaration is valid
    assert pool.max_replicas is not None  # noqa: S101 - the declaration is valid
    return AutoscalerSettings(
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        spares=pool.spares,
        schedule=tuple(each.to_window() for each in pool.autoscaling.schedules),
        is_advisory=pool.autoscaling.mode == "advisory",
        spare_fraction=pool.autoscaling.spare_fraction,
        down_window_s=pool.autoscaling.down_window_s,
        idle_s=pool.autoscaling.scale_to_zero_after_s,
    )


def _result(decision: ScalingDecision) -> tuple[int, int, str]:
    return decision.target, decision.recommended, decision.owner
