"""Choice of the node of a Ray cluster on which a replica runs, and the reason why it waits for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from argosy.deployment import LaunchResources

ZONE_LABEL = "ray.io/availability-zone"
"""Label of a node with its zone. Ray's launchers for clouds and Kubernetes set it."""

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives each node."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive."""

    node_id: str
    hostname: str
    address: str
    """IP address."""
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)
    """Resources of the node: `CPU`, `GPU`, `memory` in bytes, and custom ones."""
    available: Mapping[str, float] = field(default_factory=dict)
    """Its resources that nothing had reserved a moment ago."""

    @property
    def zone(self) -> str:
        """Its zone, or an empty string if it has none."""
        return self.labels.get(ZONE_LABEL, "")


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """A replica that has a node."""

    pool: str
    node_id: str


def required_resources(resources: LaunchResources) -> dict[str, float]:
    """Return what a replica reserves on its node, by Ray's names."""
    required = {
        "CPU": resources.cpus or 0.0,
        "GPU": float(resources.accelerators),
        "memory": float(resources.memory_bytes or 0),
        **resources.custom,
    }
    reserved = {name: amount for name, amount in required.items() if amount}
    return reserved or {"memory": 1.0}  # a placement group cannot be empty


def label_selector(resources: LaunchResources) -> dict[str, str]:
    """Return Ray's label selector of the nodes on which a replica may run."""
    selector = dict(resources.labels)
    if resources.zones:
        selector[ZONE_LABEL] = f"in({','.join(resources.zones)})"
    return selector


def node_selector(node: RayNode) -> dict[str, str]:
    """Return Ray's label selector of a single node."""
    return {NODE_ID_LABEL: node.node_id}


def rank_nodes(
    resources: LaunchResources,
    pool: str,
    nodes: Iterable[RayNode],
    placed: Sequence[PlacedReplica],
) -> list[RayNode]:
    """Return the nodes that have room for a replica, best first.

    The zone with the fewest replicas of the pool is the best, of equal ones that which is listed first. In a zone it is
    the node with the fewest replicas of the pool, of equal ones that with the fewest of all pools.
    """
    nodes = list(nodes)
    zones = {node.node_id: node.zone for node in nodes}
    in_zone = Counter(zones.get(each.node_id, "") for each in placed if each.pool == pool)
    of_pool = Counter(each.node_id for each in placed if each.pool == pool)
    of_all = Counter(each.node_id for each in placed)

    def rank(node: RayNode) -> tuple[int, int, int, int, str]:
        listed = resources.zones.index(node.zone) if resources.zones else 0
        zone = in_zone[node.zone]
        return zone, listed, of_pool[node.node_id], of_all[node.node_id], node.node_id

    suitable = [node for node in nodes if _is_eligible(resources, node)]
    return sorted((node for node in suitable if not _missing(resources, node.available)), key=rank)


def explain_wait(resources: LaunchResources, nodes: Iterable[RayNode]) -> str:
    """Return why no node has room, such as `waiting for a GPU on any node of zone a`."""
    eligible = [node for node in nodes if _is_eligible(resources, node)]
    place = resources.place
    if not eligible:
        return f"waiting for a node: the cluster has none{place}"
    large = [node for node in eligible if not _missing(resources, node.total)]
    if not large:
        what = _describe_resources(required_resources(resources))
        return f"waiting for a larger node: none{place} has {what} in all"
    missing = min((_missing(resources, node.available) for node in large), key=len)
    return f"waiting for {_describe_resources(missing)} on any node{place}"


def _is_eligible(resources: LaunchResources, node: RayNode) -> bool:
    """Return whether a replica may run on the node if it has room."""
    is_in_zone = not resources.zones or node.zone in resources.zones
    return is_in_zone and resources.labels.items() <= node.labels.items()


def _missing(resources: LaunchResources, offered: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of which too little is offered, with the amount that is required."""
    required = required_resources(resources)
    return {name: amount for name, amount in required.items() if offered.get(name, 0.0) < amount}


def _describe_resources(amounts: Mapping[str, float]) -> str:
    """Return amounts as text. Without any, the nodes were busy a moment ago."""
    return " and ".join(_describe_amount(*item) for item in amounts.items()) or "room"


def _describe_amount(name: str, amount: float) -> str:
    match name:
        case "memory":
            return f"{amount / 2**30:.4g} GiB of memory"
        case "GPU" if amount == 1:
            return "a GPU"
        case "GPU":
            return f"{amount:g} GPUs"
        case "CPU":
            return f"{amount:g} CPU{'s' if amount != 1 else ''}"
    return f"{amount:g} {name}"
