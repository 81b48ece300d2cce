"""Ray without a cluster: choice of nodes and reasons to wait, and failures of the launcher."""

from __future__ import annotations

import pytest

from argosy.deployment import LaunchResources
from argosy.fleet.launchers import LaunchError, RayLauncher
from argosy.fleet.launchers.ray_placement import (
    ZONE_LABEL,
    PlacedReplica,
    RayNode,
    explain_wait,
    label_selector,
    rank_nodes,
    required_resources,
)


def node(name: str, zone: str, *, free_gpus: float = 2, free_cpus: float = 8) -> RayNode:
    """Return a node of 8 CPUs and 2 GPUs."""
    return RayNode(
        node_id=name,
        hostname=name,
        address="10.0.0.1",
        labels={ZONE_LABEL: zone, "disk": "nvme" if zone == "a" else "hdd"},
        total={"CPU": 8, "GPU": 2, "memory": 2**35},
        available={"CPU": free_cpus, "GPU": free_gpus, "memory": 2**34},
    )


NODES = [node("a1", "a"), node("a2", "a"), node("b1", "b")]


@pytest.mark.parametrize(
    ("placed", "zones", "expected"),
    [
        ([], (), ["a1", "a2", "b1"]),
        ([], ("b", "a"), ["b1", "a1", "a2"]),
        ([("p", "b1")], ("b", "a"), ["a1", "a2", "b1"]),
        ([("p", "b1"), ("p", "a1")], ("b", "a"), ["b1", "a2", "a1"]),
        ([("other", "a1"), ("other", "b1")], ("a", "b"), ["a2", "a1", "b1"]),
        ([], ("c",), []),
    ],
)
def test_nodes_are_ranked_by_zone_then_by_replicas(
    placed: list[tuple[str, str]], zones: tuple[str, ...], expected: list[str]
) -> None:
    replicas = [PlacedReplica(*each) for each in placed]
    ranked = rank_nodes(LaunchResources(accelerators=1, zones=zones), "p", NODES, replicas)
    assert [each.node_id for each in ranked] == expected


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"accelerators": 1, "zones": ("a",)}, "waiting for a GPU on any node of zone a"),
        (
            {"accelerators": 2, "zones": ("a", "b")},
            "waiting for 2 GPUs on any node of zone a or b",
        ),
        ({"accelerators": 1, "cpus": 7.5}, "waiting for a GPU on any node"),
        ({"cpus": 7.5}, "waiting for 7.5 CPUs on any node"),
        (
            {"memory_bytes": 3 * 2**33, "labels": {"disk": "nvme"}},
            "waiting for 24 GiB of memory on any node with disk=nvme",
        ),
        ({"accelerators": 4}, "waiting for a larger node: none has 4 GPUs in all"),
        ({"custom": {"board": 1.0}}, "waiting for a larger node: none has 1 board in all"),
        ({"zones": ("c",)}, "waiting for a node: the cluster has none of zone c"),
        ({}, "waiting for room on any node"),
    ],
)
def test_reason_names_what_is_missing(resources: dict[str, object], reason: str) -> None:
    busy = [node("a1", "a", free_gpus=0), node("b1", "b", free_gpus=0, free_cpus=1)]
    if "accelerators" not in resources:
        busy = [node("a1", "a", free_cpus=1), node("b1", "b", free_cpus=1)]
    elif "cpus" in resources:
        busy = [node("a1", "a", free_gpus=0)]
    wanted = LaunchResources(**resources)  # type: ignore[arg-type]
    assert explain_wait(wanted, busy) == reason


def test_requirements_by_names_of_ray() -> None:
    resources = LaunchResources(
        accelerators=1,
        cpus=0.5,
        memory_bytes=1024,
        zones=("a", "b"),
        labels={"disk": "nvme"},
        custom={"board": 1.0},
    )
    assert required_resources(resources) == {"CPU": 0.5, "GPU": 1, "memory": 1024, "board": 1}
    assert required_resources(LaunchResources()) == {"memory": 1}, "no group may be empty"
    assert label_selector(resources) == {"disk": "nvme", ZONE_LABEL: "in(a,b)"}


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=r"pip install 'argosy\[ray\]'"):
        RayLauncher("argosy-demo")


async def test_unreachable_cluster_is_refused() -> None:
    launcher = RayLauncher("argosy-demo", "127.0.0.1:1")
    with pytest.raises(
        LaunchError, match=r"the Ray cluster 127\.0\.0\.1:1 cannot be used: nothing listens there"
    ):
        await launcher.connect()
    with pytest.raises(LaunchError, match="cannot be used"):
        await launcher.list_replicas()
    await launcher.close()
