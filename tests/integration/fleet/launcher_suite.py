"""Contract of launchers: tests that each launcher has to pass, in an environment where it starts scripted replicas."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol
from urllib.parse import unquote, urlsplit

import httpx2
import psutil
import pytest
from tests.support.controlled_fleet import REPLICA

from argosy.fleet.launchers import (
    LaunchedReplica,
    Launcher,
    LaunchError,
    LaunchSpec,
    LaunchState,
    StaleEpochError,
)


class LauncherEnvironment(Protocol):
    """Place in which replicas run, and from which any number of launchers can be created."""

    def create_launcher(self) -> Launcher: ...


def spec(
    *behaviours: str, name: str = "a-1-0", address: str = "{socket}", **fields: object
) -> LaunchSpec:
    """Return the spec of a scripted replica."""
    command = (sys.executable, "-I", "-S", str(REPLICA), address, *behaviours)
    pool, generation, ordinal = name.rsplit("-", 2)
    settings = {"command": command, "drain_deadline_s": 0.0, **fields}
    return LaunchSpec(
        name=name,
        pool=pool,
        generation=int(generation),
        ordinal=int(ordinal),
        **settings,  # type: ignore[arg-type]
    )


async def read_pid(replica: LaunchedReplica) -> int:
    """Return the pid in the replica's answer, once it answers."""
    assert replica.url is not None
    url = urlsplit(replica.url)
    uds = unquote(url.path) if url.scheme == "unix" else None
    base_url = "http://replica" if uds else replica.url
    transport = httpx2.AsyncHTTPTransport(uds=uds)
    async with httpx2.AsyncClient(transport=transport, base_url=base_url) as client:
        while True:
            try:
                return int((await client.get("/health")).text)
            except httpx2.TransportError:
                await asyncio.sleep(0.01)


async def start(launcher: Launcher, launched: LaunchSpec, epoch: int = 1) -> int:
    """Start a replica, and return its pid once it answers."""
    await launcher.start(launched, epoch)
    return await read_pid((await launcher.list_replicas())[launched.name])


async def wait_for(
    launcher: Launcher, reached: Callable[[LaunchedReplica], bool], name: str = "a-1-0"
) -> LaunchedReplica:
    """Wait until the replica meets a condition, by the launcher's event alone."""
    while True:
        launcher.changed.clear()
        replica = (await launcher.list_replicas()).get(name)
        if replica is not None and reached(replica):
            return replica
        await launcher.changed.wait()


async def end(*launchers: Launcher) -> None:
    """Kill all replicas of launchers, and close them."""
    for launcher in launchers:
        for name in await launcher.list_replicas():
            await launcher.stop(name, 1_000_000)
            await launcher.remove(name, 1_000_000)
        await launcher.close()


def has_exited(replica: LaunchedReplica) -> bool:
    return replica.state == LaunchState.EXITED


