"""Probes of a simulated gateway, by the production's health check of each replica."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from argosy.policy import (
    BLOCK_TOKENS,
    HealthCheck,
    Probe,
    ProbeAnswer,
    ProbeEffect,
    ProbeKind,
    ServerProfile,
    WakeAt,
)
from argosy.policy.placement import CapacityChanged, PlacementReplica
from argosy.twin.gateway import ModelPool, SimulatedGateway
from argosy.twin.replica import SimulatedReplica
from argosy.twin.simulation import Simulation, to_ns

PROFILE = ServerProfile(is_native=True, load_paths=(b"/load",))


class Prober:
    """Sends the probes that health checks ask for, and returns their results."""

    def __init__(
        self,
        simulation: Simulation,
        gateway: SimulatedGateway,
        processes: Mapping[str, SimulatedReplica],
        min_interval_s: float,
    ) -> None:
        self._simulation = simulation
        self._gateway = gateway
        self._processes = processes
        self._min_interval_s = min_interval_s

    def watch(self, replica: PlacementReplica) -> None:
        """Check the health of a replica from now on, while it is in the pool."""
        self._check(replica, HealthCheck(replica.health, replica.load, PROFILE))

    def _check(self, replica: PlacementReplica, check: HealthCheck) -> None:
        if self._find_pool(replica).replicas.get(replica.name) is replica:
            self._follow(replica, check, check.on_tick(self._simulation.now))

    def _follow(
        self, replica: PlacementReplica, check: HealthCheck, effects: list[ProbeEffect]
    ) -> None:
        """Send the probe, or wait for the next check."""
        last, simulation = effects[-1], self._simulation
        if not isinstance(last, Probe):
            self._gateway.handle(CapacityChanged(self._find_pool(replica)))
            wake_at = simulation.now + self._min_interval_s
            if isinstance(last, WakeAt):
                wake_at = max(wake_at, last.at)
            simulation.call_at(to_ns(wake_at), partial(self._check, replica, check))
            return
        process = self._processes[replica.name]
        now = simulation.now
        if process.is_cut:
            simulation.call_later(last.timeout_s, partial(self._fail_probe, replica, check))
        elif process.state == "down":
            self._follow(replica, check, check.on_failure("connection refused", now))
        elif last.kind is ProbeKind.DETECT:
            self._follow(replica, check, check.on_detected(PROFILE, now))
        else:
            if last.kind is ProbeKind.LOAD and not process.is_report_stale:
                _apply_report(replica, process, now)
            answer = ProbeAnswer(status=200, state=process.state)
            self._follow(replica, check, check.on_answer(answer, now))

    def _find_pool(self, replica: PlacementReplica) -> ModelPool:
        return self._gateway.pool_of(self._processes[replica.name].generation)

    def _fail_probe(self, replica: PlacementReplica, check: HealthCheck) -> None:
        self._follow(replica, check, check.on_failure("", self._simulation.now))


def _apply_report(replica: PlacementReplica, process: SimulatedReplica, now: float) -> None:
    """Apply a load report, as the gateway applies that of a native replica."""
    process.settle()
    load, scheduler = replica.load, process.scheduler
    replica.has_reported_speed = True
    replica.prefix_index.resize(process.kv_tokens // BLOCK_TOKENS)
    load.running, load.waiting = len(scheduler.running), scheduler.waiting
    load.queued_tokens, load.max_seqs = scheduler.queued_tokens, scheduler.limits.max_seqs
    load.kv_usage_ratio = process.kv_usage_ratio
    load.prefill_tokens_per_s = process.prefill_tokens_per_s
    load.inter_token_s = process.inter_token_s
    load.reported_at, load.sent_tokens = now, 0
