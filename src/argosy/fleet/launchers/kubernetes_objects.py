"""Kubernetes objects of a fleet's replicas, as dictionaries: what the launcher creates, and what can be rendered.

Each replica is a Deployment of one pod, so that Kubernetes restarts it and moves it to another node while no controller
runs. It never has two pods at once (strategy Recreate), because two would need the accelerators of two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from argosy.deployment import KubernetesSettings
from argosy.fleet.launchers.launcher import LaunchError, LaunchSpec

KubernetesObject = dict[str, Any]
"""Object as in a manifest."""

CONTROLLER_RULES: list[KubernetesObject] = [
    {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
    },
    {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["create", "patch", "delete"]},
    {
        "apiGroups": ["policy"],
        "resources": ["poddisruptionbudgets"],
        "verbs": ["create", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "patch"]},
]
"""Rights that the launcher uses in its namespace. The chart has the same."""
PORT = 8000
"""Port of every replica, in the network namespace of its pod."""
CONTAINER = "replica"
"""Name of its container. Other programs may add containers to the pod."""
LABEL_FLEET = "argosy.dev/fleet"
LABEL_POOL = "argosy.dev/pool"
LABEL_REPLICA = "argosy.dev/replica"
ANNOTATION_ATTEMPT = "argosy.dev/attempt"
"""Annotation of a pod: number of the attempt that created it. Another one makes the Deployment replace its pod."""
ZONE_LABEL = "topology.kubernetes.io/zone"

ENDPOINT_GRACE_S = 2
"""Time for which a pod that ends goes on to accept requests, from those who do not know yet that it ends."""
SHUTDOWN_GRACE_S = 10
"""Time that a replica has after its drain deadline to close its engine."""
PROBE_INTERVAL_S = 5
MIN_LIVENESS_TIMEOUT_S = 30.0
_PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
_PLACEHOLDER = re.compile(r"\{(host|port|socket|name)\}")


def fleet_labels(fleet: str, component: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels of an object of a fleet."""
    labels = {
        "app.kubernetes.io/name": "argosy",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": fleet,
        "app.kubernetes.io/managed-by": "argosy",
        LABEL_FLEET: fleet,
    }
    return labels if pool is None else labels | {LABEL_POOL: pool}


def replica_selector(fleet: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels by which the replicas of a fleet, or of one of its pools, are selected."""
    labels = {LABEL_FLEET: fleet, "app.kubernetes.io/component": "replica"}
    return labels if pool is None else labels | {LABEL_POOL: pool}


def build_object(
    version: str, kind: str, name: str, labels: dict[str, str], **fields: object
) -> KubernetesObject:
    """Return an object with its fields beside the metadata."""
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def build_deployment(
    spec: LaunchSpec, fleet: str, *, attempt: int = 1, is_running: bool = True
) -> KubernetesObject:
    """Build the Deployment of a replica.

    `attempt` is the number of this start. Without `is_running` it shall have no pod.

    Raises:
        LaunchError: The replica cannot run in a pod. The message says what to change.
    """
    labels = fleet_labels(fleet, "replica", spec.pool) | {
        "app.kubernetes.io/instance": spec.name,
        LABEL_REPLICA: spec.name,
        "argosy.dev/generation": str(spec.generation),
        "argosy.dev/ordinal": str(spec.ordinal),
    }
    return build_object(
        "apps/v1",
        "Deployment",
        spec.name,
        labels,
        spec={
            "replicas": int(is_running),
            "revisionHistoryLimit": 0,
            # The controller decides when a start takes too long, by the settings of the pool.
            "progressDeadlineSeconds": 2_147_483_647,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {LABEL_FLEET: fleet, LABEL_REPLICA: spec.name}},
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {ANNOTATION_ATTEMPT: str(attempt)},
                },
                "spec": _build_pod_spec(spec, fleet),
            },
        },
    )


def build_pool_objects(spec: LaunchSpec, fleet: str) -> list[KubernetesObject]:
    """Build the objects that the replicas of a pool share, by the specification of any of them."""
    kubernetes = spec.kubernetes or KubernetesSettings()
    # With 0 no node with a replica could ever be drained.
    max_unavailable = max(1, spec.max_unavailable)
    selector = {"matchLabels": replica_selector(fleet, spec.pool)}
    labels = fleet_labels(fleet, "disruption-budget", spec.pool)
    budget = build_object(
        "policy/v1",
        "PodDisruptionBudget",
        f"pool-{spec.pool}",
        labels,
        spec={"maxUnavailable": max_unavailable, "selector": selector},
    )
    pre_pull = [_build_pre_pull(spec, fleet, kubernetes)] if kubernetes.pre_pull_images else []
    return [budget, *pre_pull]


def build_pool_service(spec: LaunchSpec, fleet: str) -> KubernetesObject:
    """Build the headless Service of a pool, whose name resolves to the addresses of its ready replicas."""
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    selector = replica_selector(fleet, spec.pool)
    labels = fleet_labels(fleet, "pool", spec.pool)
    settings = {"clusterIP": "None", "selector": selector, "ports": ports}
    return build_object("v1", "Service", f"pool-{spec.pool}", labels, spec=settings)


def container_security(kubernetes: KubernetesSettings) -> KubernetesObject:
    """Return the security context of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": kubernetes.read_only_root,
    }


