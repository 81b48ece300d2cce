"""State of a replica on Kubernetes, as its Deployment and its pods show it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

import msgspec

from argosy.fleet.launchers.kubernetes_objects import (
    ANNOTATION_ATTEMPT,
    CONTAINER,
    PORT,
    KubernetesObject,
)
from argosy.fleet.launchers.launcher import LaunchedReplica, describe_exit
from argosy.policy.reconciliation import LaunchState, parse_replica_name

ANNOTATION_RUN = "argosy.dev/run"
"""Annotation of a Deployment: the `ReplicaRunRecord`, since pods are gone after they end."""
_EXITED_WAITS = frozenset({"CrashLoopBackOff", "RunContainerError"})
"""Reasons for which a container waits after it has exited."""


class ReplicaRunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The latest attempt of a replica, as far as it is known. Times are seconds since the epoch."""

    attempt: int = 1
    pod: str = ""
    """UID of its pod. Empty before there is one."""
    restarts: int = 0
    """How often Kubernetes had restarted the pod's container when the attempt began."""
    started_at: float = 0.0
    ended_by: Literal["", "drain", "stop"] = ""
    """Action after which it has no pod, or will have none."""
    exited_at: float | None = None
    exit_status: int | None = None
    reason: str = ""
    node: str = ""


def read_run(deployment: KubernetesObject) -> ReplicaRunRecord:
    """Return the record in a Deployment.

    One without a record, such as a rendered one, or whose record was damaged, is in the attempt of its template.
    """
    text = deployment["metadata"].get("annotations", {}).get(ANNOTATION_RUN, "")
    try:
        return msgspec.json.decode(text, type=ReplicaRunRecord)
    except msgspec.DecodeError:
        attempt = _template_attempt(deployment) or ""
        return ReplicaRunRecord(attempt=int(attempt) if attempt.isdecimal() else 1)


def find_pod(
    deployment: KubernetesObject, pods: Iterable[KubernetesObject]
) -> KubernetesObject | None:
    """Return the pod of the latest attempt, or None. Pods of earlier attempts are about to be replaced.

    If other programs have made it several, it is a ready one, and otherwise the newest.
    """
    attempt = _template_attempt(deployment)
    candidates = [
        pod
        for pod in pods
        if pod["metadata"].get("annotations", {}).get(ANNOTATION_ATTEMPT) == attempt
    ]
    return max(
        candidates,
        key=lambda pod: (
            "deletionTimestamp" not in pod["metadata"],
            _conditions(pod).get("Ready", {}).get("status") == "True",
            pod["metadata"]["creationTimestamp"],
            pod["metadata"]["uid"],
        ),
        default=None,
    )


def has_settled(deployment: KubernetesObject) -> bool:
    """Return whether Kubernetes has carried out the latest change of the number of pods to 0."""
    status = deployment.get("status", {})
    is_observed = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return is_observed and not deployment["spec"]["replicas"] and not status.get("replicas")


def is_unfinished(deployment: KubernetesObject) -> bool:
    """Return whether a start has created the Deployment, but not asked for its pod."""
    run = read_run(deployment)
    return not (deployment["spec"]["replicas"] or run.ended_by)


def follow_run(
    run: ReplicaRunRecord, deployment: KubernetesObject, pod: KubernetesObject | None, now: float
) -> ReplicaRunRecord:
    """Return the record after an observation. It is the same if nothing was learnt.

    A container that Kubernetes has restarted, or a pod that it has replaced, is a further attempt.
    """
    if pod is None:
        if run.ended_by and run.exited_at is None and has_settled(deployment):
            is_stop = run.ended_by == "stop"
            return msgspec.structs.replace(
                run,
                exited_at=now,
                exit_status=-9 if is_stop else None,
                reason="it was stopped" if is_stop else "it was drained",
            )
        return run
    uid, restarts = pod["metadata"]["uid"], _container(pod).get("restartCount", 0)
    if uid != run.pod or restarts != run.restarts:
        run = ReplicaRunRecord(
            attempt=run.attempt + 1 if run.pod else run.attempt,
            pod=uid,
            restarts=restarts,
            ended_by=run.ended_by,
        )
    node = pod["spec"].get("nodeName", "")
    # The clock of the node may be ahead, so a start was at the latest when it was seen.
    started_at = run.started_at or min(_node_started_at(pod), now)
    if (node, started_at) == (run.node, run.started_at):
        return run
    return msgspec.structs.replace(run, node=node, started_at=started_at)


