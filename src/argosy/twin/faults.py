"""Faults of a run: drawn from its seed, and carried out."""

from __future__ import annotations

from functools import partial

from argosy.twin.fleet import SimulatedFleet
from argosy.twin.gateway import SimulatedGateway
from argosy.twin.replica import SimulatedReplica
from argosy.twin.scenario import Fault, Scenario
from argosy.twin.simulation import Simulation, derive_stream

SPOT_NOTICE_S = 20.0
FAULT_PRIORITY = -1
"""Faults come before all else that happens at the same time."""


def list_faults(scenario: Scenario, seed: int) -> tuple[Fault, ...]:
    """Return the declared faults, and those that are drawn from the seed."""
    random_faults, faults = scenario.random_faults, list(scenario.faults)
    if random_faults.per_minute and random_faults.kinds:
        stream = derive_stream(seed, "faults")
        at_s = stream.expovariate(random_faults.per_minute / 60.0)
        while at_s < scenario.duration_s:
            faults.append(
                Fault(
                    kind=stream.choice(random_faults.kinds),
                    at_s=round(at_s, 3),
                    replica=stream.randrange(1000),
                    duration_s=round(1.0 + 30.0 * stream.random(), 3),
                    factor=round(2.0 + 6.0 * stream.random(), 3),
                    fails_to_start=stream.random() < 0.5,
                )
            )
            at_s += stream.expovariate(random_faults.per_minute / 60.0)
    return tuple(faults)


class FaultInjector:
    """Carries out the faults of a run."""

    def __init__(
        self, simulation: Simulation, fleet: SimulatedFleet, gateway: SimulatedGateway
    ) -> None:
        self._simulation = simulation
        self._fleet = fleet
        self._gateway = gateway

    def schedule(self, fault: Fault) -> None:
        """Let a fault happen at its time."""
        self._simulation.call_later(fault.at_s, partial(self._inject, fault), FAULT_PRIORITY)

    def _inject(self, fault: Fault) -> None:
        fleet, simulation = self._fleet, self._simulation
        simulation.trace(f"fault {fault.kind} {fault.replica}")
        match fault.kind:
            case "zone":
                fleet.lose_zone(fault.replica)
            case "region":
                fleet.lose_region(fault.replica)
                self._later(fault, partial(fleet.restore_region, fault.replica))
            case "rollout":
                fleet.declare(1.0, fails_to_start=False)
            case "bad_rollout":
                fleet.declare(fault.factor, fails_to_start=fault.fails_to_start)
            case "clock_skew":
                fleet.clock_offset_s += fault.factor
                self._later(fault, partial(self._restore_clock, fault.factor))
            case _:
                running = fleet.find_running(fault.replica)
                if running is not None:
                    self._inject_into(fault, running)

    def _inject_into(self, fault: Fault, process: SimulatedReplica) -> None:
        match fault.kind:
            case "kill":
                self._fleet.crash(process, "killed")
            case "slow":
                process.slow_down(fault.factor)
                self._later(fault, partial(process.slow_down, 1.0))
            case "stale_metrics":
                process.is_report_stale = True
                self._later(fault, partial(self._restore_metrics, process))
            case "cut":
                process.settle()
                process.is_cut = True
                self._gateway.expect_stall(process)
                self._later(fault, partial(self._restore_link, process))
            case "cache_corruption":
                process.is_cache_corrupt = True
                self._later(fault, partial(self._restore_cache, process))
            case "spot_reclaim":
                self._fleet.reclaim(process, min(fault.duration_s, SPOT_NOTICE_S))
            case _:
                raise AssertionError(fault.kind)

    def _later(self, fault: Fault, action: partial[None]) -> None:
        self._simulation.call_later(fault.duration_s, action, FAULT_PRIORITY)

    def _restore_metrics(self, process: SimulatedReplica) -> None:
        process.is_report_stale = False

    def _restore_cache(self, process: SimulatedReplica) -> None:
        process.is_cache_corrupt = False

    def _restore_link(self, process: SimulatedReplica) -> None:
        process.settle()
        process.is_cut = False
        self._gateway.restore_link(process)

    def _restore_clock(self, seconds: float) -> None:
        self._fleet.clock_offset_s -= seconds
