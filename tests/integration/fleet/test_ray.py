"""`RayLauncher` on a real cluster of three nodes: the contract of launchers, and what concerns nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.fleet.launcher_suite import LauncherSuite
from tests.support.ray_nodes import RayNodes, network_namespace

from argosy.fleet.launchers import RayLauncher

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with network_namespace():
        nodes = RayNodes(tmp_path_factory.mktemp("ray"))
        yield nodes
        nodes.close()


class RayEnvironment:
    def __init__(self, address: str, namespace: str) -> None:
        self._address = address
        self._namespace = namespace

    def create_launcher(self) -> RayLauncher:
        return RayLauncher(self._namespace, self._address)


@pytest.fixture
def environment(nodes: RayNodes, tmp_path: Path) -> RayEnvironment:
    return RayEnvironment(nodes.address, tmp_path.name)


class TestContract(LauncherSuite):
    """The shared contract."""

    address = "{port}"
