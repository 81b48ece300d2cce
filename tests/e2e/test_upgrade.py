"""A declared fleet is upgraded, and put back, by the next `argosy up` while clients use it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.support.state_processes import kill_processes
from tests.support.steady_load import Load, free_ports

from argosy.deployment import FleetStatus, read_fleet_status
from argosy.policy.reconciliation import ReplicaPhase
from argosy.store import Store, open_store

ROOT = Path(__file__).parents[2]
PREVIOUS_COMMIT = "2d13c318"
"""Commit of the version before upgrades, whose gateways and controllers state no version."""
PREVIOUS, CHECKOUT, BROKEN, BACK = "0.0.9", "0.2.0", "0.3.0", "0.1.9"
FLEET = """\
fleet: upgraded
gateways: 2
console: {{enabled: false}}
port: {port}
models:
  - {{name: chat, source: argosy-mini}}
pools:
  - {{name: chat, model: chat, replicas: 2, options: {{max_seqs: 8, kv_memory: 32MiB}}}}
"""


class Installations:
    """Versions of Argosy beside each other, and one fleet that their commands are about."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self._file = folder / "fleet.yaml"
        self._file.write_text(FLEET.format(port=port))
        self.state = folder / "state"
        self._environment = os.environ | {"XDG_STATE_HOME": str(self.state)}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def install(self, version: str, sources: Path) -> None:
        """Install a version into an environment of its own, which finds its dependencies in that of the tests."""
        folder = self.folder / version
        venv.create(folder, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        # The folder is only searched, so the path file there, which leads to the sources, has no effect.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        shutil.copytree(
            sources / "src/argosy",
            packages / "argosy",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        metadata = packages / f"argosy-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: argosy\nVersion: {version}\n")

    def replace(self, version: str, new: str) -> None:
        """Replace an installed version by another one in place, as `pip install` does."""
        (packages,) = (self.folder / version).glob("lib/python*/site-packages")
        (new_packages,) = (self.folder / new).glob("lib/python*/site-packages")
        (packages / "argosy").rename(packages / "old")
        shutil.copytree(new_packages / "argosy", packages / "argosy")
        shutil.rmtree(packages / f"argosy-{version}.dist-info")
        name = f"argosy-{new}.dist-info"
        shutil.copytree(new_packages / name, packages / name)
        shutil.rmtree(self.folder / new)
        (self.folder / new).symlink_to(self.folder / version)

    def replace_text(self, version: str, file: str, text: str) -> None:
        """Change a module of an installed version."""
        (path,) = (self.folder / version).glob(f"lib/python*/site-packages/argosy/{file}")
        path.write_text(text)

    async def run(self, version: str, *command: str, status: int = 0) -> str:
        """Run a command of a version."""
        process = await asyncio.create_subprocess_exec(
            *(str(self.folder / version / "bin/python"), "-P", "-m", "argosy.cli"),
            *(*command, "-f", str(self._file)),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        text = output.decode()
        assert process.returncode == status, text
        return text

    def read_status(self) -> FleetStatus:
        with contextlib.closing(self._open_store()) as store:
            return read_fleet_status(store.fleets, "upgraded")

    def list_first(self, kind: str, generation: int) -> dict[str, int]:
        """Return the number of the first event of a kind about each replica of a generation."""
        with contextlib.closing(self._open_store()) as store:
            events = store.fleets.list_events("upgraded", limit=10_000)
        return {
            event.replica: event.number
            for event in reversed(events)
            if event.kind == kind and f"-{generation}-" in event.replica
        }

    def _open_store(self) -> Store:
        return open_store(f"sqlite:///{self.state / 'argosy/argosy.db'}")


@pytest.fixture(scope="module")
def previous_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("previous")
    command = ["git", "archive", PREVIOUS_COMMIT, "src/argosy"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of git has no commit {PREVIOUS_COMMIT}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture
def installations(tmp_path: Path) -> Iterator[Installations]:
    installed = Installations(tmp_path, free_ports(2))
    yield installed
    kill_processes(installed.state)


class Observer:
    """Observes which versions serve during an upgrade."""

    def __init__(self, installations: Installations) -> None:
        self._installations = installations
        self.gateways: list[set[str]] = []
        """Versions of the gateways that answer, moment by moment."""
        self.replicas: list[set[str]] = []
        """Versions of the replicas that serve."""

    async def run(self) -> None:
        async with httpx2.AsyncClient(timeout=10, trust_env=False) as client:
            while True:
                status = self._installations.read_status()
                replicas = [each for each in status.replicas if each.pool == "chat"]
                self.replicas.append(
                    {each.version for each in replicas if each.phase is ReplicaPhase.READY}
                )
                versions = set()
                for number in range(2):
                    url = f"http://127.0.0.1:{self._installations.port + number}/version"
                    versions.add((await client.get(url)).json()["version"])
                self.gateways.append(versions)
                await asyncio.sleep(0.1)


async def observe(installations: Installations, version: str) -> tuple[Observer, str]:
    """Run `argosy up` of a version, and return what served meanwhile, and the output."""
    observer = Observer(installations)
    task = asyncio.create_task(observer.run())
    try:
        output = await installations.run(version, "up", "--timeout", "240")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return observer, output


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
async def test_upgrade_and_way_back_lose_no_request(
    installations: Installations, previous_sources: Path
) -> None:
    installations.install(PREVIOUS, previous_sources)
    for version in (CHECKOUT, BROKEN, BACK):
        installations.install(version, ROOT)
    installations.replace_text(BROKEN, "engine/serving/engine_core/core.py", "raise OSError(28)")
    await installations.run(PREVIOUS, "up", "--timeout", "240")
    ports = [installations.port, installations.port + 1]
    load = Load(
        ports, text=None, interval_s=0.25, options={"max_tokens": 24, "temperature": 0, "seed": 1}
    )
    async with load.run():
        await load.pass_requests(8)
        for generation, before, version in ((1, PREVIOUS, CHECKOUT), (2, CHECKOUT, BACK)):
            if version == BACK:
                installations.replace(before, version)
            plan = await installations.run(version, "plan")
            assert f'"{version}"   (2 replicas replaced, 1 at a time)' in plan
            observer, output = await observe(installations, version)
            assert f"The controller runs version {version}." in output
            assert {before, version} in observer.gateways, "no gateways of both versions"
            assert {before, version} in observer.replicas, "no replicas of both versions"
            drained = installations.list_first("replica_drain", generation)
            started = installations.list_first("replica_start", generation + 1)
            gateways_drained = max(drained[f"gateway-{generation}-{each}"] for each in range(2))
            assert gateways_drained < started[f"chat-{generation + 1}-0"]
            status = installations.read_status()
            assert {each.version for each in status.replicas} == {version} == {status.version}
            assert not status.problems
            assert "Nothing changes." in await installations.run(version, "plan")
            await load.pass_requests(8)
        # A version whose gateways or replicas cannot start replaces none of those that serve.
        for broken, module, kept in (
            (
                "gateway-4-0",
                "lessons/__init__.py",
                {"chat-3-0", "chat-3-1", "gateway-3-0", "gateway-3-1"},
            ),
            ("chat-4-0", "engine/serving/engine_core/core.py", {"chat-3-0", "chat-3-1"}),
        ):
            installations.replace_text(BROKEN, module, "raise OSError(28)")
            output = await installations.run(BROKEN, "up", "--timeout", "240", status=1)
            assert f"{broken} is failed" in output
            status = installations.read_status()
            ready = {each.name for each in status.replicas if each.phase is ReplicaPhase.READY}
            assert {each for each in ready if "-3-" in each} == kept
            assert any(broken in each.text for each in status.problems)
            assert "version" in await installations.run(BROKEN, "status")
            installations.replace_text(BROKEN, module, (ROOT / "src/argosy" / module).read_text())
        await installations.run(BACK, "up", "--timeout", "240")
        status = installations.read_status()
        assert {each.version for each in status.replicas} == {BACK}
        await load.pass_requests(8)
    assert not load.problems, load.problems[:3]
    history = await installations.run(BACK, "history")
    assert f"upgrade to version {CHECKOUT}" in history
    await installations.run(BACK, "down")
