"""Control plane of a declared fleet.

The store keeps each applied declaration as a numbered revision. A `Controller` that leads the fleet reads it as a
`DeclaredFleet`. In its `LeaderTerm` it observes the replicas through launchers and health checks, and carries out what
`policy.reconciliation` decides. A `FleetAutoscaler` decides how many replicas a pool has, by what `policy.autoscaling`
makes of the gateways' reports. `FleetRollouts` divides a pool between two versions, as `policy.rollout` decides. A
`GatewayPublisher` publishes the replicas in the rotation to the gateways. With
`plan_declaration` operators see what a declaration would change, and with
`read_fleet_status` what it recorded; a `FleetControl` shows it in the gateway's admin API, and
stores what operators decide there. A keeper (`argosy.controller_keeper`) restarts the controller on
machines without systemd.
"""

from argosy.deployment import (
    SCALING_DECISION,
    FleetControl,
    FleetPlan,
    FleetStatus,
    PoolStatus,
    ReplicaRecord,
    RolloutReport,
    RolloutStatus,
    abort_route,
    append_command,
    apply_declaration,
    decode_records,
    describe_change,
    gateway_url,
    is_rejected,
    parse_declaration,
    plan_declaration,
    pool_digests,
    read_fleet_status,
    read_rollouts,
    roll_back_route,
    send_command,
    set_replicas,
    stop_everything,
)
from argosy.fleet.control.controller import DEFAULT_LEASE_S, Controller
from argosy.fleet.control.environment import check_launchers, fleet_folder, open_launcher
from argosy.fleet.control.fleet_context import FleetContext
from argosy.fleet.control.leadership import process_holder
from argosy.fleet.control.used_models import UsedModels, find_used_models

__all__ = [
    "DEFAULT_LEASE_S",
    "SCALING_DECISION",
    "Controller",
    "FleetContext",
    "FleetControl",
    "FleetPlan",
    "FleetStatus",
    "PoolStatus",
    "ReplicaRecord",
    "RolloutReport",
    "RolloutStatus",
    "UsedModels",
    "abort_route",
    "append_command",
    "apply_declaration",
    "check_launchers",
    "decode_records",
    "describe_change",
    "find_used_models",
    "fleet_folder",
    "gateway_url",
    "is_rejected",
    "open_launcher",
    "parse_declaration",
    "plan_declaration",
    "pool_digests",
    "process_holder",
    "read_fleet_status",
    "read_rollouts",
    "roll_back_route",
    "send_command",
    "set_replicas",
    "stop_everything",
]
