"""A fleet on the double of Kubernetes loses no request, whatever people, nodes and the API server do to it.

These are situations in which a fleet on a real control plane lost none, as far as the double has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest
from tests.support.controlled_fleet import Fleet, declare
from tests.support.gateway_client import BODIES, CHAT
from tests.support.kubernetes_api import ApiError, KubernetesApiServer, Object
from tests.support.kubernetes_cluster import KubernetesCluster, Node
from tests.support.waiting import until, wait_for

BODY = BODIES[CHAT] | {"model": "chat"}
NUM_CLIENTS = 3
SHORT = {
    "launchers.kubernetes_api.MAX_SILENCE_S": 1.0,
    "launchers.kubernetes_api.MAX_RETRY_DELAY_S": 0.2,
    "launchers.kubernetes_api.REFUSED_RETRY_DELAY_S": 0.1,
    "control.replica_actions.PREPARATION_INTERVAL_S": 0.5,
}
"""Bounds that would make the test wait."""


def is_reachable(url: str) -> bool:
    with contextlib.suppress(httpx2.ConnectError):
        return bool(httpx2.get(url).text)
    return False


class World:
    """A fleet on a cluster, with controllers in the test's process."""

    def __init__(self, fleet: Fleet, cluster: KubernetesCluster) -> None:
        self.fleet, self.cluster, self.api = fleet, cluster, cluster.api
        self.controllers: list[asyncio.Task[None]] = []
        self.replicas, self.version = 0, 1

    def apply(self, replicas: int) -> None:
        """Declare a number of replicas of the current version."""
        self.replicas = replicas
        config = declare(
            *("chat", f"print={self.version}"),
            address="{host}:{port}",
            launcher="kubernetes",
            image="registry.internal/replica:1",
            drain_deadline_s=2,
            replicas=replicas,
        )
        self.fleet.apply(config)

    def lead(self) -> None:
        self.controllers.append(self.fleet.start_controller(f"c{len(self.controllers)}"))

    def runs(self) -> set[tuple[str, int]]:
        """Return the running containers of the declared version, by pod and number of restarts."""
        return {
            (name, container["restartCount"])
            for name, pod in self.api.objects["pods"].items()
            if "deletionTimestamp" not in pod["metadata"]
            and f"print={self.version}" in pod["spec"]["containers"][0]["command"]
            for container in pod["status"].get("containerStatuses", ())
            if "running" in container["state"]
        }

    async def settle(self) -> None:
        """Wait until the fleet is as declared."""

        def is_settled() -> bool:
            status, replicas = self.fleet.status, self.replicas
            is_ready = status.is_as_declared and len(status.replicas) == replicas
            return is_ready and len(self.runs()) == replicas

        await until(is_settled)

    async def replace(self, disturb: Callable[[str], object]) -> None:
        """Disturb a pod, and wait until another one or another container runs in its place."""
        before = self.runs()
        disturb(min(before)[0])
        await until(lambda: self.runs() - before)

    def edit(self, change: Callable[[Object], object]) -> None:
        """Edit a Deployment, as a person does."""
        deployment = copy.deepcopy(self.api.objects["deployments"][self.first])
        change(deployment)
        del deployment["metadata"]["resourceVersion"]
        self.api.update("deployments", deployment)

    @property
    def first(self) -> str:
        """Name of the first replica."""
        return min(self.api.objects["deployments"])

    def kill(self, pod: str) -> None:
        """Kill the process of a pod."""
        address = self.api.objects["pods"][pod]["status"]["podIP"]
        (url,) = {each.url for each in self.fleet.status.replicas if address in each.url}
        wait_for(lambda: is_reachable(url))  # it may have been restarted just now
        os.kill(int(httpx2.get(url).text), signal.SIGKILL)

    # --- situations ------------------------------------------------------------------------------

    async def scale_up(self) -> None:
        self.apply(4)

    async def scale_down(self) -> None:
        self.apply(2)

    async def roll_out(self) -> None:
        self.version = 2
        self.apply(2)

    async def api_hangs_while_a_replica_crashes(self) -> None:
        self.api.answers.clear()
        await self.replace(self.kill)
        await self.fleet.wait_for_reason(lambda reason: "silent" in reason)
        self.api.answers.set()

    async def api_restarts_with_compacted_history(self) -> None:
        self.api.expires_watches = True
        self.api.compact()
        self.api.cut_connections()
        await self.pod_is_deleted()
        self.api.expires_watches = False

    async def api_answers_429(self) -> None:
        self.api.throttled = 5
        self.apply(3)
        await until(lambda: not self.api.throttled)
        await self.settle()
        self.apply(2)

    async def others_annotate_deployments_before_each_write(self) -> None:
        async def annotate(_: str, name: str) -> None:
            if name in self.api.objects["deployments"]:
                self.api.before_write = None  # each write of the controller conflicts once
                self.edit(
                    lambda each: each["metadata"]["annotations"].update(seen=str(time.time()))
                )

        for count in (3, 2):
            self.api.before_write = annotate
            self.apply(count)
            await self.settle()
            assert self.api.before_write is None

    async def deployment_is_scaled_to_0(self) -> None:
        await self.replace(lambda _: self.edit(lambda each: each["spec"].update(replicas=0)))

    async def deployment_is_scaled_to_3(self) -> None:
        self.edit(lambda each: each["spec"].update(replicas=3))
        await until(lambda: self.api.objects["deployments"][self.first]["spec"]["replicas"] == 1)

    async def deployment_is_deleted(self) -> None:
        await self.replace(lambda _: self.api.delete("deployments", self.first))

    async def epoch_is_deleted(self) -> None:
        (name,) = self.api.objects["configmaps"]
        self.api.forget("configmaps", name)
        await self.pod_is_deleted()

    async def disruption_budget_is_deleted(self) -> None:
        self.api.forget("poddisruptionbudgets", "pool-chat")
        await until(lambda: self.api.objects["poddisruptionbudgets"])

    async def label_of_fleet_is_removed(self) -> None:
        name = self.first
        labels = dict(self.api.objects["deployments"][name]["metadata"]["labels"])
        self.edit(lambda each: each["metadata"]["labels"].pop("argosy.dev/fleet"))
        await self.fleet.wait_for_reason(lambda reason: "does not belong to the fleet" in reason)
        self.edit(lambda each: each["metadata"].update(labels=labels))

    async def pod_is_deleted(self) -> None:
        await self.replace(lambda pod: self.api.delete("pods", pod))

    async def replica_is_killed(self) -> None:
        await self.replace(self.kill)

    async def node_is_lost(self) -> None:
        await self.replace(
            lambda pod: self.cluster.lose_node(self.api.objects["pods"][pod]["spec"]["nodeName"])
        )

    async def action_is_refused(self) -> None:
        text = 'pods "chat" is forbidden: exceeded quota: q, requested: pods=1, used: pods=5'
        self.api.refused["POST deployments"] = ApiError(403, "Forbidden", text)
        self.apply(3)
        await self.fleet.wait_for_reason(lambda reason: "exceeded quota" in reason)
        self.api.refused.clear()
        await self.settle()
        self.apply(2)

    async def token_is_refused(self) -> None:
        self.api.token = "renewed"  # noqa: S105 - not a secret
        self.apply(3)
        await self.fleet.wait_for_reason(lambda reason: "refuses the token" in reason)
        self.api.write_kubeconfig()
        await self.settle()
        self.apply(2)

    async def leader_is_killed_while_it_scales(self) -> None:
        self.lead()
        self.apply(4)
        await until(lambda: len(self.api.objects["deployments"]) > 2)
        self.controllers[0].cancel()
        await self.settle()
        self.apply(2)

    async def all_controllers_are_killed(self) -> None:
        for controller in self.controllers:
            controller.cancel()
        await asyncio.gather(*self.controllers, return_exceptions=True)
        await self.replace(self.kill)
        self.lead()


