"""`KubernetesLauncher` under faults of the API, which were seen with the components of Kubernetes 1.36."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.fleet.launcher_suite import spec
from tests.support.kubernetes_api import KubernetesApiServer

from argosy.deployment import KubernetesSettings
from argosy.fleet.launchers import KubernetesLauncher, LaunchError

API = "argosy.fleet.launchers.kubernetes_api"
TIMEOUTS = ("MAX_SILENCE_S", "REQUEST_TIMEOUT_S", "MIN_RENEWAL_INTERVAL_S", "MAX_RETRY_DELAY_S")


@pytest.fixture(autouse=True, scope="module")
def short_timeouts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in TIMEOUTS:
            patch.setattr(f"{API}.{name}", 0.2)
        patch.setattr(f"{API}.MIN_RENEWAL_INTERVAL_S", 0.0)
        yield


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[KubernetesApiServer, KubernetesLauncher]]:
    """Start a server with one Deployment, and a launcher that watches it."""
    api = KubernetesApiServer()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
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
    body = copy.deepcopy(api.objects["deployments"]["a-1-0"])
    del body["metadata"]["resourceVersion"]
    name = body["metadata"]["name"] = f"a-1-{number}"
    body["metadata"]["labels"]["argosy.dev/ordinal"] = str(number)
    assert api.create("deployments", body)["metadata"]["name"] == name


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
    async with connected() as (api, launcher):
        for number, fault in enumerate(faults, start=1):
            if fault == "expired token":
                api.token = f"token-{number}"
                with contextlib.suppress(LaunchError):
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
    async with connected() as (api, launcher):
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