def pod_security(kubernetes: KubernetesSettings) -> KubernetesObject:
    """Return the security context of a pod."""
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    user = kubernetes.run_as_user
    if user is None:
        return seccomp
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        **seccomp,
    }


def user_environment() -> list[KubernetesObject]:
    """Return the variables that programs read instead of the user database of an image, which may lack the user."""
    return [
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - a volume of the pod
        {"name": "XDG_CACHE_HOME", "value": "/tmp/cache"},  # noqa: S108 - the same
        {"name": "USER", "value": "argosy"},
    ]


def image_pull_secrets(kubernetes: KubernetesSettings) -> KubernetesObject:
    """Return the field of a pod specification with the credentials of image registries, if there are any."""
    names = [{"name": name} for name in kubernetes.image_pull_secrets]
    return {"imagePullSecrets": names} if names else {}


# --- pods ----------------------------------------------------------------------------------------


def _build_pod_spec(spec: LaunchSpec, fleet: str) -> KubernetesObject:
    kubernetes = spec.kubernetes or KubernetesSettings()
    deadline_s = ENDPOINT_GRACE_S + math.ceil(spec.drain_deadline_s) + SHUTDOWN_GRACE_S
    pod: KubernetesObject = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(kubernetes),
        **image_pull_secrets(kubernetes),
        "terminationGracePeriodSeconds": deadline_s,
        **_build_placement(spec, kubernetes),
        "containers": [_build_container(spec, kubernetes)],
        "volumes": list(_build_volumes(spec, kubernetes)),
    }
    if kubernetes.service_account is not None:
        pod["serviceAccountName"] = kubernetes.service_account
    if spec.resources.zones:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": ZONE_LABEL,
                # A replica in a crowded zone is better than none.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": replica_selector(fleet, spec.pool)},
            }
        ]
    return pod


def _build_container(spec: LaunchSpec, kubernetes: KubernetesSettings) -> KubernetesObject:
    if spec.image is None:
        raise LaunchError(f"pool {spec.pool!r} has no container image; add `image` to the pool")
    container: KubernetesObject = {
        "name": CONTAINER,
        "image": spec.image,
        "command": [_fill_argument(argument, spec) for argument in spec.command],
        "env": list(_build_environment(spec, kubernetes)),
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": _build_probe(
            spec.probes.ready_path, math.ceil(spec.probes.start_timeout_s / PROBE_INTERVAL_S)
        ),
        "readinessProbe": _build_probe(spec.probes.ready_path, 1),
        # The controller restarts a replica that hangs first, because it limits how many are restarted at once.
        "livenessProbe": _build_probe(
            spec.probes.live_path,
            math.ceil(
                max(3 * spec.probes.hang_timeout_s, MIN_LIVENESS_TIMEOUT_S) / PROBE_INTERVAL_S
            ),
        ),
        "lifecycle": {"preStop": _build_pre_stop(spec)},
        "securityContext": container_security(kubernetes),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod
            *([{"name": "shm", "mountPath": "/dev/shm"}] if _uses_shared_memory(spec) else []),  # noqa: S108 - as above
            *(
                {
                    "name": f"volume-{number}",
                    "mountPath": volume.path,
                    "readOnly": volume.read_only,
                }
                for number, volume in enumerate(kubernetes.volumes)
            ),
        ],
    }
    resources = _build_resources(spec, kubernetes)
    if resources:
        container["resources"] = {"requests": resources, "limits": resources}
    return container


def _fill_argument(argument: str, spec: LaunchSpec) -> str:
    """Return an argument with the launcher's placeholders replaced.

    The host is the pod's own address, for which Kubernetes puts in the value of the variable.
    """
    values = {"host": "$(POD_IP)", "port": str(PORT), "name": spec.name}

    def fill(match: re.Match[str]) -> str:
        if match[1] == "socket":
            raise LaunchError(
                f"the command of pool {spec.pool!r} listens on {{socket}}, which other pods cannot reach; "
                "use {host} and {port}"
            )
        return values[match[1]]

    return _PLACEHOLDER.sub(fill, _escape(argument))


def _escape(text: str) -> str:
    """Return a text of which Kubernetes replaces nothing by variables. It reads `$$` as `$`, wherever it stands."""
    return text.replace("$", "$$")


