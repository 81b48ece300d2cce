"""Manifests of a declared fleet for Kubernetes: gateways with a controller, or with the replicas themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from argosy.deployment import (
    FleetConfig,
    GatewayConfig,
    ReplicaConfig,
    build_gateway_config,
    dump_fleet,
    find_engine,
)
from argosy.fleet.launch_spec import build_launch_spec
from argosy.fleet.launchers.kubernetes_objects import (
    CONTROLLER_RULES,
    PORT,
    KubernetesObject,
    build_deployment,
    build_object,
    build_pool_objects,
    build_pool_service,
    container_security,
    fleet_labels,
    image_pull_secrets,
    pod_security,
    user_environment,
)
from argosy.settings import SettingError, dump_yaml

CONTROLLERS = 2
"""A leader and a standby."""
STATE_SIZE = "1Gi"
"""Size of a gateway's volume, for usage that the store does not have yet."""
SHUTDOWN_GRACE_S = 15
"""Time that a gateway has after its drain deadline."""
APPLY_TRIES = 6
"""How often a Job tries to apply the declaration. The store may not be ready yet."""
APPLIED_TTL_S = 86_400
"""Time after which the Job that has applied the declaration is deleted."""
_CONFIG_FOLDER = "/etc/argosy"
_STATE_FOLDER = "/state"


def build_manifests(
    config: FleetConfig, *, is_static: bool = False
) -> dict[str, list[KubernetesObject]]:
    """Build the objects of a fleet, by the name of the file for them.

    The declaration is valid. With `is_static` the replicas are among the objects. Otherwise a controller is, which
    starts them.

    Raises:
        SettingError: The fleet cannot run on Kubernetes. The message says what to change.
    """
    _check(config, is_static=is_static)
    files: dict[str, list[KubernetesObject]] = {}
    if is_static:
        files |= {f"pool-{pool.name}": _build_pool(config, pool.name) for pool in config.pools}
    else:
        files["controller"] = _build_controller(config)
    if config.gateways:
        files["gateway"] = _build_gateway(config, is_static=is_static)
    for objects in files.values():
        for each in objects:
            if each["kind"] not in {"ClusterRole", "ClusterRoleBinding"}:
                each["metadata"]["namespace"] = config.kubernetes.namespace
    return files


def dump_manifests(objects: list[KubernetesObject]) -> str:
    """Return objects as YAML documents. Equal objects have equal texts."""
    # A copy has no common parts, for which YAML would have anchors.
    copies = msgspec.json.decode(msgspec.json.encode(objects))
    return "---\n".join(map(dump_yaml, copies))


def build_kustomization(files: Mapping[str, object]) -> str:
    """Return the `kustomization.yaml` that lists the files."""
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{name}.yaml" for name in files],
    }
    return dump_yaml(document)


def _check(config: FleetConfig, *, is_static: bool) -> None:
    for index, pool in enumerate(config.pools):
        if pool.launcher != "kubernetes":
            problem = f"the pool {pool.name!r} does not run on Kubernetes. Write `kubernetes`."
            raise SettingError.at(("pools", index, "launcher"), problem)
    needs_image = config.gateways or not is_static
    if needs_image and config.kubernetes.image is None:
        problem = "gateways and controllers need a container image. Add it."
        raise SettingError.at(("kubernetes", "image"), problem)
    url = None if config.store is None else config.store.url
    if needs_image and not (url or "").startswith("postgresql"):
        problem = "pods share a store only if it is PostgreSQL. Set it to postgresql://USER@HOST/DATABASE."
        raise SettingError.at(("store", "url"), problem)
    files = _secret_files(config)
    if files and config.kubernetes.secret_name is None:
        problem = f"alerting refers to the file {min(files)}. Name the Secret that has the key {files[min(files)]}."
        raise SettingError.at(("kubernetes", "secret_name"), problem)
    if config.gateways and config.tls is not None:
        problem = (
            "its files are not in the pods. Remove it, and end TLS in the ingress or load balancer."
        )
        raise SettingError.at(("tls",), problem)


# --- replicas ------------------------------------------------------------------------------------


