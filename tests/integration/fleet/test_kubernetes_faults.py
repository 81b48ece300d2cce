"""`KubernetesLauncher` under faults of the API, which were seen with the components of Kubernetes 1.36."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import operator
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.fleet.launcher_suite import has_exited, spec, wait_for
from tests.support.kubernetes_api import ApiError, KubernetesApiServer, Object, matches, now

from argosy.deployment import KubernetesSettings
from argosy.fleet.launchers import KubernetesLauncher, LaunchError, LaunchState

API = "argosy.fleet.launchers.kubernetes_api"
SHORT = {"MAX_SILENCE_S": 0.2, "MAX_RETRY_DELAY_S": 0.2, "REFUSED_RETRY_DELAY_S": 0.1}


@contextlib.asynccontextmanager
async def connected(
    **settings_of_api: float,
) -> AsyncIterator[tuple[KubernetesApiServer, KubernetesLauncher]]:
    """Start a server with one Deployment, and a launcher that watches it."""
    api = KubernetesApiServer()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in settings_of_api.items():
            patch.setattr(f"{API}.{name}", value)
        file = Path(folder) / "kubeconfig"
        patch.setenv("KUBECONFIG", str(file))
        async with api.serve(file):
            launcher = KubernetesLauncher("test", KubernetesSettings())
            await launcher.start(spec(address="{host}:{port}", image="replica:1"), 1)
            try:
                yield api, launcher
            finally:
                await launcher.close()


def add_deployment(api: KubernetesApiServer, number: int) -> None:
    """Add a Deployment, as another controller of the fleet does."""
    text = json.dumps(api.objects["deployments"]["a-1-0"]).replace("a-1-0", f"a-1-{number}")
    body = json.loads(text)
    del body["metadata"]["resourceVersion"]
    api.create("deployments", body)


def add_pod(api: KubernetesApiServer, name: str) -> None:
    """Add the running pod of a Deployment, into which a webhook has put a container. Statuses are sorted by name."""
    template = api.objects["deployments"][name]["spec"]["template"]
    running = {"ready": True, "restartCount": 0, "image": "replica:1", "imageID": ""}
    running |= {"state": {"running": {"startedAt": now()}}, "lastState": {}}
    statuses = [running | {"name": container} for container in ("istio-proxy", "replica")]
    statuses[0] |= {"restartCount": 7, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    body = {"apiVersion": "v1", "kind": "Pod", "spec": {**template["spec"], "nodeName": "node-1"}}
    body["metadata"] = {**copy.deepcopy(template["metadata"]), "name": f"{name}-pod"}
    body["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": statuses,
    }
    api.create("pods", body)


async def wait_until_equal(api: KubernetesApiServer, launcher: KubernetesLauncher) -> None:
    """Wait until the launcher lists the Deployments of the server."""
    async with asyncio.timeout(20):
        while True:
            launcher.changed.clear()
            with contextlib.suppress(LaunchError):
                if set(await launcher.list_replicas()) == set(api.objects["deployments"]):
                    return
            await launcher.changed.wait()


async def list_until_refused(launcher: KubernetesLauncher) -> None:
    while True:
        launcher.changed.clear()
        await launcher.list_replicas()
        await launcher.changed.wait()


async def follow(faults: list[str]) -> None:
    async with connected(**SHORT, MIN_RENEWAL_INTERVAL_S=0.0) as (api, launcher):
        for number, fault in enumerate(faults, start=1):
            if fault == "expired token":
                api.token = f"token-{number}"
                with contextlib.suppress(LaunchError, TimeoutError):
                    async with asyncio.timeout(0.2):  # the server may hang
                        await launcher.drain("", 1)  # refused, while the watches go on
                api.write_kubeconfig()
            elif fault == "410":
                api.compact()
                api.expires_watches = True
                api.end_watches()
            elif fault == "hang":
                api.answers.clear()
            elif fault == "cut":
                api.cut_connections()
            elif fault == "end":
                api.end_watches()
            add_deployment(api, number)
            if number % 2:
                api.forget("deployments", f"a-1-{number}")
            await asyncio.sleep(0)
            api.expires_watches = False
        api.answers.set()
        await wait_until_equal(api, launcher)


FAULTS = st.sampled_from(["expired token", "410", "hang", "cut", "end"])


@settings(max_examples=15, deadline=None)
@given(st.lists(FAULTS, min_size=1, max_size=6))
def test_copy_of_the_cluster_is_right_after_any_faults(faults: list[str]) -> None:
    asyncio.run(follow(faults))


async def test_watches_outlive_a_refused_token_and_a_silent_connection() -> None:
    async with connected(**SHORT) as (api, launcher):
        api.token = "renewed"  # noqa: S105 - not a secret
        api.write_kubeconfig()
        await launcher.drain("", 2)  # its first request is refused
        add_deployment(api, 1)
        await wait_until_equal(api, launcher)
        api.answers.clear()
        add_deployment(api, 2)
        with pytest.raises(LaunchError, match=r"silent for .*; what is known of the cluster is of"):
            await list_until_refused(launcher)
        api.answers.set()
        await wait_until_equal(api, launcher)


# --- objects that other programs have changed ----------------------------------------------------


def find_fields(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 - any JSON
    """Yield the paths of all parts of a value, except times, which the server checks."""
    if path[-1] not in {"startedAt", "finishedAt", "lastTransitionTime"}:
        yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_fields(item, (*path, key))


@st.composite
def damages(draw: st.DrawFn, each: Object) -> Object:
    """Return the object with some labels, annotations and fields of its status changed or removed."""
    damaged = copy.deepcopy(each)
    for _ in range(draw(st.integers(1, 3))):
        parts = (("metadata", "labels"), ("metadata", "annotations"), ("status",))
        paths = []
        for part in parts:
            value = functools.reduce(lambda found, key: found.get(key, {}), part, damaged)
            paths += list(find_fields(value, part))[1:]
        if not paths:
            break
        *parents, key = draw(st.sampled_from(paths))
        parent: Any = functools.reduce(operator.getitem, parents, damaged)
        values = {str: TEXTS, int: st.integers(0, 2**31 - 1), bool: st.booleans()}
        kind = type(parent[key])
        if kind in values and draw(st.booleans()):
            parent[key] = draw(values[kind])
        else:
            del parent[key]
    return damaged


TEXTS = st.text(max_size=12) | st.sampled_from(["{oops", "-1", "abc", "{}", "True", "False"])


async def damage(data: st.DataObject, plural: str) -> None:
    async with connected() as (api, launcher):
        add_deployment(api, 1)
        for name in ("a-1-0", "a-1-1"):
            add_pod(api, name)
        await wait_until_equal(api, launcher)
        await api.flush_watches()
        name = {"pods": "a-1-0-pod", "configmaps": "epoch-test"}.get(plural, "a-1-0")
        damaged = data.draw(damages(api.objects[plural][name]))
        selected = matches(damaged, ",".join(SELECTOR))
        with contextlib.suppress(ApiError):  # otherwise the server refuses it
            api.update(plural, damaged)
        await api.flush_watches()
        await asyncio.sleep(0.01)
        replicas = await launcher.list_replicas()
        other = replicas["a-1-1"]
        assert (other.state, other.url) == (LaunchState.RUNNING, "http://10.0.0.7:8000")
        if selected or plural != "deployments":
            assert (replicas["a-1-0"].pool, replicas["a-1-0"].generation) == ("a", 1)
        await launcher.drain("a-1-1", 2)
        assert (await launcher.list_replicas())["a-1-1"].state == LaunchState.DRAINING


SELECTOR = ("argosy.dev/fleet=test", "app.kubernetes.io/component=replica")


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["deployments", "pods", "configmaps"]))
def test_damaged_object_concerns_one_replica(data: st.DataObject, plural: str) -> None:
    asyncio.run(damage(data, plural))


async def test_replica_is_observed_while_nothing_can_be_recorded() -> None:
    async with connected() as (api, launcher):
        api.refused["PATCH deployments"] = ApiError(500, "InternalError", "failed calling webhook")
        add_pod(api, "a-1-0")
        await wait_for(launcher, lambda each: each.state == LaunchState.RUNNING)
        tries = api.requests["PATCH deployments"]
        for _ in range(20):
            assert (await launcher.list_replicas())["a-1-0"].attempt == 1
        assert api.requests["PATCH deployments"] == tries
        reader = KubernetesLauncher("test", KubernetesSettings())  # such as the command line
        assert (await reader.list_replicas())["a-1-0"].state == LaunchState.RUNNING
        await reader.close()
        assert api.requests["PATCH deployments"] == tries
        api.refused["GET pods"] = ApiError(403, "Forbidden", "pods/log is forbidden")
        with pytest.raises(LaunchError, match="pods/log is forbidden"):
            await launcher.read_log("a-1-0", 100)


async def test_replica_may_vanish_while_its_run_is_recorded() -> None:
    async with connected() as (api, launcher):

        async def vanish(method: str, name: str) -> None:
            if (method, name) == ("PATCH", "a-1-0"):
                api.before_write = None
                api.forget("deployments", name)
                launcher.changed.clear()
                while await launcher.list_replicas():
                    await launcher.changed.wait()
                    launcher.changed.clear()

        api.before_write = vanish
        add_pod(api, "a-1-0")
        while api.objects["deployments"]:
            await launcher.list_replicas()
            await asyncio.sleep(0)
        assert await launcher.list_replicas() == {}


async def test_further_pods_that_others_asked_for_are_taken_back() -> None:
    async with connected() as (api, launcher):
        deployment = copy.deepcopy(api.objects["deployments"]["a-1-0"])
        deployment["spec"]["replicas"] = 3
        api.update("deployments", deployment)
        await wait_for(
            launcher, lambda _: api.objects["deployments"]["a-1-0"]["spec"]["replicas"] == 1
        )


async def test_clock_of_a_node_decides_nothing() -> None:
    ahead = datetime.now(UTC) + timedelta(seconds=300)
    async with connected() as (api, launcher):
        add_pod(api, "a-1-0")
        status = copy.deepcopy(api.objects["pods"]["a-1-0-pod"]["status"])
        container = status["containerStatuses"][1]
        container["state"] = {"running": {"startedAt": f"{ahead:%Y-%m-%dT%H:%M:%SZ}"}}
        api.set_status("pods", "a-1-0-pod", copy.deepcopy(status))
        running = await wait_for(launcher, lambda each: each.state == LaunchState.RUNNING)
        assert running.started_at <= time.time()
        finished = ahead + timedelta(seconds=3)
        terminated = {"exitCode": 3, "finishedAt": f"{finished:%Y-%m-%dT%H:%M:%SZ}"}
        container["state"] = {
            "terminated": terminated | container["state"]["running"],
        }
        api.set_status("pods", "a-1-0-pod", status)
        exited = await wait_for(launcher, has_exited)
        assert exited.exited_at is not None
        assert running.started_at <= exited.exited_at <= time.time()


@pytest.mark.parametrize(
    ("action", "request_"),
    [
        ("start", "POST deployments"),
        ("start", "PUT deployments"),
        ("prepare_pool", "POST poddisruptionbudgets"),
        ("drain", "PATCH deployments"),
        ("stop", "PATCH deployments"),
        ("remove", "DELETE deployments"),
        ("remove", "GET deployments"),
    ],
)
async def test_refused_action_costs_three_requests(action: str, request_: str) -> None:
    """With the back-off of refused actions, at most 20 tries in ten minutes, that is 60 requests."""
    async with connected() as (api, launcher):
        subject: Any = "a-1-0"
        if action in {"start", "prepare_pool"}:
            subject = spec(name="b-1-0", address="{host}:{port}", image="replica:1")
        elif action == "remove":
            await launcher.drain(subject, 1)
            status = {"observedGeneration": 3, "replicas": 0}
            api.set_status("deployments", subject, status)
            await wait_for(launcher, has_exited)
        api.refused[request_] = ApiError(403, "Forbidden", "the policy refuses it")
        for _ in range(2):
            await api.flush_watches()
            api.requests.clear()
            with pytest.raises(LaunchError, match="the policy refuses it"):
                await getattr(launcher, action)(subject, 1)
        assert api.requests.total() <= 3, api.requests
