"""Control plane of a declared fleet.

The store keeps each applied declaration as a numbered revision. A `Controller` that leads the fleet reads it as a
`DeclaredFleet`. In its `LeaderTerm` it observes the replicas through launchers and health checks, and carries out what
`policy.reconciliation` decides. A `FleetAutoscaler` decides how many replicas a pool has, by what `policy.autoscaling`
makes of the gateways' reports. `FleetRollouts` divides a pool between two versions, as `policy.rollout` decides. A
`GatewayPublisher` publishes the replicas in the rotation to the gateways. What operators see and decide is in
`argosy.deployment`. A keeper (`argosy.controller_keeper`) restarts the controller on machines without systemd.
"""

from argosy.fleet.control.controller import DEFAULT_LEASE_S, Controller
from argosy.fleet.control.environment import (
    check_launchers,
    check_sources,
    fleet_folder,
    open_launcher,
    read_capacity,
)
from argosy.fleet.control.fleet_incidents import (
    read_accepted_versions,
    read_pool_versions,
    roll_back,
)
from argosy.fleet.control.leadership import is_gone, process_holder
from argosy.fleet.control.replica_monitor import fetch_awake_bytes
from argosy.fleet.control.term_journal import FleetContext
from argosy.fleet.control.used_models import UsedModels, find_used_models
