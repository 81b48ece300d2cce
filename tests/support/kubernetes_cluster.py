"""Double of a Kubernetes cluster: its controllers, its scheduler and its nodes, which run pods as processes.

What it leaves out: ReplicaSets between Deployments and pods, preStop hooks (their time is not waited for), probes, node
selectors, and images, which are those of this machine. Pods of one Deployment get the same address again.

Never compared with a real cluster by a test. What one did is in `docs/contributing/testing.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.kubernetes_api import KubernetesApiServer, Object, now

GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"
HASH = "pod-template-hash"


@dataclass
class Node:
    name: str
    zone: str = "a"
    gpus: int = 0


class KubernetesCluster:
    """Controllers, scheduler and nodes that act on the objects of an API server.

    Args:
        api: The API server.
        folder: Folder for the logs of containers.
        nodes: The nodes.
        restart_delay_s: Back-off of a container that has exited. A kubelet restarts it at once for the first time, and
            then after 10 s, 20 s, ... 300 s.
    """

    def __init__(
        self,
        api: KubernetesApiServer,
        folder: Path,
        nodes: tuple[Node, ...] = (Node("node-1"),),
        restart_delay_s: float = 60.0,
    ) -> None:
        self.api = api
        self.secrets: dict[str, dict[str, str]] = {}
        self.restart_delay_s = restart_delay_s
        self._folder = folder
        self._nodes = {node.name: node for node in nodes}
        self._lost: set[str] = set()
        self._numbers = itertools.count(1)
        self._addresses: dict[str, str] = {}
        self._kubelets: dict[str, asyncio.Task[None]] = {}
        """Tasks that run pods, by UID."""
        self._deletions: dict[str, asyncio.Event] = {}
        """Events that are set once a pod is being deleted, by UID."""
        api.read_log = self._read_log
        for node in nodes:
            metadata = {"name": node.name, "labels": {ZONE: node.zone}}
            api.create("nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Run the components of the cluster."""
        task = asyncio.create_task(self._run_components())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for kubelet in self._kubelets.values():
                kubelet.cancel()
            await asyncio.gather(*self._kubelets.values(), return_exceptions=True)

    def lose_node(self, name: str) -> None:
        """Let a node fail: its pods are evicted, but their end is not confirmed.

        Kubernetes reads a text from left to right. See https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller.
        """
        self._lost.add(name)
        for pod_name, pod in list(self.api.objects["pods"].items()):
            if pod["spec"].get("nodeName") == name:
                uid = pod["metadata"]["uid"]
                if uid in self._kubelets:
                    self._kubelets.pop(uid).cancel()
                self.api.delete("pods", pod_name)

    # --- control plane ---------------------------------------------------------------------------

    async def _run_components(self) -> None:
        while True:
            self.api.changed.clear()
            for deployment in list(self.api.objects["deployments"].values()):
                self._control_deployment(deployment)
            for pod in list(self.api.objects["pods"].values()):
                self._schedule(pod)
            active = {
                pod["metadata"]["uid"]
                for pod in self.api.objects["pods"].values()
                if "deletionTimestamp" not in pod["metadata"]
            }
            for uid in self._deletions.keys() - active:
                self._deletions[uid].set()
            await self.api.changed.wait()

    def _control_deployment(self, deployment: Object) -> None:
        """Keep the pods of a Deployment.

        Kubernetes reads a text from left to right. See https://kubernetes.io/docs/concepts/workloads/controllers/deployment/#recreate-deployment.
        """
        metadata, spec = deployment["metadata"], deployment["spec"]
        assert spec["strategy"]["type"] == "Recreate"
        template = json.dumps(spec["template"], sort_keys=True)
        digest = hashlib.sha256(template.encode()).hexdigest()[:10]
        pods = [
            pod
            for pod in self.api.objects["pods"].values()
            if pod["metadata"].get("ownerReferences", [{}])[0].get("uid") == metadata["uid"]
        ]
        active = [
            pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and pod.get("status", {}).get("phase") not in {"Failed", "Succeeded"}
        ]
        old = [pod for pod in pods if pod["metadata"]["labels"][HASH] != digest]
        for pod in active:
            if pod in old or not spec["replicas"]:
                self.api.delete("pods", pod["metadata"]["name"])
                active = [other for other in active if other is not pod]
        is_deleting = "deletionTimestamp" in metadata
        if spec["replicas"] and not active and not old and not is_deleting:
            active.append(self._create_pod(deployment, digest))
        status = {"observedGeneration": metadata["generation"], "replicas": len(active)}
        self.api.set_status("deployments", metadata["name"], status)

    def _create_pod(self, deployment: Object, digest: str) -> Object:
        metadata = deployment["metadata"]
        template = copy.deepcopy(deployment["spec"]["template"])
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "controller": True}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": f"{metadata['name']}-{digest}-{next(self._numbers)}",
                "labels": {**template["metadata"]["labels"], HASH: digest},
                "ownerReferences": [owner | {"name": metadata["name"], "uid": metadata["uid"]}],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        return self.api.create("pods", body)

    def _schedule(self, pod: Object) -> None:
        """Place a pod on a node, or say why none fits."""
        metadata, spec = pod["metadata"], pod["spec"]
        if "nodeName" in spec or "deletionTimestamp" in metadata:
            if "nodeName" not in spec:
                self.api.forget("pods", metadata["name"])
            return
        node = next((node for node in self._nodes.values() if self._fits(spec, node)), None)
        if node is None:
            message = (
                f"0/{len(self._nodes)} nodes are available: {len(self._nodes)} Insufficient {GPU}."
            )
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status = {"phase": "Pending", "conditions": [condition | {"message": message}]}
            self.api.set_status("pods", metadata["name"], status)
            return
        placed = copy.deepcopy(pod)
        placed["spec"]["nodeName"] = node.name
        placed["status"] = {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
        }
        placed = self.api.update("pods", placed)
        deleted = self._deletions[metadata["uid"]] = asyncio.Event()
        self._kubelets[metadata["uid"]] = asyncio.create_task(self._run_pod(placed, deleted))

    def _fits(self, spec: Object, node: Node) -> bool:
        if node.name in self._lost:
            return False
        used = sum(
            _gpus(pod["spec"])
            for pod in self.api.objects["pods"].values()
            if pod["spec"].get("nodeName") == node.name
        )
        affinity = spec.get("affinity", {}).get("nodeAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
        zones = [
            expression["values"]
            for term in terms.get("nodeSelectorTerms", ())
            for expression in term["matchExpressions"]
        ]
        is_in_zone = all(node.zone in values for values in zones)
        return is_in_zone and used + _gpus(spec) <= node.gpus

    # --- nodes -----------------------------------------------------------------------------------

    async def _run_pod(self, pod: Object, deleted: asyncio.Event) -> None:
        """Run the container of a pod until the pod is deleted, as a kubelet does.

        See https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/.
        """
        name = pod["metadata"]["name"]
        status = copy.deepcopy(pod["status"]) | {"podIP": self._address_of(pod)}
        restarts = 0
        last_state: Object = {}

        def report(state: Object) -> None:
            container = {
                "name": "replica",
                "image": pod["spec"]["containers"][0]["image"],
                "imageID": "",
                "ready": "running" in state,
                "restartCount": restarts,
                "state": state,
                "lastState": last_state,
            }
            status["containerStatuses"] = [container]
            status["phase"] = "Running" if "running" in state or restarts else "Pending"
            self.api.set_status("pods", name, copy.deepcopy(status))

        while not deleted.is_set():
            started_at = now()
            running = {"running": {"startedAt": started_at}}
            log = self._log_path(name, restarts)
            exited = await self._run_container(pod, log, deleted, partial(report, running))
            terminated = {"startedAt": started_at, "finishedAt": now(), **exited}
            report({"terminated": terminated})
            if not deleted.is_set():
                last_state = {"terminated": terminated}
                report({"waiting": {"reason": "CrashLoopBackOff"}})
                await asyncio.wait(
                    {asyncio.create_task(deleted.wait())}, timeout=self.restart_delay_s
                )
                restarts += 1
        if name in self.api.objects["pods"]:
            self.api.forget("pods", name)

    async def _run_container(
        self, pod: Object, log: Path, deleted: asyncio.Event, on_started: Callable[[], None]
    ) -> Object:
        """Run a process until it exits, or is killed because its pod is deleted. Returns its state."""
        variables = dict(self._read_environment(pod))
        command = [expand(part, variables) for part in pod["spec"]["containers"][0]["command"]]
        with log.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=output, stderr=output, env=os.environ | variables
                )
            except FileNotFoundError:
                message = f'exec: "{command[0]}": executable file not found in $PATH'
                return {"exitCode": 128, "reason": "StartError", "message": message}
        on_started()
        exit_task, deletion = map(asyncio.ensure_future, (process.wait(), deleted.wait()))
        try:
            await asyncio.wait({exit_task, deletion}, return_when=asyncio.FIRST_COMPLETED)
            if not exit_task.done():
                process.terminate()
                known = self.api.objects["pods"].get(pod["metadata"]["name"], {"metadata": {}})
                grace_s = known["metadata"].get("deletionGracePeriodSeconds", 0)
                await asyncio.wait({exit_task}, timeout=grace_s)
        finally:
            deletion.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            code = await exit_task
        text = log.read_text()[-2048:]  # noqa: ASYNC240 - a small file; terminationMessagePolicy: FallbackToLogsOnError
        state: Object = {
            "exitCode": 128 - code if code < 0 else code,
            "reason": "Error" if code else "Completed",
        }
        return state | ({"message": text} if code and text else {})

    def _address_of(self, pod: Object) -> str:
        replica = pod["metadata"]["ownerReferences"][0]["name"]
        number = len(self._addresses) + 1
        return self._addresses.setdefault(
            replica, f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.{number}"
        )

    def _read_environment(self, pod: Object) -> list[tuple[str, str]]:
        values = []
        for variable in pod["spec"]["containers"][0].get("env", ()):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"] == {"fieldPath": "status.podIP"}
                value = self._address_of(pod)
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                value = self.secrets[reference["name"]][reference["key"]]
            else:
                value = variable["value"]
            values.append((variable["name"], value))
        return values

    def _log_path(self, pod: str, restarts: int) -> Path:
        return self._folder / f"{pod}-{restarts}.log"

    def _read_log(self, pod: str, previous: bool) -> str | None:
        statuses = self.api.objects["pods"][pod]["status"].get("containerStatuses", [{}])
        number = statuses[0].get("restartCount", -1) - int(previous)
        path = self._log_path(pod, number)
        return path.read_text() if path.exists() else None


def _gpus(spec: Object) -> int:
    return int(spec["containers"][0].get("resources", {}).get("limits", {}).get(GPU, 0))


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace variables in an argument, except after a second `$`.

    Kubernetes reads a text from left to right. See https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/.
    """
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
        text,
    )
