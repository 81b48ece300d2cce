"""Copy of the objects of one kind in a Kubernetes cluster, kept by a list and a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from argosy.fleet.launchers.kubernetes_api import KubernetesApi, KubernetesApiError
from argosy.fleet.launchers.kubernetes_objects import KubernetesObject
from argosy.fleet.launchers.launcher import LaunchError

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 5.0


class KubernetesCache:
    """Objects by name, as the server reports their changes. Not thread-safe: use it from one event loop.

    Args:
        api: The cluster.
        path: Collection to watch.
        selector: Labels of the objects.
        on_changed: Called after each change.
    """

    def __init__(
        self, api: KubernetesApi, path: str, selector: str, on_changed: Callable[[], None]
    ) -> None:
        self.objects: dict[str, KubernetesObject] = {}
        self.error: str = ""
        """Why the server cannot be watched at present; empty if it can."""
        self.synced = asyncio.Event()
        """Set once the objects have been listed, or could not be."""
        self._api = api
        self._path = path
        self._selector = selector
        self._on_changed = on_changed
        self._version = ""
        self._removed: set[str] = set()
        """UIDs of objects that this process deleted, of which late events may still arrive."""

    def update(self, each: KubernetesObject) -> None:
        """Store an object as the server returned it, unless a newer version is known.

        Resource versions of one kind are integers that grow. The API promises that since version 1.35, and has always
        done so. See https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions.
        """
        metadata = each["metadata"]
        known = self.objects.get(metadata["name"])
        if metadata["uid"] in self._removed:
            return
        if known is None or _version(known) < _version(each):
            self.objects[metadata["name"]] = each
            self._on_changed()

    def remove(self, each: KubernetesObject) -> None:
        """Forget an object that this process has deleted."""
        metadata = each["metadata"]
        self._removed.add(metadata["uid"])
        known = self.objects.get(metadata["name"])
        if known is not None and known["metadata"]["uid"] == metadata["uid"]:
            del self.objects[metadata["name"]]
            self._on_changed()

    async def run(self) -> None:
        """Follow the changes until cancelled."""
        delay_s = MIN_RETRY_DELAY_S
        while True:
            try:
                if not self._version:
                    await self._list()
                async for kind, each in self._api.watch(self._path, self._selector, self._version):
                    self._apply(kind, each)
            except KubernetesApiError as error:
                self._version = ""  # 410 says that the server has forgotten the changes since then
                if error.status != 410:
                    self._fail(error)
            except LaunchError as error:
                self._fail(error)
            delay_s = min(2 * delay_s, MAX_RETRY_DELAY_S) if self.error else MIN_RETRY_DELAY_S
            await asyncio.sleep(delay_s)

    async def _list(self) -> None:
        objects, version = await self._api.list(self._path, self._selector)
        self.objects = {
            each["metadata"]["name"]: each
            for each in objects
            if each["metadata"]["uid"] not in self._removed
        }
        self._removed &= {each["metadata"]["uid"] for each in objects}
        self._version = version
        self.error = ""
        self.synced.set()
        self._on_changed()

    def _apply(self, kind: str, each: KubernetesObject) -> None:
        self.error = ""
        if kind == "CONNECTED":
            return
        self._version = each["metadata"]["resourceVersion"]
        if kind in {"ADDED", "MODIFIED"}:
            self.update(each)
        elif kind == "DELETED":
            self._removed.discard(each["metadata"]["uid"])
            known = self.objects.get(each["metadata"]["name"])
            if known is not None and known["metadata"]["uid"] == each["metadata"]["uid"]:
                del self.objects[each["metadata"]["name"]]
                self._on_changed()

    def _fail(self, error: LaunchError) -> None:
        self.error = str(error)
        self.synced.set()
        self._on_changed()


def _version(each: KubernetesObject) -> int:
    return int(each["metadata"]["resourceVersion"])
