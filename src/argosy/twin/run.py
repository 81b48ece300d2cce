"""A run of a scenario with one seed, and its result."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from argosy.bench import RunSummary, parse_objectives, summarize
from argosy.policy import Hedging
from argosy.policy.autoscaling import AutoscalerSettings
from argosy.policy.placement import (
    GivingWay,
    PlacementLimits,
    PlacementPool,
    QueueLimits,
)
from argosy.policy.reconciliation import DesiredPool
from argosy.twin.faults import FaultInjector, list_faults
from argosy.twin.fleet import LAUNCHER, POOL, SimulatedFleet
from argosy.twin.gateway import ModelPool, SimulatedGateway
from argosy.twin.rollout import SimulatedRollout
from argosy.twin.scenario import Fault, PoolSettings, Scenario
from argosy.twin.simulation import NS_PER_S, START_NS, Simulation, require
from argosy.twin.workload import SimulatedRequest, list_requests

SETTLE_S = 3600.0
"""Time after the last arrival in which every request has to end."""
SWEEP_EVENTS = 2000
"""Events between two checks of all blocks, which take longer than most events."""


class Plan(NamedTuple):
    """All that happens to a fleet from outside."""

    requests: tuple[SimulatedRequest, ...]
    faults: tuple[Fault, ...]


class TwinResult(msgspec.Struct, kw_only=True):
    """Result of a run."""

    seed: int
    configuration: str
    """Digest of the scenario."""
    trace_hash: str
    """Hash of all that happened. The same seed, configuration and version give the same hash."""
    events: int
    simulated_s: float
    failure: str = ""
    """Invariant that did not hold; empty if all did."""
    summary: RunSummary
    utilisation: float
    """Part of the replicas' time in which they computed steps."""
    replica_hours: float
    cached_fraction: float
    """Part of the prompt tokens that were in a prefix cache."""
    effects: dict[str, int]
    """Attempts and ends of requests by kind."""
    actions: dict[str, int]
    """Actions of the controller by kind."""
    rollout: str
    """State of the last rollout; empty if there was none."""


def make_plan(scenario: Scenario, seed: int) -> Plan:
    """Return the requests and the faults of a run.

    Raises:
        ValueError: The workload is not possible.
        BenchError: A trace cannot be read.
    """
    requests = scenario.requests
    if requests is None:
        requests = tuple(list_requests(scenario.workload, scenario.duration_s, seed))
    return Plan(requests, list_faults(scenario, seed))


def run_scenario(scenario: Scenario, seed: int, plan: Plan | None = None) -> TwinResult:
    """Run a scenario, until all its requests have ended or an invariant fails.

    Args:
        scenario: The scenario.
        seed: Seed of everything that is random.
        plan: Requests and faults in place of those that `make_plan` returns.

    Raises:
        ValueError: The workload or an objective is not possible.
        BenchError: A trace cannot be read.
    """
    plan = make_plan(scenario, seed) if plan is None else plan
    objectives = parse_objectives(scenario.objectives) if scenario.objectives else None
    run = TwinRun(scenario, seed, plan)
    failure = run.run()
    simulation, gateway, fleet = run.simulation, run.gateway, run.fleet
    summary = summarize(gateway.rows, objectives)
    return TwinResult(
        seed=seed,
        configuration=scenario.digest,
        trace_hash=simulation.trace_hash,
        events=simulation.num_events,
        simulated_s=simulation.elapsed_s,
        failure=failure,
        summary=summary,
        utilisation=fleet.busy_s / max(fleet.replica_s, 1e-9),
        replica_hours=fleet.replica_s / 3600.0,
        cached_fraction=(summary.cached_tokens or 0) / max(1, summary.input_tokens),
        effects=dict(sorted(gateway.counts.items())),
        actions=dict(sorted(fleet.num_actions.items())),
        rollout=run.rollout.state,
    )


class TwinRun:
    """Simulation of one run with all its parts."""

    def __init__(self, scenario: Scenario, seed: int, plan: Plan) -> None:
        self.simulation = Simulation(seed)
        pool = scenario.pool
        self.rollout = SimulatedRollout(self.simulation, POOL, scenario.rollout)
        self.fleet = SimulatedFleet(
            self.simulation,
            DesiredPool(
                name=POOL, launcher=LAUNCHER, generation=1, replicas=pool.replicas, max_surge=1
            ),
            limits=scenario.engine.build_limits(),
            cost=scenario.engine.build_cost(),
            fidelity=scenario.fidelity,
            start_s=pool.start_s,
            probe_interval_s=pool.probe_interval_s,
            rollout=self.rollout,
            scaling=_build_scaling(pool),
        )
        self.gateway = SimulatedGateway(
            self.simulation,
            partial(_build_pool, pool),
            self.rollout,
            self.fleet.processes,
            requests=plan.requests,
            duration_s=scenario.duration_s,
            tenants=scenario.workload.tenants,
            placement_limits=PlacementLimits(
                queue=QueueLimits(timeout_s=pool.queue_timeout_s),
                failover_timeout_s=pool.failover_timeout_s,
            ),
        )
        injector = FaultInjector(self.simulation, self.fleet, self.gateway, pool.zones)
        for fault in plan.faults:
            injector.schedule(fault)
        self._until_ns = START_NS + round((scenario.duration_s + SETTLE_S) * NS_PER_S)

    def run(self) -> str:
        """Run to the end, and return the invariant that failed; empty if none did."""
        simulation, gateway = self.simulation, self.gateway
        try:
            self.fleet.start(gateway)
            while simulation.run(self._until_ns, lambda: not gateway.num_expected, SWEEP_EVENTS):
                self._sweep()
            require(not gateway.num_expected, "requests have not ended an hour after the last one")
            self._sweep()
        except AssertionError as error:
            return str(error) or "an assertion failed"
        finally:
            self.fleet.finish()
        return ""

    def _sweep(self) -> None:
        """Check the blocks and sequences of all replicas."""
        for process in self.fleet.processes.values():
            process.scheduler.check_invariants()


def _build_pool(pool: PoolSettings) -> ModelPool:
    return PlacementPool(
        "model",
        (),
        pool.routing_policy,
        None if pool.hedge_after_s is None else Hedging(pool.hedge_after_s),
        GivingWay() if pool.gives_way else None,
    )


def _build_scaling(pool: PoolSettings) -> AutoscalerSettings | None:
    if pool.max_replicas is None:
        return None
    return AutoscalerSettings(min_replicas=pool.min_replicas, max_replicas=pool.max_replicas)