class LauncherSuite:
    """Inherited by the tests of each launcher, which provide the fixture `environment`."""

    address = "{socket}"
    """Placeholder for what the launcher assigns to the replicas to listen at."""

    def spec(self, *behaviours: str, **fields: object) -> LaunchSpec:
        """Return the spec of a scripted replica that listens at the launcher's kind of address."""
        return spec(*behaviours, **{"address": self.address, **fields})  # type: ignore[arg-type]

    @pytest.fixture
    async def launcher(self, environment: LauncherEnvironment) -> AsyncIterator[Launcher]:
        launcher = environment.create_launcher()
        yield launcher
        await end(launcher)

    async def test_starts_once_and_again_after_exit(
        self, launcher: Launcher, environment: LauncherEnvironment
    ) -> None:
        other = environment.create_launcher()
        await asyncio.gather(*(each.start(self.spec(), 1) for each in (launcher, other) * 3))
        await other.close()
        (replica,) = (await launcher.list_replicas()).values()
        pid = await read_pid(replica)
        assert await start(launcher, self.spec()) == pid
        assert replica.identity == self.spec().identity
        assert (replica.state, replica.attempt) == (LaunchState.RUNNING, 1)

        await launcher.stop("a-1-0", 1)
        assert not psutil.pid_exists(pid)
        exited = (await launcher.list_replicas())["a-1-0"]
        assert (exited.state, exited.exit_status) == (LaunchState.EXITED, -9)
        assert exited.exited_at is not None
        assert exited.started_at <= exited.exited_at
        await launcher.start(self.spec(), 1)
        again = (await launcher.list_replicas())["a-1-0"]
        assert (again.state, again.attempt, again.url) == (LaunchState.RUNNING, 2, replica.url)
        assert await read_pid(again) != pid

    async def test_drains_stops_and_removes(self, launcher: Launcher) -> None:
        for action in (launcher.drain, launcher.stop, launcher.remove):
            await action("unknown-1-0", 1)
        await launcher.start(self.spec(), 1)
        with pytest.raises(LaunchError, match="stop it"):
            await launcher.remove("a-1-0", 1)
        await launcher.drain("a-1-0", 1)
        await launcher.drain("a-1-0", 1)
        assert (await launcher.list_replicas())["a-1-0"].state != LaunchState.RUNNING
        drained = await wait_for(launcher, has_exited)
        assert drained.reason == "it was drained"
        await launcher.drain("a-1-0", 1)
        await launcher.stop("a-1-0", 1)
        await launcher.remove("a-1-0", 1)
        await launcher.remove("a-1-0", 1)
        assert await launcher.list_replicas() == {}

    async def test_reports_reason_of_crash_and_keeps_log(self, launcher: Launcher) -> None:
        await launcher.start(self.spec("crash=3"), 1)
        crashed = await wait_for(launcher, has_exited)
        assert crashed.exit_status == 3
        assert "cannot open the model" in crashed.reason
        await launcher.start(self.spec("crash=4"), 1)
        crashed = await wait_for(
            launcher, lambda replica: has_exited(replica) and replica.attempt == 2
        )
        assert crashed.exit_status == 4
        await launcher.remove("a-1-0", 1)
        log = await launcher.read_log("a-1-0", 1_000)
        assert log == b"starting\ncannot open the model\n" * 2
        assert await launcher.read_log("a-1-0", 6) == b"model\n"
        assert await launcher.read_log("unknown-1-0", 6) == b""

    async def test_refuses_actions_of_outdated_epoch(
        self, launcher: Launcher, environment: LauncherEnvironment
    ) -> None:
        pid = await start(launcher, self.spec(), 7)
        old_leader = environment.create_launcher()
        actions: list[Callable[[], Awaitable[None]]] = [
            lambda: old_leader.start(self.spec(name="b-1-0"), 6),
            lambda: old_leader.drain("a-1-0", 6),
            lambda: old_leader.stop("a-1-0", 6),
            lambda: old_leader.remove("a-1-0", 6),
        ]
        for action in actions:
            with pytest.raises(StaleEpochError):
                await action()
        (replica,) = (await launcher.list_replicas()).values()
        assert replica.state == LaunchState.RUNNING
        assert await read_pid(replica) == pid
        await old_leader.close()

    async def test_next_launcher_adopts_replicas(
        self, launcher: Launcher, environment: LauncherEnvironment
    ) -> None:
        pid = await start(launcher, self.spec())
        before = await launcher.list_replicas()
        await launcher.close()
        adopter = environment.create_launcher()
        assert await adopter.list_replicas() == before
        assert await start(adopter, self.spec(), 2) == pid
        os.kill(pid, 9)
        killed = await wait_for(adopter, has_exited)
        assert killed.exit_status == -9
        assert "killed" in killed.reason
        await adopter.close()

    async def test_refuses_what_cannot_be_started(self, launcher: Launcher) -> None:
        with pytest.raises(LaunchError, match="no-such-program"):
            await launcher.start(self.spec(command=("no-such-program",)), 1)
        assert await launcher.list_replicas() == {}