QUICK = [World.disruption_budget_is_deleted, World.pod_is_deleted, World.node_is_lost]
OTHERS = [
    World.scale_up,
    World.scale_down,
    World.roll_out,
    World.api_hangs_while_a_replica_crashes,
    World.api_restarts_with_compacted_history,
    World.api_answers_429,
    World.others_annotate_deployments_before_each_write,
    World.deployment_is_scaled_to_0,
    World.deployment_is_scaled_to_3,
    World.deployment_is_deleted,
    World.epoch_is_deleted,
    World.label_of_fleet_is_removed,
    World.replica_is_killed,
    World.action_is_refused,
    World.token_is_refused,
    World.leader_is_killed_while_it_scales,
    World.all_controllers_are_killed,
]


@pytest.mark.parametrize(
    "situations",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive),
    ],
)
async def test_no_request_is_lost_whatever_happens_to_a_fleet(
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    situations: list[Callable[[World], Awaitable[None]]],
) -> None:
    for name, value in SHORT.items():
        monkeypatch.setattr(f"argosy.fleet.{name}", value)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    api = KubernetesApiServer()
    nodes = tuple(Node(f"node-{number}") for number in range(3))
    cluster = KubernetesCluster(api, tmp_path, nodes, restart_delay_s=0.0)
    world = World(fleet, cluster)
    statuses = Counter[int]()

    async def send_requests(client: httpx2.AsyncClient) -> None:
        while True:
            response = await client.post(CHAT, json=BODY)
            statuses[response.status_code] += 1

    world.apply(2)
    async with api.serve(tmp_path / "kubeconfig"), cluster.run(), fleet.run_gateway() as client:
        world.lead()
        await world.settle()
        while (await client.post(CHAT, json=BODY)).status_code != 200:
            pass  # the controller may not have found the gateway yet
        clients = [asyncio.create_task(send_requests(client)) for _ in range(NUM_CLIENTS)]
        try:
            for situation in situations:
                before = statuses.copy()
                await situation(world)
                await world.settle()
                assert set(statuses - before) <= {200}, (situation.__name__, statuses)
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
