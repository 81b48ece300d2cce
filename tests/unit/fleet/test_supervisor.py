"""The supervisor beside launchers that fail it: whatever one replica's end takes, the others are cared for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from argosy.engine import EngineConfig, ReplicaServerConfig
from argosy.fleet import ReplicaSpec, Supervisor, supervisor
from argosy.policy import ProcessRun, RestartLimits

LIMITS = RestartLimits(hang_timeout_s=0.1)


def spec(name: str) -> ReplicaSpec:
    return ReplicaSpec(name=name, server=ReplicaServerConfig(), engine=EngineConfig(model="m"))


class Stuck:
    """A launcher that cannot end the replica "stuck"; it counts what it is asked."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.runs: dict[str, ProcessRun] = {}
        self.started: list[str] = []
        self.stopping: list[str] = []

    def list_runs(self) -> Mapping[str, ProcessRun]:
        return self.runs

    async def start(self, spec: ReplicaSpec) -> None:
        now = time.monotonic()
        self.started.append(spec.name)
        self.runs[spec.name] = ProcessRun(now, last_response_at=now, ready_at=now)
        self.changed.set()

    async def drain(self, name: str) -> None:
        if name == "stuck":
            await asyncio.Event().wait()
        self.end(name)

    async def stop(self, name: str) -> None:
        self.stopping.append(name)
        await self.drain(name)

    def end(self, name: str) -> None:
        life = self.runs[name]
        self.runs[name] = ProcessRun(
            life.started_at, ready_at=life.ready_at, exited_at=time.monotonic()
        )
        self.changed.set()


@pytest_asyncio.fixture
async def launcher() -> Stuck:
    return Stuck()


@contextlib.asynccontextmanager
async def supervised(launcher: Stuck) -> AsyncIterator[Supervisor]:
    """Two replicas that serve."""
    supervising = Supervisor(launcher, [spec("stuck"), spec("other")], LIMITS)
    keeping = asyncio.create_task(supervising.run())
    await supervising.any_ready.wait()
    try:
        yield supervising
    finally:
        keeping.cancel()


async def until_stopping(launcher: Stuck, name: str) -> None:
    """Keep the other one answering until `name` is taken for hanging."""
    async with asyncio.timeout(30):
        while name not in launcher.stopping:
            now = time.monotonic()
            launcher.runs["other"] = ProcessRun(now, last_response_at=now, ready_at=now)
            launcher.changed.set()
            await asyncio.sleep(0.01)


async def test_one_that_cannot_be_ended_keeps_nobody_from_the_others(launcher: Stuck) -> None:
    async with supervised(launcher):
        await until_stopping(launcher, "stuck")
        for _ in range(2):
            launcher.started.clear()
            launcher.end("other")
            async with asyncio.timeout(30):
                while launcher.started != ["other"]:  # noqa: ASYNC110 - that is all it shows
                    await asyncio.sleep(0.01)
    assert launcher.stopping.count("stuck") == 1  # asked once: it is under way


async def test_what_cannot_be_ended_is_left_behind(
    launcher: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILL_TIMEOUT_S", 0.1)
    async with supervised(launcher) as supervising:
        await until_stopping(launcher, "stuck")
    async with asyncio.timeout(30):
        await supervising.stop()
    assert launcher.runs["stuck"].exited_at is None
    assert launcher.runs["other"].exited_at is not None


async def test_what_a_launcher_raises_is_not_lost(launcher: Stuck) -> None:
    async def start(spec: ReplicaSpec) -> None:
        raise RuntimeError(spec.name)

    launcher.start = start  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stuck"):
        await Supervisor(launcher, [spec("stuck")]).run()