def _build_pool(config: FleetConfig, name: str) -> list[KubernetesObject]:
    pool = config.find_pool(name)
    assert pool is not None  # noqa: S101 - it is a pool of the declaration
    fleet = config.fleet or ""
    first = build_launch_spec(config, pool, 1, 0)
    replicas = [
        build_deployment(build_launch_spec(config, pool, 1, ordinal), fleet)
        for ordinal in range(pool.initial_replicas + pool.count_spares(pool.initial_replicas))
    ]
    return [build_pool_service(first, fleet), *build_pool_objects(first, fleet), *replicas]


# --- gateways ------------------------------------------------------------------------------------


def _build_gateway(config: FleetConfig, *, is_static: bool) -> list[KubernetesObject]:
    fleet = config.fleet or ""
    name = f"gateway-{fleet}"
    labels = fleet_labels(fleet, "gateway")
    settings = dump_fleet(_gateway_settings(config, is_static=is_static))
    probe = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    container = {
        **_common_container(config, "gateway", "gateway.yaml"),
        "command": ["argosy", "gateway", "--config", f"{_CONFIG_FOLDER}/gateway.yaml"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 60},
        # Not `/ready`, by which all gateways would leave the Service while one model has no replica.
        "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 1},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": 2}}},
    }
    pod = {
        "metadata": {"labels": labels, "annotations": {"argosy.dev/config": _digest(settings)}},
        "spec": {
            **_common_pod(config, name),
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": int(config.drain_deadline_s) + SHUTDOWN_GRACE_S,
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": labels},
                }
            ],
            "containers": [container],
        },
    }
    claim = {
        "metadata": {"name": "state"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": STATE_SIZE}},
        },
    }
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return [
        build_object("v1", "ConfigMap", name, labels, data={"gateway.yaml": settings}),
        build_object("v1", "Service", name, labels, spec={"selector": labels, "ports": ports}),
        build_object(
            "apps/v1",
            "StatefulSet",  # each gateway finds the usage log of its predecessor on its volume
            name,
            labels,
            spec={
                "serviceName": name,
                "replicas": config.gateways,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": pod,
                "volumeClaimTemplates": [claim],
            },
        ),
        build_object(
            "policy/v1",
            "PodDisruptionBudget",
            name,
            labels,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": labels}},
        ),
    ]


def _gateway_settings(config: FleetConfig, *, is_static: bool) -> GatewayConfig:
    gateway = build_gateway_config(config)
    models = list(gateway.models)
    if is_static:
        for pool in config.pools:
            index = next(i for i, model in enumerate(models) if model.name == pool.model)
            replica = ReplicaConfig(
                name=pool.name,
                url=f"http://pool-{pool.name}.{config.kubernetes.namespace}.svc:{PORT}",
                discover="dns",
                kind=find_engine(config, pool).kind,
            )
            models[index] = msgspec.structs.replace(
                models[index], replicas=[*models[index].replicas, replica]
            )
    return msgspec.structs.replace(
        gateway,
        models=models,
        fleet=None if is_static else config.fleet,
        host="0.0.0.0",  # noqa: S104 - the pod has an address of its own
        port=PORT,
        uds=None,
        log_format="json",
    )


# --- controller ----------------------------------------------------------------------------------


