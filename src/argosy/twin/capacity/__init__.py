"""Planner of capacity and cost on the model of the hardware.

A `CapacityQuestion` is a load with objectives. The answer of `plan_capacity` is a `CapacityPlan`, whose pools are
ranked by cost. The `CostBook` of `analyse_cost` has all other costs of a fleet, and what measures would save. A plan is
written as a page by `render_plan_page`, as the declaration of a fleet by `render_fleet_file`, and as a scenario of the
twin by `build_scenario`.
"""

from argosy.twin.capacity.cost_book import CostBook, CostLine, Saving, TotalCostInputs, analyse_cost
from argosy.twin.capacity.planner import CapacityPlan, PlannedPool, RejectedPool, plan_capacity
from argosy.twin.capacity.question import (
    CapacityQuestion,
    LatencyObjective,
    daily_rate,
    parse_objective,
)
from argosy.twin.capacity.reports import (
    PLAN_COLUMNS,
    build_scenario,
    plan_cells,
    render_fleet_file,
    render_plan_page,
)
