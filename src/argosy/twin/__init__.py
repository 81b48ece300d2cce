"""Digital twin: the production's decisions under a virtual clock, on a model of the hardware.

A `Scenario` and a seed determine the requests and the faults of a run (`make_plan`). `run_scenario` drives them through
a `SimulatedGateway`, a `SimulatedFleet` and its replicas. These perform effects by events of a `Simulation`, while all
decisions are those of `argosy.policy` and of the engine's `Scheduler`. Each step has the price of a `StepCost`. The
result has the measurements of a benchmark, and a hash of all that happened. The package `hardware` prices the steps of
a replica on an accelerator, and `capacity` finds out how many of them a load needs.
"""

from argosy.twin.change_forecast import forecast_change, show_value
from argosy.twin.fitting import FittedCost, fit_cost, fit_request_time, read_steps
from argosy.twin.ledger_replay import convert_records
from argosy.twin.linear_cost import LinearStepCost
from argosy.twin.result import TwinResult
from argosy.twin.run import Plan, TwinRun, make_plan, run_scenario, run_with_intervals
from argosy.twin.scenario import (
    Engine,
    Fault,
    PoolSettings,
    Scenario,
    change_scenario,
    read_scenario,
    write_scenario,
)
from argosy.twin.shrinking import shrink
from argosy.twin.simulation import derive_stream
from argosy.twin.step_cost import StepCost
from argosy.twin.workload import Lengths, SimulatedRequest, Span, Tenant, Workload
