"""States and reasons of replicas on Kubernetes, by the status of their Deployments and pods."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.fleet.launchers.kubernetes_status import (
    ReplicaRunRecord,
    describe_pod,
    find_pod,
    follow_run,
)

STARTED = "2026-11-27T10:00:00Z"
FINISHED = "2026-11-27T10:00:05Z"


def deployment(pods: int = 1, /, **status: object) -> dict[str, Any]:
    labels = {"argosy.dev/pool": "a", "argosy.dev/generation": "1", "argosy.dev/ordinal": "0"}
    template = {"metadata": {"annotations": {"argosy.dev/attempt": "1"}}}
    return {
        "metadata": {"name": "a-1-0", "labels": labels, "generation": 2},
        "spec": {"replicas": pods, "template": template},
        "status": {"observedGeneration": 2, **status},
    }


def pod(uid: str = "u1", attempt: str = "1", restarts: int = 0, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    container = {"restartCount": restarts, "state": fields.pop("state", {})}
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
    run = follow_run(ReplicaRunRecord(), owner, each, now=0.0)
    replica = describe_pod(owner, each, run, "eu-1a")
    assert replica.state == state
    assert reason in replica.reason
    assert (replica.url, replica.node, replica.zone) == ("http://10.0.0.5:8000", "n1", "eu-1a")
    assert replica.ran_out_of_memory == (reason == "because memory ran out")
    if "terminated" in str(each):
        assert replica.exited_at == replica.started_at + 5


def test_missing_pod_is_explained_by_the_deployment() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    owner = deployment(conditions=[failure])
    assert describe_pod(owner, None, ReplicaRunRecord(), "").reason == "exceeded quota: gpus"


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
