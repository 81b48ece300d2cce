"""Calls of Ray by the registry of a fleet: nodes, placement groups, supervisor actors and records.

All functions block until Ray's global control service has answered. Call them in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from argosy.deployment import LaunchResources
from argosy.fleet.launchers.ray_placement import RayNode, required_resources
from argosy.fleet.launchers.ray_supervisor import ReplicaSupervisor

NAME_TIMEOUT_S = 10.0
"""Time in which Ray frees the name of a killed actor."""
NAME_POLL_INTERVAL_S = 0.05
KV_NAMESPACE = "argosy"


def list_nodes() -> dict[str, RayNode]:
    """Return the nodes that are alive, by id."""
    available = ray._private.state.available_resources_per_node()  # noqa: SLF001 - has no public name
    return {
        node["NodeID"]: RayNode(
            node_id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            labels=node["Labels"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def create_group(
    replica: str, resources: LaunchResources, selector: Mapping[str, str]
) -> PlacementGroup:
    """Create the placement group of a replica on a node that a label selector selects."""
    return placement_group(
        [required_resources(resources)],
        name=replica,
        lifetime="detached",
        bundle_label_selector=[dict(selector)] if selector else None,
    )


def find_group(replica: str) -> PlacementGroup | None:
    """Return the placement group of a replica, or None if it has none."""
    try:
        return get_placement_group(replica)
    except ValueError:
        return None


def node_of_group(group: PlacementGroup) -> str:
    """Return the id of the node on which a placement group is."""
    node_id: str = placement_group_table(group)["bundles_to_node_id"][0]
    return node_id


def remove_group(group: PlacementGroup) -> None:
    """Release what a placement group has reserved."""
    remove_placement_group(group)


def create_supervisor(
    namespace: str, replica: str, resources: LaunchResources, group: PlacementGroup, node: RayNode
) -> ActorHandle:
    """Create the supervisor actor of a replica in its placement group."""
    required = required_resources(resources)
    actor = ray.remote(ReplicaSupervisor).options(
        name=replica,
        lifetime="detached",
        num_cpus=required.pop("CPU", 0),
        num_gpus=required.pop("GPU", 0),
        memory=required.pop("memory", None),
        resources=required,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
    )
    deadline = time.monotonic() + NAME_TIMEOUT_S
    while True:
        try:
            return actor.remote(namespace, replica, node.node_id, node.address)
        except ValueError:  # the earlier actor of this name was killed a moment ago
            if time.monotonic() > deadline:
                raise
            time.sleep(NAME_POLL_INTERVAL_S)


def find_supervisor(replica: str) -> ActorHandle | None:
    """Return the supervisor actor of a replica, or None if there is none that is alive."""
    try:
        return ray.get_actor(replica)
    except ValueError:
        return None


def kill_supervisor(supervisor: ActorHandle) -> None:
    """Kill a supervisor actor, and with it the replica."""
    ray.kill(supervisor)


class RecordStore:
    """Small records of one fleet in Ray's global control service. They outlive the registry, but not the head node.

    Args:
        namespace: Ray namespace of the fleet.
    """

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{namespace}/"

    def read_all(self) -> Mapping[str, bytes]:
        """Return all records by key."""
        keys = [key.decode() for key in _internal_kv_list(self._prefix, namespace=KV_NAMESPACE)]
        values = {
            key.removeprefix(self._prefix): _internal_kv_get(key, namespace=KV_NAMESPACE)
            for key in keys
        }
        return {key: value for key, value in values.items() if value is not None}

    def write(self, key: str, value: bytes) -> None:
        """Write a record."""
        _internal_kv_put(self._prefix + key, value, namespace=KV_NAMESPACE)

    def delete(self, key: str) -> None:
        """Delete a record."""
        _internal_kv_del(self._prefix + key, namespace=KV_NAMESPACE)
