"""Launcher of replicas as pods of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from argosy.deployment import KubernetesSettings
from argosy.fleet.launchers.kubernetes_api import KubernetesApi, KubernetesApiError, KubernetesCache
from argosy.fleet.launchers.kubernetes_fence import (
    ANNOTATION_EPOCH,
    KubernetesFence,
    check_epoch,
)
from argosy.fleet.launchers.kubernetes_objects import (
    CONTAINER,
    LABEL_FLEET,
    LABEL_REPLICA,
    ZONE_LABEL,
    KubernetesObject,
    build_deployment,
    build_pool_objects,
    replica_selector,
)
from argosy.fleet.launchers.kubernetes_status import (
    ANNOTATION_RUN,
    ReplicaRunRecord,
    describe_pod,
    find_pod,
    follow_run,
    has_settled,
    is_unfinished,
    parse_time,
    read_run,
)
from argosy.fleet.launchers.launcher import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    StaleEpochError,
)
from argosy.policy.reconciliation import LaunchState, parse_replica_name

MAX_CONFLICTS = 20
"""Number of times that an action starts again because an object has changed meanwhile."""
STOP_GRACE_S = 1
"""Grace period of a pod that is killed. With 0 the API would forget it before its node has killed it."""
STOP_TIMEOUT_S = 30.0
"""Time after which a pod is forgotten although its node does not confirm that it was killed."""
START_REQUEST_TIMEOUT_S = 60.0
"""Age of a Deployment from which its start, which is two requests, counts as given up half-way."""
"""Time after which a start makes the objects of its pool again, because another program may have deleted them."""
RECORD_RETRY_S = 30.0
"""Time after which a refused change of a run record is tried again."""
SYNC_TIMEOUT_S = 60.0
MAX_LOG_LINES = 10_000

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class KubernetesLauncher:
    """`Launcher` of pods, each of a Deployment of its own. Not thread-safe: use it from one event loop.

    A drain or stop leaves the Deployment without a pod, and a new start gives it one. All state is in the cluster.
    Kubernetes itself restarts a container that exits, and replaces a pod whose node is lost. Each is a new attempt.
    """

    def __init__(
        self,
        fleet: str,
        settings: KubernetesSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._namespace = settings.namespace
        self._clock = clock
        self._api = KubernetesApi(settings.context)
        core = f"/api/v1/namespaces/{self._namespace}"
        self._pods_path = f"{core}/pods"
        self._deployments_path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments"
        selector = ",".join(f"{key}={value}" for key, value in replica_selector(fleet).items())
        self._deployments = KubernetesCache(
            self._api, self._deployments_path, selector, self._on_changed
        )
        self._pods = KubernetesCache(self._api, self._pods_path, selector, self._on_changed)
        self._fence = KubernetesFence(
            self._api, f"{core}/configmaps", self._deployments_path, fleet, selector
        )
        self._pool_collections = {
            "PodDisruptionBudget": f"/apis/policy/v1/namespaces/{self._namespace}/poddisruptionbudgets",
            "DaemonSet": f"/apis/apps/v1/namespaces/{self._namespace}/daemonsets",
        }
        """Collections of the objects that the replicas of a pool share, by their kind."""
        self._zones: dict[str, str] = {}
        self._unrecorded: dict[str, tuple[str | None, ReplicaRunRecord, float]] = {}
        """Runs that could not be recorded, by UID of the Deployment: its annotation, the run, and when to try again."""
        self._watches: list[asyncio.Task[None]] = []
        self._waiters: set[asyncio.Event] = set()
        self.changed = asyncio.Event()

    # --- interface -------------------------------------------------------------------------------

    async def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        await self._sync()
        pods = self._pods_by_replica()
        uids = {each["metadata"]["uid"] for each in self._deployments.objects.values()}
        self._unrecorded = {uid: run for uid, run in self._unrecorded.items() if uid in uids}
        return {
            name: await self._describe(deployment, pods.get(name, []))
            for name, deployment in sorted(self._deployments.objects.items())
            if parse_replica_name(name)
            and "deletionTimestamp" not in deployment["metadata"]
            and not (
                is_unfinished(deployment) and self._age_s(deployment) < START_REQUEST_TIMEOUT_S
            )
        }

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        build_deployment(spec, self._fleet)  # refuses what can never be started
        await self._sync()
        await self._fence.enter(epoch)
        await self._repeat_on_conflict(spec.name, lambda: self._start(spec, epoch))

    async def prepare_pool(self, spec: LaunchSpec, epoch: int) -> None:
        await self._fence.enter(epoch)
        for each in build_pool_objects(spec, self._fleet):
            await self._apply(each)

    async def drain(self, name: str, epoch: int) -> None:
        await self._fence.enter(epoch)
        if name:
            await self._sync()
            await self._repeat_on_conflict(name, lambda: self._end(name, epoch, is_stop=False))

    async def stop(self, name: str, epoch: int) -> None:
        await self._sync()
        await self._fence.enter(epoch)
        if await self._repeat_on_conflict(name, lambda: self._end(name, epoch, is_stop=True)):
            await self._kill_pods(name)

    async def remove(self, name: str, epoch: int) -> None:
        await self._sync()
        await self._fence.enter(epoch)
        await self._repeat_on_conflict(name, lambda: self._remove(name, epoch))

    async def read_log(self, name: str, max_bytes: int) -> bytes:
        await self._sync()
        deployment = self._deployments.objects.get(name)
        pod = None if deployment is None else find_pod(deployment, self._pods_of(name))
        if pod is None or max_bytes <= 0:
            return b""
        path = f"{self._pods_path}/{pod['metadata']['name']}/log"
        content = b""
        for previous in ("true", "false"):  # the container before its last restart, then this one
            query = {"container": CONTAINER, "previous": previous, "tailLines": MAX_LOG_LINES}
            try:
                content += await self._api.read_text(path, query)
            except KubernetesApiError as error:
                if error.status not in {400, 404}:  # there is no such container
                    raise
        return content[-max_bytes:]

    async def close(self) -> None:
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches = []
        await self._api.close()

    # --- actions ---------------------------------------------------------------------------------

    async def _start(self, spec: LaunchSpec, epoch: int) -> None:
        deployment = await self._read_deployment(spec.name, epoch)
        if deployment is None:
            created = await self._create(spec, epoch)
            try:
                await self._fence.confirm(epoch)
            except StaleEpochError:
                with contextlib.suppress(KubernetesApiError):  # the next leader has taken it over
                    await self._delete_deployment(created)
                raise
            # Kubernetes has written its status since, so that its version is another one.
            deployment = await self._read_deployment(spec.name, epoch) or created
        if "deletionTimestamp" in deployment["metadata"]:
            finalizers = ", ".join(deployment["metadata"].get("finalizers", ()))
            raise LaunchError(
                f"the Deployment {spec.name} is being deleted, and waits for its finalizers ({finalizers}); let them "
                "end, or remove them"
            )
        replica = await self._describe(deployment, self._pods_of(spec.name))
        if replica.state is not LaunchState.EXITED:
            return
        attempt = replica.attempt + (not is_unfinished(deployment))
        body = build_deployment(spec, self._fleet, attempt=attempt)
        body["metadata"] |= {
            "resourceVersion": deployment["metadata"]["resourceVersion"],
            "annotations": self._annotations(epoch, ReplicaRunRecord(attempt=attempt)),
        }
        replaced = await self._api.request("PUT", f"{self._deployments_path}/{spec.name}", body)
        self._deployments.update(replaced)
        log.info("replica_started", replica=spec.name, attempt=attempt)

    async def _create(self, spec: LaunchSpec, epoch: int) -> KubernetesObject:
        """Create a Deployment without a pod."""
        body = build_deployment(spec, self._fleet, is_running=False)
        body["metadata"]["annotations"] = self._annotations(epoch, ReplicaRunRecord())
        deployment = await self._api.request("POST", self._deployments_path, body)
        self._deployments.update(deployment)
        return deployment

    async def _end(self, name: str, epoch: int, *, is_stop: bool) -> bool:
        """Leave a replica without a pod. Returns whether it had one, or may have."""
        deployment = await self._read_deployment(name, epoch)
        if deployment is None:
            return False
        replica = await self._describe(deployment, self._pods_of(name))
        run = self._read_run(deployment)
        is_running = bool(deployment["spec"]["replicas"])
        if run.exited_at is not None or (not is_running and not is_stop):
            return False
        if replica.state is LaunchState.EXITED:  # it crashed, and would be restarted
            ended = msgspec.structs.replace(
                run,
                ended_by="stop",
                exited_at=replica.exited_at or self._clock(),
                exit_status=replica.exit_status,
                reason=replica.reason,
            )
        else:
            ended = msgspec.structs.replace(run, ended_by="stop" if is_stop else "drain")
        change = {
            "metadata": {
                "resourceVersion": deployment["metadata"]["resourceVersion"],
                "annotations": self._annotations(epoch, ended),
            },
            "spec": {"replicas": 0},
        }
        self._deployments.update(
            await self._api.request("PATCH", f"{self._deployments_path}/{name}", change)
        )
        return True

    async def _kill_pods(self, name: str) -> None:
        """Kill the pods of a replica that shall have none, and wait until they are gone."""
        for grace_s in (STOP_GRACE_S, 0):  # the node of the second may be lost
            killed: set[str] = set()
            deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
            while True:
                changed = asyncio.Event()
                self._waiters.add(changed)
                try:
                    pods = self._pods_of(name)
                    deployment = self._deployments.objects.get(name)
                    if not pods and (deployment is None or has_settled(deployment)):
                        return
                    for pod in pods:
                        uid, pod_name = pod["metadata"]["uid"], pod["metadata"]["name"]
                        if uid not in killed:
                            killed.add(uid)
                            options = {
                                "gracePeriodSeconds": grace_s,
                                "preconditions": {"uid": uid},
                            }
                            await self._api.delete(f"{self._pods_path}/{pod_name}", options)
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    break
                finally:
                    self._waiters.discard(changed)

    async def _remove(self, name: str, epoch: int) -> None:
        deployment = await self._read_deployment(name, epoch)
        if deployment is None or "deletionTimestamp" in deployment["metadata"]:
            return
        replica = await self._describe(deployment, self._pods_of(name))
        if replica.state is not LaunchState.EXITED:
            raise LaunchError(f"replica {name} is running; stop it before removing it")
        await self._delete_deployment(deployment)
        pool = replica.pool
        replicas = map(parse_replica_name, self._deployments.objects)
        if all(other is None or other[0] != pool for other in replicas):
            for collection, prefix in zip(
                self._pool_collections.values(), ("pool", "pre-pull"), strict=True
            ):
                await self._api.delete(f"{collection}/{prefix}-{pool}", {})

    async def _delete_deployment(self, deployment: KubernetesObject) -> None:
        metadata = deployment["metadata"]
        options = {
            "preconditions": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "propagationPolicy": "Background",
        }
        await self._api.delete(f"{self._deployments_path}/{metadata['name']}", options)
        self._deployments.remove(deployment)

    async def _apply(self, each: KubernetesObject) -> None:
        """Create an object of a pool, or give the existing one the same specification."""
        collection = self._pool_collections[each["kind"]]
        try:
            await self._api.request("POST", collection, each)
        except KubernetesApiError as error:
            if error.reason != "AlreadyExists":
                raise
            await self._api.request(
                "PATCH", f"{collection}/{each['metadata']['name']}", {"spec": each["spec"]}
            )

    async def _repeat_on_conflict(self, name: str, action: Callable[[], Any]) -> Any:  # noqa: ANN401 - as the action
        """Return the result of an action that starts again if another client has changed the object meanwhile."""
        for _ in range(MAX_CONFLICTS):
            try:
                return await action()
            except KubernetesApiError as error:
                if error.status != 409:
                    raise
        raise LaunchError(f"replica {name}: other clients change its Deployment all the time")

    async def _read_deployment(self, name: str, epoch: int) -> KubernetesObject | None:
        """Return a Deployment of this fleet as it is now, on which a controller of the epoch may act."""
        deployment = await self._api.find(f"{self._deployments_path}/{name}")
        if deployment is None:
            return None
        metadata = deployment["metadata"]
        if metadata.get("labels", {}).get(LABEL_FLEET) != self._fleet:
            raise LaunchError(
                f"the Deployment {name} of the namespace {self._namespace} does not belong to the fleet {self._fleet}; "
                "set another `kubernetes.namespace`"
            )
        check_epoch(metadata.get("annotations", {}), epoch)
        return deployment

    # --- observation -----------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Wait until the objects are known.

        Raises:
            LaunchError: The cluster cannot be watched at present.
        """
        caches = (self._deployments, self._pods)
        if not self._watches:
            for cache in caches:
                self._watches.append(asyncio.create_task(cache.run(), name="watch-kubernetes"))
        for task, cache in zip(self._watches, caches, strict=True):
            if task.done():  # by a defect; otherwise its objects would stay as they are
                task.result()
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                await cache.synced.wait()
            if cache.error:
                raise LaunchError(cache.error)

    async def _describe(
        self, deployment: KubernetesObject, pods: list[KubernetesObject]
    ) -> LaunchedReplica:
        """Return the state of a replica, and keep what its pods will not show any more."""
        pod = find_pod(deployment, pods)
        now = self._clock()
        run = follow_run(self._read_run(deployment), deployment, pod, now)
        if run != read_run(deployment) or deployment["spec"]["replicas"] > 1:
            await self._record_run(deployment, run)
        zone = await self._find_zone(run.node, pod)
        return describe_pod(deployment, pod, run, zone, now)

    def _read_run(self, deployment: KubernetesObject) -> ReplicaRunRecord:
        """Return the latest run of a Deployment, which may not be recorded there."""
        metadata = deployment["metadata"]
        unrecorded = self._unrecorded.get(metadata["uid"])
        if unrecorded is None or unrecorded[0] != metadata.get("annotations", {}).get(
            ANNOTATION_RUN
        ):
            return read_run(deployment)
        return unrecorded[1]

    async def _record_run(self, deployment: KubernetesObject, run: ReplicaRunRecord) -> None:
        """Record a run if this launcher is the leader's, and take back further pods that others have asked for.

        A run that cannot be recorded is kept, since the replica serves nevertheless.
        """
        metadata = deployment["metadata"]
        now = self._clock()
        uid, known = metadata["uid"], metadata.get("annotations", {}).get(ANNOTATION_RUN)
        *_, retry_at = self._unrecorded.get(uid, (known, run, now))
        self._unrecorded[uid] = (known, run, retry_at)
        if not self._fence.is_entered or now < retry_at:
            return
        self._unrecorded[uid] = (known, run, now + RECORD_RETRY_S)
        change: KubernetesObject = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "annotations": {ANNOTATION_RUN: msgspec.json.encode(run).decode()},
            }
        }
        if deployment["spec"]["replicas"] > 1:
            change["spec"] = {"replicas": 1}
        try:
            changed = await self._api.request(
                "PATCH", f"{self._deployments_path}/{metadata['name']}", change
            )
        except LaunchError as error:
            if isinstance(error, KubernetesApiError) and error.status in {404, 409}:
                self._unrecorded.pop(uid, None)  # the next observation records it
            else:
                log.warning("run_not_recorded", replica=metadata["name"], reason=str(error))
        else:
            self._unrecorded.pop(uid, None)
            self._deployments.update(changed)

    async def _find_zone(self, node: str, pod: KubernetesObject | None) -> str:
        """Return the zone of a node; empty if it is unknown."""
        labels = {} if pod is None else pod["metadata"].get("labels", {})
        if ZONE_LABEL in labels:
            return str(labels[ZONE_LABEL])
        if node and node not in self._zones:
            zone = ""
            try:
                found = await self._api.request("GET", f"/api/v1/nodes/{node}")
                zone = found["metadata"].get("labels", {}).get(ZONE_LABEL, "")
            except LaunchError as error:
                if not isinstance(error, KubernetesApiError) or error.status not in {403, 404}:
                    return ""
            self._zones[node] = zone  # empty if the right to read nodes is missing
        return self._zones.get(node, "")

    def _pods_of(self, name: str) -> list[KubernetesObject]:
        return self._pods_by_replica().get(name, [])

    def _pods_by_replica(self) -> dict[str, list[KubernetesObject]]:
        pods: dict[str, list[KubernetesObject]] = {}
        for pod in self._pods.objects.values():
            labels = pod["metadata"].get("labels", {})
            pods.setdefault(labels.get(LABEL_REPLICA, ""), []).append(pod)
        return pods

    def _on_changed(self) -> None:
        self.changed.set()
        for waiter in self._waiters:
            waiter.set()

    def _age_s(self, deployment: KubernetesObject) -> float:
        return self._clock() - parse_time(deployment["metadata"]["creationTimestamp"])

    def _annotations(self, epoch: int, run: ReplicaRunRecord) -> dict[str, str]:
        return {
            ANNOTATION_EPOCH: str(epoch),
            ANNOTATION_RUN: msgspec.json.encode(run).decode(),
        }
