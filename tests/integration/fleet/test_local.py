"""Replica processes of `LocalLauncher` and `Supervisor`: start, restart, drain, clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest

from argosy.engine import EngineConfig, ReplicaServerConfig
from argosy.fleet import FleetFailedError, LocalLauncher, ReplicaSpec, Supervisor, runtime_folder
from argosy.models import BUNDLED_MODEL
from argosy.policy import ProcessRun


def spec(name: str, **engine: object) -> ReplicaSpec:
    settings = {
        "model": str(BUNDLED_MODEL),
        "threads": 1,
        "num_blocks": 64,
        "warmup": False,
        **engine,
    }
    return ReplicaSpec(
        name=name,
        server=ReplicaServerConfig(
            served_model_names=("mini",), drain_deadline_s=5.0, log_level="error"
        ),
        engine=EngineConfig(**settings),  # type: ignore[arg-type]
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder() as folder:
        yield folder


@contextlib.asynccontextmanager
async def supervised(launcher: LocalLauncher, *specs: ReplicaSpec) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(launcher, specs)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        task.cancel()
        await supervisor.stop()


def launcher_in(folder: Path) -> LocalLauncher:
    return LocalLauncher(folder, lambda _what, _done: None)


async def models(launcher: LocalLauncher, name: str) -> list[str]:
    transport = httpx2.AsyncHTTPTransport(uds=str(launcher.socket_path(name)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as client:
        return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def wait_for_run(
    launcher: LocalLauncher, name: str, reached: Callable[[ProcessRun], bool]
) -> None:
    """Wait until the replica's current process run meets a condition."""
    while name not in launcher.list_runs() or not reached(launcher.list_runs()[name]):  # noqa: ASYNC110 - the launcher has no event for it
        await asyncio.sleep(0.02)


async def wait_ready(launcher: LocalLauncher, name: str, not_pid: int = 0) -> int:
    """Return the pid of the replica once it takes requests and is not the process `not_pid`."""
    await wait_for_run(
        launcher,
        name,
        lambda run: (
            run.ready_at is not None
            and run.exited_at is None
            and listener(launcher, name) not in {0, not_pid}
        ),
    )
    return listener(launcher, name)


def listener(launcher: LocalLauncher, name: str) -> int:
    """Return the pid that listens at the replica's socket, or 0 if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        if client.connect_ex(str(launcher.socket_path(name))):
            return 0
        credentials = client.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def replica_pids() -> list[int]:
    """Return the pids of this process's live replicas."""
    children = psutil.Process().children()
    commands = [(child.pid, child.as_dict(["cmdline"])["cmdline"] or ()) for child in children]
    return [pid for pid, command in commands if "argosy.fleet.replica_process" in command]


async def test_repeated_start_launches_one_replica_and_stop_ends_it(folder: Path) -> None:
    launcher = launcher_in(folder)
    await launcher.start(spec("a"))
    await launcher.start(spec("a"))
    pid = await wait_ready(launcher, "a")
    await launcher.start(spec("a"))
    assert replica_pids() == [pid]
    assert await models(launcher, "a") == ["mini"]
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(family) > 1
    await launcher.drain("a")
    await launcher.drain("a")
    await launcher.stop("a")
    assert launcher.list_runs()["a"].exited_at is not None
    assert not replica_pids()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


async def test_exit_of_process_with_invalid_report_is_detected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spawn(_: dict[str, str]) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        program = "print('no report', flush=True); input()"
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdin=pipe, stdout=pipe
        )

    monkeypatch.setattr("argosy.fleet.local_launcher._spawn_process", spawn)
    launcher = launcher_in(folder)
    await launcher.start(spec("a"))
    await wait_for_run(launcher, "a", lambda run: run.exited_at is not None)
    await launcher.stop("a")


async def test_replica_sees_only_its_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    launcher = launcher_in(folder)
    await launcher.start(msgspec.structs.replace(spec("a"), gpu="5"))
    await launcher.start(spec("b"))
    for name, visible in (
        ("a", "5"),
        ("b", "4,5,6"),
    ):  # without its own GPU a replica inherits the variable
        replica = psutil.Process(await wait_ready(launcher, name))
        for process in (replica, *replica.children()):
            assert process.environ()["CUDA_VISIBLE_DEVICES"] == visible
        await launcher.stop(name)