def describe_pod(
    deployment: KubernetesObject,
    pod: KubernetesObject | None,
    run: ReplicaRunRecord,
    zone: str,
    now: float,
) -> LaunchedReplica:
    """Return the state of a replica.

    `pod` is the one that `find_pod` found, and `run` the record that `follow_run` returned for them. Other programs may
    change any label, so the replica is known by the name of its Deployment, which stays.
    """
    name = deployment["metadata"]["name"]
    pool, generation, ordinal = parse_replica_name(name) or (name, 0, 0)
    replica = LaunchedReplica(
        name=name,
        pool=pool,
        generation=generation,
        ordinal=ordinal,
        state=LaunchState.PROVISIONING,
        node=run.node,
        zone=zone,
        attempt=run.attempt,
        started_at=run.started_at,
    )
    if run.exited_at is not None:
        return msgspec.structs.replace(
            replica,
            state=LaunchState.EXITED,
            reason=run.reason,
            exited_at=run.exited_at,
            exit_status=run.exit_status,
        )
    if pod is None and is_unfinished(deployment):
        return msgspec.structs.replace(
            replica,
            state=LaunchState.EXITED,
            reason="its start was not finished",
            exited_at=parse_time(deployment["metadata"]["creationTimestamp"]),
        )
    if pod is None:
        return msgspec.structs.replace(replica, reason=_missing_pod_reason(deployment))
    address = pod.get("status", {}).get("podIP", "")
    if address:
        host = f"[{address}]" if ":" in address else address
        replica = msgspec.structs.replace(replica, url=f"http://{host}:{PORT}")
    exited = _find_exit(pod)
    if exited is not None:
        ahead_s = max(0.0, _node_started_at(pod) - run.started_at)
        finished_at = exited.get("finishedAt")
        exited_at = parse_time(finished_at) - ahead_s if finished_at else 0.0
        exited_at = max(run.started_at, min(exited_at, now))
        return _describe_exit(replica, exited, exited_at, is_ended=bool(run.ended_by))
    is_ending = "deletionTimestamp" in pod["metadata"] or not deployment["spec"]["replicas"]
    is_running = "running" in _container(pod).get("state", {})
    if is_ending:
        return msgspec.structs.replace(replica, state=LaunchState.DRAINING)
    if is_running:
        return msgspec.structs.replace(replica, state=LaunchState.RUNNING)
    return msgspec.structs.replace(replica, reason=_waiting_reason(pod))


def parse_time(text: str) -> float:
    """Return a time of the API (RFC 3339) as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


# --- containers ----------------------------------------------------------------------------------


def _container(pod: KubernetesObject) -> KubernetesObject:
    """Return the status of the replica's container; empty before it has one."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((each for each in statuses if each.get("name") == CONTAINER), {})


def _template_attempt(deployment: KubernetesObject) -> str | None:
    template = deployment["spec"]["template"].get("metadata") or {}
    attempt: str | None = template.get("annotations", {}).get(ANNOTATION_ATTEMPT)
    return attempt


def _node_started_at(pod: KubernetesObject) -> float:
    """Return when the container last started, by the clock of its node; 0 if it never did."""
    container = _container(pod)
    for each in (container.get("state", {}), container.get("lastState", {})):
        for name in ("running", "terminated"):
            if "startedAt" in each.get(name, {}):
                return parse_time(each[name]["startedAt"])
    return 0.0


def _find_exit(pod: KubernetesObject) -> KubernetesObject | None:
    """Return how the container exited, if it has and was not restarted yet."""
    container = _container(pod)
    state = container.get("state", {})
    if "terminated" in state:
        exited: KubernetesObject = state["terminated"]
        return exited
    if state.get("waiting", {}).get("reason") in _EXITED_WAITS:
        last: KubernetesObject | None = container.get("lastState", {}).get("terminated")
        return last
    status = pod.get("status", {})
    if status.get("phase") == "Failed":  # it was evicted, or its node shuts down
        return {"reason": status.get("reason", ""), "message": status.get("message", "")}
    return None


def _describe_exit(
    replica: LaunchedReplica, exited: KubernetesObject, exited_at: float, *, is_ended: bool
) -> LaunchedReplica:
    code = exited.get("exitCode")
    status = code if code is None or code <= 128 else 128 - code  # as shells report signals
    ran_out_of_memory = exited.get("reason") == "OOMKilled"
    if is_ended:
        reason = "it was drained"
    elif code is None or exited.get("reason") in {"StartError", "ContainerCannotRun"}:
        reason = f"{exited.get('reason') or 'it ended'}: {exited.get('message', '')}".rstrip(": ")
    else:
        output = (exited.get("message") or "").strip().rpartition("\n")[2]
        reason = describe_exit(status, ran_out_of_memory=ran_out_of_memory)
        if output:
            reason += f"; its last output: {output}"
    return msgspec.structs.replace(
        replica,
        state=LaunchState.EXITED,
        reason=reason,
        exited_at=exited_at,
        exit_status=status,
        ran_out_of_memory=ran_out_of_memory,
    )


def _waiting_reason(pod: KubernetesObject) -> str:
    conditions = _conditions(pod)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") != "True":
        message = scheduled.get("message", "")
        return f"waiting for a node: {message}" if message else "waiting for a node"
    waiting = _container(pod).get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if not reason or reason in {"ContainerCreating", "PodInitializing"}:
        return "waiting for its container"
    return f"{reason}: {message}" if message else str(reason)


def _missing_pod_reason(deployment: KubernetesObject) -> str:
    failure = _conditions(deployment).get("ReplicaFailure", {})
    if failure.get("status") == "True":  # such as a quota that is used up
        return str(failure.get("message", ""))
    return "waiting for its pod"


def _conditions(each: KubernetesObject) -> Mapping[str, KubernetesObject]:
    conditions = each.get("status", {}).get("conditions") or ()
    return {condition["type"]: condition for condition in conditions}
