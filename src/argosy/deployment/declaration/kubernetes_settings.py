"""Settings of a fleet on Kubernetes: where its objects are, and what pods have beside the settings of their pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ObjectName = Annotated[
    str, Meta(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9-]+)*$")
]
"""Name of a Kubernetes object."""
ResourceName = Annotated[
    str, Meta(max_length=253, pattern=r"^[A-Za-z0-9.-]+/[A-Za-z0-9][A-Za-z0-9._-]*$")
]

_NOT_OF_PODS = ("namespace", "context", "image", "pre_pull_images")


class VolumeClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A volume that every replica mounts, for example with the weights."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim. Pods of several nodes need one that several nodes can mount."""
    path: Annotated[str, Meta(pattern=r"^/[^\s:]+$")]
    """Folder of the container in which it is mounted."""
    read_only: bool = True
    """Whether it is mounted for reading only."""


class Toleration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A taint of nodes that replicas tolerate."""

    key: Annotated[str, Meta(min_length=1)]
    value: str | None = None
    """Value of the taint. None tolerates any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. None tolerates all effects."""


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pools with `launcher: kubernetes`, and the manifests of `argosy render kubernetes`."""

    namespace: ObjectName = "default"
    """Namespace of all objects. Change it only while the fleet is down."""
    context: str | None = None
    """Context of the kubeconfig file. None means its current one, or the service account if the controller runs in a
    pod. Change it only while the fleet is down."""
    image: Annotated[str, Meta(min_length=1, pattern=r"^\S+$")] | None = None
    """Container image of the rendered gateways and controllers."""
    secret_name: ObjectName | None = None
    """Secret with the values to which the `environment` of pools refers: `{env: HF_TOKEN}` is its key `HF_TOKEN`, and
    `{file: /run/secrets/hf-token}` its key `hf-token`."""
    service_account: ObjectName | None = None
    """Service account of the replicas' pods. They get no token of it."""
    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets with the credentials of image registries."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """Resource that is requested for each of a pool's `accelerators`. Its taint is tolerated."""
    tolerations: tuple[Toleration, ...] = ()
    """Further taints of nodes that replicas tolerate."""
    volumes: tuple[VolumeClaim, ...] = ()
    """Volumes of the replicas."""
    run_as_user: Annotated[int, Meta(ge=1, le=2_147_483_647)] | None = 10_001
    """User and group of the processes. With null it is the image's user, who may then be root."""
    read_only_root: bool = True
    """Whether the root file system is read-only. `/tmp`, which is also the home folder, is writable anyway."""
    pre_pull_images: bool = False
    """Pull the images of pools to all nodes that may run their replicas, before a replica is placed there."""

    def pod_settings(self) -> dict[str, Any]:
        """Return the settings whose change replaces running pods."""
        settings = msgspec.to_builtins(self)
        return {name: value for name, value in settings.items() if name not in _NOT_OF_PODS}
