"""Fencing of deposed controllers on Kubernetes, by the versions of objects."""

from __future__ import annotations

import asyncio

from argosy.fleet.launchers.kubernetes_api import KubernetesApi, KubernetesApiError
from argosy.fleet.launchers.kubernetes_objects import KubernetesObject, build_object, fleet_labels
from argosy.fleet.launchers.launcher import refuse_stale_epoch

ANNOTATION_EPOCH = "argosy.dev/epoch"
"""Annotation of a Deployment and of the ConfigMap: the highest epoch of a controller that has acted on it."""
MAX_CONCURRENT_STAMPS = 16


class KubernetesFence:
    """Highest epoch that a fleet in a namespace has seen. Not thread-safe: use it from one event loop.

    A ConfigMap contains the epoch. Each action of a leader first raises it there, and once per term writes it to
    every Deployment. An action changes a Deployment only in the version that it has read and whose epoch is not higher.
    So an action that a deposed leader has begun before fails, because the version has changed. The same applies to
    starts: they create the Deployment without a pod, read the ConfigMap, and then ask for the pod in another request.

    Args:
        config_maps: Path of the ConfigMaps of the namespace.
        deployments: Path of the Deployments of the namespace.
        selector: Labels of the Deployments of its replicas.
    """

    def __init__(
        self, api: KubernetesApi, config_maps: str, deployments: str, fleet: str, selector: str
    ) -> None:
        self._api = api
        self._config_maps = config_maps
        self._deployments = deployments
        self._fleet = fleet
        self._selector = selector
        self._name = f"epoch-{fleet}"
        self._stamped_epoch = -1
        self._lock = asyncio.Lock()

    async def enter(self, epoch: int) -> None:
        """Let no controller with a lower epoch act from now on.

        Raises:
            StaleEpochError: A controller with a higher epoch has acted already.
        """
        async with self._lock:
            while not await self._raise_epoch(epoch):
                pass  # another launcher has raised it meanwhile
            if self._stamped_epoch != epoch:
                await self._stamp(epoch)
                self._stamped_epoch = epoch

    @property
    def is_entered(self) -> bool:
        """Whether a leader has acted by this fence. Others only read the cluster."""
        return self._stamped_epoch >= 0

    async def confirm(self, epoch: int) -> None:
        """Raise `StaleEpochError` if a controller with a higher epoch has acted meanwhile."""
        config_map = await self._api.request("GET", f"{self._config_maps}/{self._name}")
        check_epoch(config_map["metadata"].get("annotations", {}), epoch)

    async def _raise_epoch(self, epoch: int) -> bool:
        """Raise the epoch of the ConfigMap if it is lower. Returns False if the ConfigMap changed meanwhile."""
        found = await self._api.find(f"{self._config_maps}/{self._name}")
        try:
            if found is None:
                labels = fleet_labels(self._fleet, "controller")
                body = build_object("v1", "ConfigMap", self._name, labels)
                body["metadata"]["annotations"] = {ANNOTATION_EPOCH: str(epoch)}
                await self._api.request("POST", self._config_maps, body)
            elif check_epoch(found["metadata"].get("annotations", {}), epoch) < epoch:
                await self._api.request(
                    "PATCH", f"{self._config_maps}/{self._name}", _build_stamp(found, epoch)
                )
        except KubernetesApiError as error:
            if error.status != 409:
                raise
            return False
        return True

    async def _stamp(self, epoch: int) -> None:
        """Write the epoch to all Deployments that have a lower one, so that their versions change."""
        deployments, _ = await self._api.list(self._deployments, self._selector)
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_STAMPS)

        async def stamp(deployment: KubernetesObject | None) -> None:
            async with semaphore:
                while deployment is not None:
                    metadata = deployment["metadata"]
                    if check_epoch(metadata.get("annotations", {}), epoch) == epoch:
                        return
                    path = f"{self._deployments}/{metadata['name']}"
                    try:
                        await self._api.request("PATCH", path, _build_stamp(deployment, epoch))
                    except KubernetesApiError as error:
                        if error.status not in {404, 409}:
                            raise
                        deployment = await self._api.find(path)
                    else:
                        return

        await asyncio.gather(*map(stamp, deployments))


def _build_stamp(each: KubernetesObject, epoch: int) -> KubernetesObject:
    """Return the change that writes the epoch to this version of an object."""
    return {
        "metadata": {
            "resourceVersion": each["metadata"]["resourceVersion"],
            "annotations": {ANNOTATION_EPOCH: str(epoch)},
        }
    }


def check_epoch(annotations: KubernetesObject, epoch: int) -> int:
    """Return the epoch in annotations; -1 if there is none, or if another program has made it unreadable.

    Raises:
        StaleEpochError: It is higher than `epoch`.
    """
    text = annotations.get(ANNOTATION_EPOCH, "")
    seen = int(text) if text.isdecimal() else -1
    refuse_stale_epoch(epoch, seen)
    return seen