async def test_runtime_folder_removes_files_of_killed_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with runtime_folder() as folder:
        launcher = launcher_in(folder)
        await launcher.start(spec("a"))
        while not list(folder.glob("argosy-*")):  # noqa: ASYNC110 - the folder of the core's sockets has no event
            await asyncio.sleep(0.01)
        await launcher.stop("a")
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - no other task runs


async def test_dead_or_hanging_replica_is_replaced_at_same_socket(folder: Path) -> None:
    launcher = launcher_in(folder)
    async with supervised(launcher, spec("a")) as supervisor:
        await supervisor.any_ready.wait()
        pid = await wait_ready(launcher, "a")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            await wait_for_run(launcher, "a", lambda run: run.last_response_at is not None)
            os.kill(pid, number)
            pid = await wait_ready(launcher, "a", not_pid=pid)
            assert await models(launcher, "a") == ["mini"]
        assert not supervisor.reconcile()
        assert replica_pids() == [pid]
    assert not replica_pids()


async def test_deleted_runtime_folder_is_recreated_at_restart(folder: Path) -> None:
    launcher = launcher_in(folder)
    async with supervised(launcher, spec("a")):
        first = await wait_ready(launcher, "a")
        shutil.rmtree(folder)
        os.kill(first, signal.SIGKILL)
        assert await wait_ready(launcher, "a", not_pid=first)
        assert folder.stat().st_mode & 0o777 == 0o700  # noqa: ASYNC240 - no other task runs


async def test_missing_model_fails_fleet_at_once(folder: Path) -> None:
    supervisor = Supervisor(launcher_in(folder), [spec("a", model="/no/such/model")])
    with pytest.raises(FleetFailedError, match="there is no directory /no/such/model"):
        await supervisor.run()


async def test_failing_replica_does_not_affect_others(folder: Path) -> None:
    launcher = launcher_in(folder)
    async with supervised(launcher, spec("bad", model="/no/such/model"), spec("good")):
        await wait_ready(launcher, "good")
        await wait_for_run(launcher, "bad", lambda run: run.exited_at is not None)
        assert await models(launcher, "good") == ["mini"]


LAUNCH = """
import asyncio, sys
from pathlib import Path
from argosy.fleet import LocalLauncher
from tests.integration.fleet.test_local import wait_ready, spec

async def main():
    launcher = LocalLauncher(Path(sys.argv[1]), lambda what, done: None)
    await launcher.start(spec("a"))
    await wait_ready(launcher, "a")
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("suspended", [False, True])
def test_replicas_exit_after_launcher_is_killed(folder: Path, suspended: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder)], stdout=subprocess.PIPE, text=True
    ) as launching:
        assert launching.stdout is not None
        try:
            assert "ready\n" in launching.stdout
            family = psutil.Process(launching.pid).children(recursive=True)
            assert len(family) > 1
            if suspended:
                family[0].suspend()
        finally:
            launching.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
def test_folder_of_other_user_is_kept() -> None:
    with runtime_folder() as own_folder:
        other_folder = own_folder.with_name(own_folder.name + "-other_folder")
        other_folder.mkdir()
        os.mkfifo(other_folder / "lock")  # opening it would block for ever
        os.chown(other_folder, 65534, 65534)
        try:
            with runtime_folder():
                assert other_folder.is_dir()
        finally:
            shutil.rmtree(other_folder)


def test_stale_runtime_folders_are_removed() -> None:
    with runtime_folder() as kept:
        assert kept.stat().st_mode & 0o777 == 0o700
        stale = kept.with_name(kept.name + "-stale")
        stale.mkdir()
        (stale / "lock").touch()
        with runtime_folder() as other:
            assert kept.is_dir()
        assert not other.exists()
        assert not stale.exists()
    assert not kept.exists()
