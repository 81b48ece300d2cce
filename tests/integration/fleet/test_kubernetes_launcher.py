"""`KubernetesLauncher`: the contract of launchers, and what concerns Kubernetes, on a double of its API and nodes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.fleet.launcher_suite import (
    LauncherSuite,
    has_exited,
    read_pid,
    spec,
    wait_for,
)
from tests.support.controlled_fleet import Fleet, declare
from tests.support.kubernetes_api import ApiError, KubernetesApiServer
from tests.support.kubernetes_cluster import KubernetesCluster, Node
from tests.support.waiting import until

from argosy.deployment import KubernetesSettings, LaunchResources, set_replicas, stop_everything
from argosy.fleet.launchers import (
    CONTROLLER_RULES,
    KubernetesLauncher,
    LaunchedReplica,
    Launcher,
    LaunchError,
    LaunchSpec,
    LaunchState,
    StaleEpochError,
)

IMAGE = "registry.internal/replica:1"


def pod_spec(*behaviours: str, **fields: Any) -> LaunchSpec:  # noqa: ANN401 - of the spec
    """Return a spec whose replica listens on an address of its pod, from an image."""
    return spec(*behaviours, **{"address": "{host}:{port}", "image": IMAGE} | fields)


def is_placed(replica: LaunchedReplica) -> bool:
    return replica.state != LaunchState.PROVISIONING


class WaitingLauncher(KubernetesLauncher):
    """Launcher for the contract, whose replicas are processes that run when `start` returns."""

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        await super().start(spec, epoch)
        await wait_for(self, is_placed, spec.name)


class KubernetesEnvironment:
    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster
        self.api = cluster.api

    def create_launcher(self) -> WaitingLauncher:
        return WaitingLauncher("test", KubernetesSettings())

    def pods(self) -> list[str]:
        return sorted(self.api.objects["pods"])


@pytest.fixture
async def environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubernetesEnvironment]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    api = KubernetesApiServer()
    nodes = (Node("node-1", "a", gpus=1), Node("node-2", "b", gpus=1))
    cluster = KubernetesCluster(api, tmp_path, nodes)
    async with api.serve(tmp_path / "kubeconfig"), cluster.run():
        yield KubernetesEnvironment(cluster)


@pytest.fixture
async def launcher(environment: KubernetesEnvironment) -> AsyncIterator[KubernetesLauncher]:
    launcher = KubernetesLauncher("test", KubernetesSettings())
    yield launcher
    await launcher.close()


class TestContract(LauncherSuite):
    """The shared contract, where Kubernetes can keep it."""

    spec = staticmethod(pod_spec)

    async def test_refuses_what_cannot_be_started(self, launcher: Launcher) -> None:
        """Only the node finds out that the image has no such program."""
        await launcher.start(pod_spec(command=("no-such-program",)), 1)
        failed = await wait_for(launcher, has_exited)
        assert failed.reason.startswith('StartError: exec: "no-such-program"')

    async def test_reports_reason_of_crash_and_keeps_log(self, launcher: Launcher) -> None:
        """The log ends with the pod, and the next start replaces the pod."""
        for attempt, status in ((1, 3), (2, 4)):
            await launcher.start(pod_spec(f"crash={status}"), 1)
            crashed = await wait_for(launcher, has_exited)
            assert (crashed.attempt, crashed.exit_status) == (attempt, status)
            assert crashed.reason.endswith("; its last output: cannot open the model")
            log = await launcher.read_log("a-1-0", 1_000)
            assert log == b"starting\ncannot open the model\n"
        assert await launcher.read_log("a-1-0", 6) == b"model\n"
        assert await launcher.read_log("unknown-1-0", 6) == b""
        await launcher.remove("a-1-0", 1)
        assert await launcher.list_replicas() == {}


# --- placement and states ------------------------------------------------------------------------


async def test_reports_why_a_pod_waits_and_where_it_runs(launcher: KubernetesLauncher) -> None:
    for name, zones in (("a-1-0", ("b",)), ("a-1-1", ("b",))):
        resources = LaunchResources(accelerators=1, zones=zones)
        await launcher.start(pod_spec(name=name, resources=resources), 1)
    placed = await wait_for(launcher, is_placed)
    assert (placed.node, placed.zone) == ("node-2", "b")
    waiting = await wait_for(launcher, lambda each: "node" in each.reason, "a-1-1")
    assert waiting.state == LaunchState.PROVISIONING
    assert waiting.reason == (
        "waiting for a node: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    )
    await launcher.stop("a-1-1", 1)
    assert (await launcher.list_replicas())["a-1-1"].reason == "it was stopped"


async def test_each_restart_and_replacement_by_kubernetes_is_an_attempt(
    launcher: KubernetesLauncher,
    environment: KubernetesEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment.cluster.restart_delay_s = 0.0
    await launcher.start(pod_spec(), 1)
    first = await read_pid(await wait_for(launcher, is_placed))
    os.kill(first, signal.SIGKILL)
    restarted = await wait_for(
        launcher, lambda each: each.attempt == 2 and each.state == LaunchState.RUNNING
    )
    second = await read_pid(restarted)
    assert second != first
    assert await launcher.read_log("a-1-0", 1_000) == b"listening\n" * 2

    environment.cluster.lose_node(restarted.node)
    moved = await wait_for(
        launcher, lambda each: each.attempt == 3 and each.state == LaunchState.RUNNING
    )
    assert moved.node != restarted.node
    assert await read_pid(moved) not in {first, second}
    # The pod of the lost node remains until it is forgotten.
    monkeypatch.setattr("argosy.fleet.launchers.kubernetes.STOP_TIMEOUT_S", 0.2)
    assert len(environment.pods()) == 2
    await launcher.stop("a-1-0", 1)
    assert environment.pods() == []


async def test_replica_gets_its_secrets_and_pool_its_objects(
    launcher: KubernetesLauncher, environment: KubernetesEnvironment
) -> None:
    environment.cluster.secrets["keys"] = {"token": "hunter2"}
    settings = KubernetesSettings(secret_name="keys", pre_pull_images=True)
    secret = pod_spec("printenv=TOKEN", secret_keys={"TOKEN": "token"}, kubernetes=settings)
    literal = pod_spec("printenv=TEXT", name="a-1-1", environment={"TEXT": "$(HOME) $$"})
    for each in (secret, literal):
        await launcher.start(each, 1)
        await read_pid(await wait_for(launcher, is_placed, each.name))
    for _ in range(2):
        await launcher.prepare_pool(secret, 1)
    assert await launcher.read_log("a-1-0", 100) == b"TOKEN=hunter2\nlistening\n"
    assert environment.api.requests["PUT deployments"] == 2  # none conflicts
    objects = environment.api.objects
    assert "hunter2" not in str(objects["deployments"])
    assert list(objects["poddisruptionbudgets"]) == ["pool-a"]
    assert list(objects["daemonsets"]) == ["pre-pull-a"]
    for name in ("a-1-0", "a-1-1"):
        assert list(objects["poddisruptionbudgets"]) == ["pool-a"]
        await launcher.stop(name, 1)
        await launcher.remove(name, 1)
    assert not any(objects[kind] for kind in ("poddisruptionbudgets", "daemonsets", "pods"))


# --- the API -------------------------------------------------------------------------------------


async def start_and_stop(launcher: KubernetesLauncher, name: str) -> None:
    """Use what the watches report."""
    await launcher.start(pod_spec(name=name), 1)
    await wait_for(launcher, is_placed, name)
    await launcher.stop(name, 1)


async def test_follows_changes_through_faults_of_the_api(
    launcher: KubernetesLauncher,
    environment: KubernetesEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.fleet.launchers.kubernetes_api.LIST_LIMIT", 2)
    api = environment.api
    for number in range(3):
        await start_and_stop(launcher, f"a-1-{number}")
    lists = api.requests["LIST deployments"]

    api.end_watches()  # resumed from the last version, without a list
    await start_and_stop(launcher, "b-1-0")
    api.send_bookmarks()  # without them the version of a quiet kind would be too old
    await api.flush_watches()
    api.compact()
    api.end_watches()
    await start_and_stop(launcher, "b-1-1")
    assert api.requests["LIST deployments"] == lists

    api.expires_watches = True  # 410 in a running watch
    api.end_watches()
    await start_and_stop(launcher, "b-1-2")
    assert api.requests["LIST deployments"] > lists
    api.expires_watches = False
    api.throttled = 4  # 429
    await start_and_stop(launcher, "b-1-3")
    assert api.throttled == 0
    assert len(await launcher.list_replicas()) == 7


async def list_error(launcher: KubernetesLauncher) -> str:
    """Return why the replicas cannot be listed; empty if they can."""
    try:
        await launcher.list_replicas()
    except LaunchError as error:
        return str(error)
    return ""


async def test_refusals_of_the_api_name_the_remedy(
    launcher: KubernetesLauncher,
    environment: KubernetesEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    api = environment.api
    await launcher.start(pod_spec(), 1)
    user = "system:serviceaccount:default:controller-test"
    lacks = f'deployments.apps is forbidden: User "{user}" cannot create resource "deployments"'
    quota = (
        'deployments.apps "b-1-0" is forbidden: exceeded quota: q, used: count/deployments.apps=2'
    )
    for code, message, advice in (
        (403, lacks, "; the role in `argosy render kubernetes` has the rights that are needed"),
        (403, quota, ""),
        (401, "Unauthorized", "; it refuses the token of this client: renew it in the kubeconfig"),
    ):
        api.refused["POST deployments"] = ApiError(code, "Forbidden", message)
        with pytest.raises(LaunchError, match=re.escape(f"{code}: {message}{advice}")) as info:
            await launcher.start(pod_spec(name="b-1-0"), 1)
        assert bool(advice) == ("; " in str(info.value))
    api.refused.clear()
    invalid = pod_spec(name="b-1-0", resources=LaunchResources(labels={"a": 1}))  # type: ignore[dict-item]
    with pytest.raises(LaunchError, match=r"422: Deployment is invalid: .*nodeSelector"):
        await launcher.start(invalid, 1)
    other_fleet = KubernetesLauncher("other", KubernetesSettings())
    with pytest.raises(LaunchError, match="does not belong to the fleet other"):
        await other_fleet.start(pod_spec(), 1)
    await other_fleet.close()

    deployment = api.objects["deployments"]["a-1-0"]
    deployment["metadata"]["finalizers"] = ["example.com/keep"]
    await launcher.stop("a-1-0", 1)
    await launcher.remove("a-1-0", 1)
    assert await launcher.list_replicas() == {}
    with pytest.raises(LaunchError, match=r"waits for its finalizers \(example.com/keep\)"):
        await launcher.start(pod_spec(), 1)

    api.refused["WATCH pods"] = ApiError(500, "InternalError", "broken")
    api.end_watches()
    for expected in ("the Kubernetes API answers 500: broken", ""):
        while (await list_error(launcher)).partition(";")[0] != expected:
            await launcher.changed.wait()
            launcher.changed.clear()
        api.refused.clear()

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-such-file"))
    lost = KubernetesLauncher("test", KubernetesSettings())
    with pytest.raises(LaunchError, match=r"no Kubernetes cluster is configured: .*KUBECONFIG"):
        await lost.list_replicas()
    await lost.close()


VERBS = {"get": "GET", "list": "LIST", "watch": "WATCH", "create": "POST"}
VERBS |= {"update": "PUT", "patch": "PATCH", "delete": "DELETE"}


async def test_each_missing_right_is_named_and_the_rest_goes_on(
    launcher: KubernetesLauncher, environment: KubernetesEnvironment
) -> None:
    """Rights whose absence is shown by nothing are too wide."""
    api = environment.api
    settings = KubernetesSettings(pre_pull_images=True)
    await launcher.start(pod_spec(), 1)
    pid = await read_pid(await wait_for(launcher, is_placed))
    rights = [
        (verb, resource)
        for rule in CONTROLLER_RULES
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]
    for number, (verb, resource) in enumerate(rights, start=1):
        if (verb, resource) == ("create", "configmaps"):
            del api.objects[resource]["epoch-test"]
        key = "GET pods" if resource == "pods/log" else f"{VERBS[verb]} {resource}"
        text = f'User "u" cannot {verb} resource "{resource}"'
        api.refused[key] = ApiError(403, "Forbidden", text)
        other = environment.create_launcher()
        names = [f"b-{number}-{ordinal}" for ordinal in range(2)]
        errors = []
        for action in (
            other.list_replicas(),
            *(other.start(pod_spec(name=name), number) for name in names),
            *(
                other.prepare_pool(pod_spec(kubernetes=settings, max_unavailable=count), number)
                for count in (1, 2)
            ),
            other.read_log("a-1-0", 100),
            other.drain(names[0], number),
            *(other.stop(name, number) for name in names),
            *(other.remove(name, number) for name in names),
        ):
            try:
                await action
            except LaunchError as error:
                errors.append(str(error))
        assert any(text in error for error in errors), (verb, resource, errors)
        api.refused.clear()
        await other.close()
        await launcher.drain("", number)
        assert await read_pid((await launcher.list_replicas())["a-1-0"]) == pid
        for name in await launcher.list_replicas():
            if name in names:
                await launcher.stop(name, number)
                await launcher.remove(name, number)


# --- fencing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_deposed_leader_cannot_finish_what_it_had_begun(
    launcher: KubernetesLauncher, environment: KubernetesEnvironment, method: str
) -> None:
    """The next leader comes between a read of the old one and its write."""
    old_leader = environment.create_launcher()
    if method == "PATCH":
        await launcher.start(pod_spec(), 6)
        running = await wait_for(launcher, is_placed)
        await read_pid(running)
        await old_leader.list_replicas()

    async def depose(written_method: str, name: str) -> None:
        if (written_method, name) == (method, "a-1-0"):
            environment.api.before_write = None
            await launcher.drain("", 7)

    environment.api.before_write = depose
    with pytest.raises(StaleEpochError):
        await (
            old_leader.drain("a-1-0", 6) if method == "PATCH" else old_leader.start(pod_spec(), 6)
        )
    await old_leader.close()
    replicas = await launcher.list_replicas()
    if method == "PATCH":
        assert replicas["a-1-0"].state == LaunchState.RUNNING
        return
    assert environment.pods() == []
    await launcher.start(pod_spec(), 7)
    assert (await wait_for(launcher, is_placed)).attempt == 1


# --- controller ----------------------------------------------------------------------------------


async def test_controller_keeps_a_fleet_on_kubernetes(
    environment: KubernetesEnvironment, fleet: Fleet
) -> None:
    config = declare("print=1", address="{host}:{port}", launcher="kubernetes", image=IMAGE)
    fleet.apply(config)
    controller = fleet.start_controller("one")
    pids = await fleet.as_declared("chat-1-0", "chat-1-1")
    os.kill(pids["chat-1-0"], signal.SIGKILL)
    await until(lambda: len(fleet.events("replica_start")) == 3)
    again = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert again["chat-1-1"] == pids["chat-1-1"]
    assert again["chat-1-0"] != pids["chat-1-0"]
    refusal = ApiError(403, "Forbidden", "the policy keeps it")
    environment.api.refused["DELETE deployments"] = refusal
    fleet.apply(set_replicas(config, "chat", 1))
    await fleet.wait_for_reason(lambda reason: "its removal was refused 2 times: " in reason)
    assert environment.api.requests["DELETE deployments"] < 10  # were 60 a second
    assert len(fleet.events("replica_remove")) == 1
    environment.api.refused.clear()
    await fleet.as_declared("chat-1-0")
    assert re.fullmatch(r"ok after \d refusals", fleet.events("replica_remove")[-1].outcome)
    fleet.apply(stop_everything(config))
    await controller
    assert not any(environment.api.objects[kind] for kind in ("deployments", "pods"))
