"""Replicas as processes: launched, watched, started again, drained, and never left behind."""

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
    keeping = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        keeping.cancel()
        await supervisor.stop()


def launcher_in(folder: Path) -> LocalLauncher:
    return LocalLauncher(folder, lambda _what, _done: None)


async def models(launcher: LocalLauncher, name: str) -> list[str]:
    transport = httpx2.AsyncHTTPTransport(uds=str(launcher.socket_path(name)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as client:
        return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def until(launcher: LocalLauncher, name: str, reached: Callable[[ProcessRun], bool]) -> None:
    """Wait until the replica's life is as it should be."""
    while name not in launcher.list_runs() or not reached(launcher.list_runs()[name]):  # noqa: ASYNC110 - only asking tells
        await asyncio.sleep(0.02)


async def ready(launcher: LocalLauncher, name: str, not_pid: int = 0) -> int:
    """The pid of the replica once it takes requests, in another life than that of `not_pid`."""
    await until(
        launcher,
        name,
        lambda life: (
            life.ready_at is not None
            and life.exited_at is None
            and listener(launcher, name) not in {0, not_pid}
        ),
    )
    return listener(launcher, name)


def listener(launcher: LocalLauncher, name: str) -> int:
    """The pid of who listens at the replica's socket; 0: nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        if asking.connect_ex(str(launcher.socket_path(name))):
            return 0
        told = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", told)
    return int(pid)


def launched() -> list[int]:
    """The pids of our replicas that live."""
    children = psutil.Process().children()
    told = [(one.pid, one.as_dict(["cmdline"])["cmdline"] or ()) for one in children]
    return [pid for pid, command in told if "argosy.fleet.replica_process" in command]


async def test_a_replica_is_launched_once_and_leaves_nothing(folder: Path) -> None:
    launcher = launcher_in(folder)
    await launcher.start(spec("a"))
    await launcher.start(spec("a"))
    begun = await ready(launcher, "a")
    await launcher.start(spec("a"))
    assert launched() == [begun]
    assert await models(launcher, "a") == ["mini"]
    family = [psutil.Process(begun), *psutil.Process(begun).children(recursive=True)]
    assert len(family) == 2
    await launcher.drain("a")
    await launcher.drain("a")
    await launcher.stop("a")
    assert launcher.list_runs()["a"].exited_at is not None
    assert not launched()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


async def test_the_end_of_one_that_talks_nonsense_is_seen(
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
    await until(launcher, "a", lambda life: life.exited_at is not None)
    await launcher.stop("a")


async def test_a_replica_sees_its_gpu_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    launcher = launcher_in(folder)
    await launcher.start(msgspec.structs.replace(spec("a"), gpu="5"))
    await launcher.start(spec("b"))
    for name, seen in (("a", "5"), ("b", "4,5,6")):  # without one of its own it sees what we see
        replica = psutil.Process(await ready(launcher, name))
        for process in (replica, *replica.children()):
            assert process.environ()["CUDA_VISIBLE_DEVICES"] == seen
        await launcher.stop(name)


async def test_what_a_killed_replica_leaves_goes_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with runtime_folder() as folder:
        launcher = launcher_in(folder)
        await launcher.start(spec("a"))
        while not list(folder.glob("argosy-*")):  # noqa: ASYNC110 - where it meets its engine core
            await asyncio.sleep(0.01)
        await launcher.stop("a")
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs


async def test_what_died_or_hangs_is_replaced_behind_the_same_socket(folder: Path) -> None:
    launcher = launcher_in(folder)
    async with supervised(launcher, spec("a")) as supervisor:
        await supervisor.any_ready.wait()
        pid = await ready(launcher, "a")
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
            await until(launcher, "a", lambda life: life.last_response_at is not None)
            os.kill(pid, number)
            pid = await ready(launcher, "a", not_pid=pid)
            assert await models(launcher, "a") == ["mini"]
        assert not supervisor.reconcile()
        assert launched() == [pid]
    assert not launched()


async def test_who_tidies_temporary_files_up_ends_no_fleet(folder: Path) -> None:
    launcher = launcher_in(folder)
    async with supervised(launcher, spec("a")):
        first = await ready(launcher, "a")
        shutil.rmtree(folder)
        os.kill(first, signal.SIGKILL)
        assert await ready(launcher, "a", not_pid=first)
        assert folder.stat().st_mode & 0o777 == 0o700  # noqa: ASYNC240 - nothing runs beside


async def test_a_model_that_is_not_there_is_given_up_at_once(folder: Path) -> None:
    supervisor = Supervisor(launcher_in(folder), [spec("a", model="/no/such/model")])
    with pytest.raises(FleetFailedError, match="there is no directory /no/such/model"):
        await supervisor.run()


async def test_one_that_cannot_start_does_not_take_the_others_along(folder: Path) -> None:
    launcher = launcher_in(folder)
    async with supervised(launcher, spec("bad", model="/no/such/model"), spec("good")):
        await ready(launcher, "good")
        await until(launcher, "bad", lambda life: life.exited_at is not None)
        assert await models(launcher, "good") == ["mini"]


LAUNCH = """
import asyncio, sys
from pathlib import Path
from argosy.fleet import LocalLauncher
from tests.integration.fleet.test_local import ready, spec

async def main():
    launcher = LocalLauncher(Path(sys.argv[1]), lambda what, done: None)
    await launcher.start(spec("a"))
    await ready(launcher, "a")
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_replicas_do_not_outlive_their_launcher(folder: Path, stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder)], stdout=subprocess.PIPE, text=True
    ) as launching:
        assert launching.stdout is not None
        try:
            assert "ready\n" in launching.stdout
            family = psutil.Process(launching.pid).children(recursive=True)
            assert len(family) == 2
            if stopped:
                family[0].suspend()
        finally:
            launching.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
def test_what_lies_in_another_users_folder_is_let_be() -> None:
    with runtime_folder() as ours:
        theirs = ours.with_name(ours.name + "-theirs")
        theirs.mkdir()
        os.mkfifo(theirs / "lock")  # who opened it would wait for ever
        os.chown(theirs, 65534, 65534)
        try:
            with runtime_folder():
                assert theirs.is_dir()
        finally:
            shutil.rmtree(theirs)


def test_folders_vanish_and_those_of_the_killed_are_swept() -> None:
    with runtime_folder() as kept:
        assert kept.stat().st_mode & 0o777 == 0o700
        left = kept.with_name(kept.name + "-left")
        left.mkdir()
        (left / "lock").touch()
        with runtime_folder() as other:
            assert kept.is_dir()
        assert not other.exists()
        assert not left.exists()
    assert not kept.exists()
