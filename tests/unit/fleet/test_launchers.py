"""Launchers without their environments: devices and nodes for replicas, and why one waits or has exited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.deployment import LaunchResources
from argosy.fleet import ReplicaGroup, group_replicas, usable_gpus
from argosy.fleet.device_assignment import visible_gpus
from argosy.fleet.launchers import LaunchError, RayLauncher
from argosy.fleet.launchers.kubernetes_status import (
    ReplicaRunRecord,
    describe_pod,
    find_pod,
    follow_run,
)
from argosy.fleet.launchers.local_start import choose_cpus
from argosy.fleet.launchers.ray_placement import (
    ZONE_LABEL,
    PlacedReplica,
    RayNode,
    explain_wait,
    label_selector,
    rank_nodes,
    required_resources,
)
from argosy.fleet.launchers.replica_folder import LaunchRecord, ReplicaFolder, describe_replica
from argosy.process_monitor import ProcessStatus

RECORD = LaunchRecord(
    name="a-1-0",
    pool="a",
    generation=1,
    ordinal=0,
    attempt=1,
    started_at=0.0,
    url=None,
    port=None,
    socket=None,
    gpus=(),
    cpus=(),
)


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2", ("2",)),
        ("3, 1", ("3", "1")),
        ("1,-1,2", ("1",)),
        ("0,7,1", ("0",)),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "1")),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)  # fmt: skip
def test_visible_gpus_follow_cuda_visible_devices(
    variable: str | None, visible: tuple[str, ...]
) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, lambda: 4) == visible


def test_cpu_replicas_use_no_gpu() -> None:
    assert usable_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == ()
    assert usable_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == ("GPU-1",)


def test_each_replica_gets_its_own_gpu() -> None:
    assert group_replicas(2, ["4", "5", "6"], "own") == [ReplicaGroup(2, accelerators=1)]
    with pytest.raises(ValueError, match="start at most 2, or let them share with --gpus shared"):
        group_replicas(3, ["0", "1"], "own")


@given(replicas=st.integers(1, 20), count=st.integers(0, 8))
def test_shared_gpus_are_divided_evenly(replicas: int, count: int) -> None:
    groups = group_replicas(replicas, [str(number) for number in range(count)], "shared")
    assert sum(group.num_replicas for group in groups) == replicas
    for group in groups:
        has_own_gpu = replicas <= count
        assert (group.accelerators == 1) == has_own_gpu
        assert (group.shared_gpu is None) == (has_own_gpu or not count)
        assert group.colocated_replicas == (0 if has_own_gpu else group.num_replicas - 1)
        assert has_own_gpu or group.num_replicas <= -(-replicas // max(1, count))


@pytest.mark.parametrize(
    ("cpus", "used", "chosen"),
    [
        (None, [], ()),
        (0.5, [], (2,)),
        (1.5, [2], (4, 6)),
        (2, [2, 4, 4, 6], (2, 6)),
        (64, [2], (2, 4, 6)),
    ],
)
def test_replica_is_pinned_to_least_used_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: float | None, used: list[int], chosen: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 4, 6})
    assert choose_cpus(cpus, used) == chosen


@pytest.mark.parametrize(
    ("exit_", "reason"),
    [
        ({"exit_status": 3}, "it exited with status 3"),
        ({"exit_status": 3, "last_output": "no"}, "it exited with status 3; its last output: no"),
        ({"exit_status": 0}, "it exited with status 0"),
        ({"exit_status": -11}, "it crashed with SIGSEGV"),
        (
            {"exit_status": -9, "ran_out_of_memory": True},
            "the system killed it because memory ran out",
        ),
        ({"exit_status": -9}, "it was killed (SIGKILL), by a person or because memory ran out"),
        ({"exit_status": -15}, "it was killed (SIGTERM)"),
        ({"exit_status": -99}, "it was killed (signal 99)"),
        ({"exit_status": 1, "error": "no GPU"}, "it could not start: no GPU"),
        ({}, "it exited"),
    ],
)
def test_exit_reason_names_status_signal_or_error(exit_: dict[str, Any], reason: str) -> None:
    status = ProcessStatus(attempt=1, monitor_pid=2, pid=3, exited_at=1.0, **exit_)
    assert describe_replica(RECORD, status).reason == reason


# --- Kubernetes ----------------------------------------------------------------------------------

STARTED = "2026-11-27T10:00:00Z"
FINISHED = "2026-11-27T10:00:05Z"


def deployment(pods: int = 1, /, **status: object) -> dict[str, Any]:
    template = {"metadata": {"annotations": {"argosy.dev/attempt": "1"}}}
    return {
        "metadata": {"name": "a-1-0", "generation": 2},
        "spec": {"replicas": pods, "template": template},
        "status": {"observedGeneration": 2, **status},
    }


def pod(uid: str = "u1", attempt: str = "1", restarts: int = 0, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    container = {"name": "replica", "restartCount": restarts, "state": fields.pop("state", {})}
    container["lastState"] = fields.pop("last", {})
    metadata = {
        "uid": uid,
        "creationTimestamp": STARTED,
        "annotations": {"argosy.dev/attempt": attempt},
        **fields.pop("metadata", {}),
    }
    scheduled = {"type": "PodScheduled", "status": "True"}
    status = {"containerStatuses": [container], "podIP": "10.0.0.5", "conditions": [scheduled]}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "n1"},
        "status": status | fields,
    }


def terminated(code: int, **fields: str) -> dict[str, Any]:
    return {
        "terminated": {
            "exitCode": code,
            "startedAt": STARTED,
            "finishedAt": FINISHED,
            **fields,
        }
    }


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


@pytest.mark.parametrize(
    ("each", "state", "reason"),
    [
        (pod(state={"running": {"startedAt": STARTED}}), "running", ""),
        (
            pod(state={"running": {"startedAt": STARTED}}, metadata={"deletionTimestamp": STARTED}),
            "draining",
            "",
        ),
        (pod(state={"waiting": {"reason": "ContainerCreating"}}), "provisioning", "its container"),
        (
            pod(state={"waiting": {"reason": "CreateContainerConfigError", "message": "no key"}}),
            "provisioning",
            "CreateContainerConfigError: no key",
        ),
        (
            pod(state={"waiting": {"reason": "ImagePullBackOff"}}),
            "provisioning",
            "ImagePullBackOff",
        ),
        (pod(conditions=[]), "provisioning", "waiting for a node"),
        (pod(state=terminated(0, reason="Completed")), "exited", "it exited with status 0"),
        (
            pod(state=BACK_OFF, last=terminated(1, message="Traceback\nOSError: no model\n")),
            "exited",
            "it exited with status 1; its last output: OSError: no model",
        ),
        (pod(state=terminated(139)), "exited", "it crashed with SIGSEGV"),
        (pod(state=terminated(137, reason="OOMKilled")), "exited", "because memory ran out"),
        (
            pod(phase="Failed", reason="Evicted", message="low on memory"),
            "exited",
            "Evicted: low on memory",
        ),
    ],
)
def test_state_and_reason_follow_from_the_pod(
    each: dict[str, Any], state: str, reason: str
) -> None:
    owner = deployment()
    run = follow_run(ReplicaRunRecord(), owner, each, now=2e9)
    replica = describe_pod(owner, each, run, "eu-1a", now=2e9)
    assert replica.state == state
    assert reason in replica.reason
    assert (replica.url, replica.node, replica.zone) == ("http://10.0.0.5:8000", "n1", "eu-1a")
    assert replica.ran_out_of_memory == (reason == "because memory ran out")
    if "terminated" in str(each):
        assert replica.exited_at == replica.started_at + 5


def test_missing_pod_is_explained_by_the_deployment() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    owner = deployment(conditions=[failure])
    assert (
        describe_pod(owner, None, ReplicaRunRecord(), "", now=7.0).reason == "exceeded quota: gpus"
    )


def test_run_ends_once_kubernetes_has_carried_out_the_drain() -> None:
    run = ReplicaRunRecord(pod="u1", ended_by="drain")
    for unsettled in (deployment(0, observedGeneration=1), deployment(0, replicas=1)):
        assert follow_run(run, unsettled, None, now=7.0) == run
    ended = follow_run(run, deployment(0), None, now=7.0)
    assert (ended.exited_at, ended.reason) == (7.0, "it was drained")
    assert follow_run(ended, deployment(0), None, now=8.0) == ended


def test_attempts_count_restarts_and_new_pods_of_the_latest_start() -> None:
    owner = deployment()
    pods = [pod("old", attempt="0"), pod("u1", metadata={"deletionTimestamp": STARTED})]
    run = ReplicaRunRecord()
    for expected, each in ((1, pod("u1")), (2, pod("u1", restarts=3)), (3, pod("u2"))):
        found = find_pod(owner, [*pods, each])
        assert found is each
        run = follow_run(run, owner, found, now=0.0)
        assert run.attempt == expected
    assert find_pod(owner, pods[:1]) is None


# --- Ray -----------------------------------------------------------------------------------------


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
    with pytest.raises(LaunchError, match=r"pip install .*\[ray\]'"):
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


def test_logs_of_removed_replicas_are_bounded_together(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path)
    for number in range(4):
        for path in (log := folder.log_path(f"old-{number}-0"), log.with_name(f"{log.name}.1")):
            path.touch()
            os.truncate(path, 60 << 20)
            os.utime(path, (number, number))
    folder.log_path("b-1-0").touch()
    folder.lock_run("b-1-0")
    folder.write_record(msgspec.structs.replace(RECORD, name="b-1-0"))
    folder.remove(RECORD)
    assert folder.list_logs() == ["b-1-0", "old-2-0", "old-3-0"]
    assert len([*(tmp_path / "logs").iterdir()]) == 5
