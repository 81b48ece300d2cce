"""A run of a scenario with one seed, and its result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from argosy.bench import PERCENTILES, MetricName, RunSummary, parse_objectives, summarize
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
from argosy.twin.fluid import run_fluid
from argosy.twin.gateway import CANARY, ModelPool, SimulatedGateway
from argosy.twin.result import TwinResult
from argosy.twin.rollout import SimulatedRollout
from argosy.twin.scenario import Fault, PoolSettings, Scenario
from argosy.twin.simulation import NS_PER_S, START_NS, Simulation, require
from argosy.twin.workload import SimulatedRequest, list_requests

SETTLE_S = 3600.0
"""Time after the last arrival in which every request has to end."""
HEAL_S = 600
"""Time after the last fault in which the fleet has to serve as declared. A rollout without requests takes a while."""
HEAL_EVENTS = 50
"""Events between two looks at the fleet meanwhile."""
INTERVAL_METRICS: tuple[MetricName, ...] = ("ttft", "tpot", "e2e")
SWEEP_EVENTS = 2000
"""Events between two checks of all blocks, which take longer than most events."""


class Plan(NamedTuple):
    """All that happens to a fleet from outside."""

    requests: tuple[SimulatedRequest, ...]
    faults: tuple[Fault, ...]


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
        ValueError: The workload or an objective is not possible, or fluid fidelity has no such scenario.
        BenchError: A trace cannot be read.
    """
    if scenario.fidelity == "fluid":
        return run_fluid(scenario, seed)
    plan = make_plan(scenario, seed) if plan is None else plan
    objectives = parse_objectives(scenario.objectives) if scenario.objectives else None
    run = TwinRun(scenario, seed, plan)
    failure = run.run()
    simulation, gateway, fleet = run.simulation, run.gateway, run.fleet
    summary = summarize(gateway.rows, objectives)
    result = TwinResult(
        seed=seed,
        configuration=scenario.digest,
        trace_hash="",
        events=0,
        simulated_s=0.0,
        summary=summary,
        utilisation=fleet.busy_s / max(fleet.replica_s, 1e-9),
        replica_hours=fleet.replica_s / 3600.0,
        cached_fraction=(summary.cached_tokens or 0) / max(1, summary.input_tokens),
        effects=dict(sorted(gateway.counts.items())),
        actions=dict(sorted(fleet.num_actions.items())),
        rollout=run.rollout.state,
    )
    result.failure = failure or run.heal()
    result.trace_hash, result.events = simulation.trace_hash, simulation.num_events
    result.simulated_s = simulation.elapsed_s
    return result


def run_with_intervals(scenario: Scenario, seed: int) -> TwinResult:
    """Run a scenario, and again with each of its `cost_samples`, whose results give the intervals.

    Raises:
        ValueError: The workload or an objective is not possible.
        BenchError: A trace cannot be read.
    """
    if scenario.fidelity == "fluid" or not scenario.engine.cost_samples:
        return run_scenario(scenario, seed)
    plan = make_plan(scenario, seed)
    result = run_scenario(scenario, seed, plan)
    samples = [
        _list_figures(
            run_scenario(
                replace(scenario, engine=replace(scenario.engine, cost=cost)), seed, plan
            ).summary
        )
        for cost in scenario.engine.cost_samples
    ]
    if len(samples) > 1:
        result.intervals = {
            name: 1.96 * statistics.stdev(each[name] for each in samples) for name in samples[0]
        }
    return result


def _list_figures(summary: RunSummary) -> dict[str, float]:
    figures = {"output_token_rate": summary.output_token_rate}
    for metric in INTERVAL_METRICS:
        stats = summary.latency[metric]
        figures |= {f"{metric}.{name}": getattr(stats, name) for name in ("mean", *PERCENTILES)}
    return figures


class TwinRun:
    """Simulation of one run with all its parts."""

    def __init__(self, scenario: Scenario, seed: int, plan: Plan) -> None:
        self.simulation = Simulation(seed)
        pool = scenario.pool
        self.rollout = SimulatedRollout(self.simulation, POOL, scenario.rollout)
        self.fleet = SimulatedFleet(
            self.simulation,
            pool,
            DesiredPool(
                name=POOL, launcher=LAUNCHER, generation=1, replicas=pool.replicas, max_surge=1
            ),
            limits=scenario.engine.build_limits(),
            batching=scenario.engine.build_policy(),
            cost=scenario.engine.build_cost(),
            fidelity="exact" if scenario.fidelity == "exact" else "macro",
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
            request_s=scenario.engine.request_s,
        )
        injector = FaultInjector(self.simulation, self.fleet, self.gateway)
        for fault in plan.faults:
            injector.schedule(fault)
        ends = [each.at_s + each.duration_s for each in plan.faults]
        self._healed_ns = START_NS + round(max(ends, default=0.0) * NS_PER_S)
        self._until_ns = START_NS + round((scenario.duration_s + SETTLE_S) * NS_PER_S)

    def run(self) -> str:
        """Run until all requests have ended, and return the invariant that failed; empty if none did."""
        failure = self._check(self._serve)
        self.fleet.finish()
        return failure

    def heal(self) -> str:
        """Run until the faults are over and the fleet serves again, and return the invariant that failed."""
        return self._check(self._await_liveness)

    def _check(self, part: Callable[[], None]) -> str:
        try:
            part()
            self._sweep()
        except AssertionError as error:
            return str(error) or "an assertion failed"
        return ""

    def _serve(self) -> None:
        simulation, gateway = self.simulation, self.gateway
        self.fleet.start(gateway)
        while gateway.num_expected and simulation.run(self._until_ns, SWEEP_EVENTS):
            self._sweep()
        require(not gateway.num_expected, "requests have not ended an hour after the last one")

    def _await_liveness(self) -> None:
        simulation, fleet = self.simulation, self.fleet
        while simulation.run(self._healed_ns, SWEEP_EVENTS):
            pass
        until_ns = max(simulation.now_ns, self._healed_ns) + HEAL_S * NS_PER_S
        while not fleet.is_settled() and simulation.run(until_ns, HEAL_EVENTS):
            pass
        require(fleet.is_settled(), f"the fleet has not recovered {HEAL_S} s after the last fault")
        self.gateway.send_canary()
        while simulation.run(until_ns, SWEEP_EVENTS):
            pass
        row = self.gateway.metering.ledger.get(CANARY)
        status = "unfinished" if row is None else row.status
        require(status == "completed", f"a request after the last fault is {status}")

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