def _build_controller(config: FleetConfig) -> list[KubernetesObject]:
    fleet = config.fleet or ""
    name = f"controller-{fleet}"
    labels = fleet_labels(fleet, "controller")
    # The gateways have a StatefulSet. Those that the controller starts would be processes of its own pod.
    declaration = dump_fleet(msgspec.structs.replace(config, gateways=0))
    file = f"{_CONFIG_FOLDER}/fleet.yaml"
    common = _common_container(config, "controller", "fleet.yaml")
    store_url = None if config.store is None else config.store.url
    apply = ["argosy", "apply", file, "--yes", "--source", "manifest"]
    run = ["argosy", "controller", "--fleet", fleet, "--store", store_url]
    pod = {
        "metadata": {"labels": labels, "annotations": {"argosy.dev/config": _digest(declaration)}},
        "spec": {
            **_common_pod(config, name),
            "serviceAccountName": name,
            "containers": [{**common, "command": run}],
        },
    }
    pod["spec"]["volumes"].append({"name": "state", "emptyDir": {}})
    spec = {"replicas": CONTROLLERS, "selector": {"matchLabels": labels}, "template": pod}
    # A Job and not a container of the controller, whose pod may move after people have decided something else.
    apply_labels = fleet_labels(fleet, "apply")
    apply_pod = {
        **pod["spec"],
        "restartPolicy": "OnFailure",
        "containers": [{**common, "name": "apply", "command": apply}],
    }
    job = {
        "backoffLimit": APPLY_TRIES,
        "ttlSecondsAfterFinished": APPLIED_TTL_S,
        "template": {"metadata": {"labels": apply_labels}, "spec": apply_pod},
    }
    # A Job cannot be changed, so another one has another name. One that runs again changes nothing.
    job_name = f"apply-{fleet}-{_digest(declaration + dump_yaml(job))[:10]}"
    return [
        *_build_access(config, name, labels),
        build_object("v1", "ConfigMap", name, labels, data={"fleet.yaml": declaration}),
        build_object("apps/v1", "Deployment", name, labels, spec=spec),
        build_object("batch/v1", "Job", job_name, apply_labels, spec=job),
    ]


def _build_access(config: FleetConfig, name: str, labels: dict[str, str]) -> list[KubernetesObject]:
    """Return the service account of the controllers, with the rights that the launcher needs."""
    namespace = config.kubernetes.namespace
    cluster_name = f"argosy-{namespace}-{name}"
    nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]  # for their zones
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": rbac, "kind": "Role", "name": name}
    cluster_role = {"apiGroup": rbac, "kind": "ClusterRole", "name": cluster_name}
    version = f"{rbac}/v1"
    return [
        build_object("v1", "ServiceAccount", name, labels),
        build_object(version, "Role", name, labels, rules=CONTROLLER_RULES),
        build_object(version, "RoleBinding", name, labels, roleRef=role, subjects=[subject]),
        build_object(version, "ClusterRole", cluster_name, labels, rules=nodes),
        build_object(
            version,
            "ClusterRoleBinding",
            cluster_name,
            labels,
            roleRef=cluster_role,
            subjects=[subject],
        ),
    ]


# --- shared --------------------------------------------------------------------------------------


def _common_container(config: FleetConfig, name: str, file: str) -> KubernetesObject:
    container: KubernetesObject = {
        "name": name,
        "image": config.kubernetes.image,
        "env": [
            *user_environment(),
            {"name": "XDG_STATE_HOME", "value": _STATE_FOLDER},
        ],
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}},
        "securityContext": container_security(config.kubernetes),
        "volumeMounts": [
            {"name": "config", "mountPath": f"{_CONFIG_FOLDER}/{file}", "subPath": file},
            {"name": "state", "mountPath": _STATE_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - as above
        ],
    }
    if config.kubernetes.secret_name is not None:
        container["envFrom"] = [{"secretRef": {"name": config.kubernetes.secret_name}}]
    # Each file alone, since the token of a service account is in the usual folder of secrets as well.
    container["volumeMounts"] += [
        {"name": "secrets", "mountPath": file, "subPath": key, "readOnly": True}
        for file, key in sorted(_secret_files(config).items())
    ]
    return container


def _secret_files(config: FleetConfig) -> dict[str, str]:
    """Return the keys of the Secret with the secrets of `alerting` that are files, by path."""
    return {each.file: each.key for each in config.alerting.secrets if each.file is not None}


def _common_pod(config: FleetConfig, config_map: str) -> KubernetesObject:
    volumes: list[KubernetesObject] = [
        {"name": "config", "configMap": {"name": config_map}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if _secret_files(config):
        secret = {"secretName": config.kubernetes.secret_name}
        volumes.append({"name": "secrets", "secret": secret})
    return {
        "securityContext": pod_security(config.kubernetes),
        **image_pull_secrets(config.kubernetes),
        "volumes": volumes,
    }


def _digest(text: str) -> str:
    """Return a digest of a configuration, which restarts the pods that read it when it changes."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