def _build_environment(
    spec: LaunchSpec, kubernetes: KubernetesSettings
) -> Iterator[KubernetesObject]:
    yield {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    for variable in user_environment():
        if variable["name"] not in spec.environment:
            yield variable
    for name, value in sorted(spec.environment.items()):
        yield {"name": name, "value": _escape(value)}
    for name, key in sorted(spec.secret_keys.items()):
        reference = {"name": kubernetes.secret_name, "key": key}
        yield {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _build_probe(path: str, max_failures: int) -> KubernetesObject:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": PROBE_INTERVAL_S,
        "timeoutSeconds": PROBE_INTERVAL_S,
        "failureThreshold": max(1, max_failures),
    }


def _build_pre_stop(spec: LaunchSpec) -> KubernetesObject:
    """Return what precedes the SIGTERM of a pod that ends. A process that drains by another signal gets that there."""
    if spec.drain_signal == "SIGTERM":
        return {"sleep": {"seconds": ENDPOINT_GRACE_S}}
    signal = spec.drain_signal.removeprefix("SIG")
    script = f"sleep {ENDPOINT_GRACE_S}; kill -s {signal} 1; while kill -0 1; do sleep 1; done"
    return {"exec": {"command": ["/bin/sh", "-c", script]}}


def _build_resources(spec: LaunchSpec, kubernetes: KubernetesSettings) -> dict[str, str]:
    resources = {}
    if spec.resources.cpus is not None:
        resources["cpu"] = f"{math.ceil(spec.resources.cpus * 1000)}m"
    if spec.resources.memory_bytes is not None:
        resources["memory"] = str(spec.resources.memory_bytes)
    if spec.resources.accelerators:
        resources[kubernetes.gpu_resource] = str(spec.resources.accelerators)
    return resources


def _build_volumes(spec: LaunchSpec, kubernetes: KubernetesSettings) -> Iterator[KubernetesObject]:
    yield {"name": "tmp", "emptyDir": {}}
    if _uses_shared_memory(spec):
        yield {"name": "shm", "emptyDir": {"medium": "Memory"}}
    for number, volume in enumerate(kubernetes.volumes):
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        yield {"name": f"volume-{number}", "persistentVolumeClaim": claim}


def _uses_shared_memory(spec: LaunchSpec) -> bool:
    """Return whether several processes of the replica share memory. The default is 64 MiB, too little for NCCL."""
    return spec.resources.accelerators > 1


# --- placement -----------------------------------------------------------------------------------


def _build_placement(spec: LaunchSpec, kubernetes: KubernetesSettings) -> KubernetesObject:
    """Return the fields of a pod specification that restrict its nodes."""
    placement: KubernetesObject = {}
    if spec.resources.labels:
        placement["nodeSelector"] = dict(sorted(spec.resources.labels.items()))
    if spec.resources.zones:
        zones = {"key": ZONE_LABEL, "operator": "In", "values": list(spec.resources.zones)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [zones]}]}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        placement["affinity"] = {"nodeAffinity": {required: terms}}
    tolerations: list[KubernetesObject] = []
    if spec.resources.accelerators:
        tolerations.append({"key": kubernetes.gpu_resource, "operator": "Exists"})
    for toleration in kubernetes.tolerations:
        built: KubernetesObject = {"key": toleration.key, "operator": "Exists"}
        if toleration.value is not None:
            built |= {"operator": "Equal", "value": toleration.value}
        if toleration.effect is not None:
            built["effect"] = toleration.effect
        tolerations.append(built)
    if tolerations:
        placement["tolerations"] = tolerations
    return placement


def _build_pre_pull(
    spec: LaunchSpec, fleet: str, kubernetes: KubernetesSettings
) -> KubernetesObject:
    """Build the DaemonSet that pulls a pool's image to the nodes of its replicas. Its pods do nothing after that."""
    labels = fleet_labels(fleet, "image-pre-pull", spec.pool)
    small = {"requests": {"cpu": "1m", "memory": "8Mi"}, "limits": {"memory": "64Mi"}}
    common = {"securityContext": container_security(kubernetes), "resources": small}
    pull = {"name": "pull", "image": spec.image, "command": ["/bin/sh", "-c", ":"], **common}
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": pod_security(kubernetes),
        **image_pull_secrets(kubernetes),
        "terminationGracePeriodSeconds": 0,
        **_build_placement(spec, kubernetes),
        "initContainers": [pull],
        "containers": [{"name": "pause", "image": _PAUSE_IMAGE, **common}],
    }
    return build_object(
        "apps/v1",
        "DaemonSet",
        f"pre-pull-{spec.pool}",
        labels,
        spec={
            "selector": {"matchLabels": labels},
            "updateStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": "100%"},
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    )
