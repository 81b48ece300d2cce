"""Supervisor with a faulty launcher: one replica's failure does not affect the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from tests.support.waiting import until

from argosy.engine import EngineConfig, ReplicaServerConfig
from argosy.fleet import ReplicaSpec, Supervisor, supervisor
from argosy.policy import ProcessRun, RestartLimits

LIMITS = RestartLimits(hang_timeout_s=0.1)


def replica_spec(name: str) -> ReplicaSpec:
    return ReplicaSpec(name=name, server=ReplicaServerConfig(), engine=EngineConfig(model="m"))


class StuckLauncher:
    """A launcher that cannot stop the replica "stuck", and records its calls."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.runs: dict[str, ProcessRun] = {}
        self.started: list[str] = []
        self.stopping: list[str] = []
        self.drained = False
        """Whether it can stop the replica after all."""

    def list_runs(self) -> Mapping[str, ProcessRun]:
        return self.runs

    async def start(self, spec: ReplicaSpec) -> None:
        now = time.monotonic()
        self.started.append(spec.name)
        self.runs[spec.name] = ProcessRun(now, last_response_at=now, ready_at=now)
        self.changed.set()

    async def drain(self, name: str) -> None:
        if name == "stuck" and not self.drained:
            await asyncio.Event().wait()
        self.end(name)

    async def stop(self, name: str) -> None:
        self.stopping.append(name)
        await self.drain(name)

    def end(self, name: str, exit_status: int = -9) -> None:
        run = self.runs[name]
        self.runs[name] = ProcessRun(
            run.started_at,
            ready_at=run.ready_at,
            exited_at=time.monotonic(),
            exit_status=exit_status,
        )
        self.changed.set()


@pytest_asyncio.fixture
async def launcher() -> StuckLauncher:
    return StuckLauncher()


@contextlib.asynccontextmanager
async def supervised(launcher: StuckLauncher) -> AsyncIterator[Supervisor]:
    """Supervise two ready replicas."""
    supervisor_ = Supervisor(launcher, [replica_spec("stuck"), replica_spec("other")], LIMITS)
    task = asyncio.create_task(supervisor_.run())
    await supervisor_.any_ready.wait()
    try:
        yield supervisor_
    finally:
        task.cancel()


async def wait_until_stopping(launcher: StuckLauncher, name: str) -> None:
    """Keep the other replica responsive until `name` counts as hung."""
    while name not in launcher.stopping:
        now = time.monotonic()
        launcher.runs["other"] = ProcessRun(now, last_response_at=now, ready_at=now)
        launcher.changed.set()
        await asyncio.sleep(0.01)


async def test_unstoppable_replica_does_not_block_the_others(launcher: StuckLauncher) -> None:
    async with supervised(launcher):
        await wait_until_stopping(launcher, "stuck")
        for _ in range(2):
            launcher.started.clear()
            launcher.end("other")
            await until(lambda: launcher.started == ["other"])
    assert launcher.stopping.count("stuck") == 1  # not repeated while it is in progress


async def test_restart_is_logged_with_its_reason(launcher: StuckLauncher) -> None:
    with capture_logs() as logs:
        async with supervised(launcher):
            launcher.end("other", exit_status=-11)
            await until(lambda: launcher.started.count("other") == 2)
            launcher.drained = True
            await wait_until_stopping(launcher, "stuck")
            await until(lambda: launcher.started.count("stuck") == 2)
    restarts = {
        line["replica"]: line["reason"] for line in logs if line["event"] == "replica_restarting"
    }
    assert restarts == {
        "other": "it crashed with SIGSEGV",
        "stuck": "it did not respond for 0.1 s and was killed",
    }


async def test_stop_abandons_an_unstoppable_replica(
    launcher: StuckLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILL_TIMEOUT_S", 0.1)
    async with supervised(launcher) as supervisor_:
        await wait_until_stopping(launcher, "stuck")
    await supervisor_.stop()
    assert launcher.runs["stuck"].exited_at is None
    assert launcher.runs["other"].exited_at is not None


async def test_error_of_the_launcher_is_raised(launcher: StuckLauncher) -> None:
    async def start(spec: ReplicaSpec) -> None:
        raise RuntimeError(spec.name)

    launcher.start = start  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stuck"):
        await Supervisor(launcher, [replica_spec("stuck")]).run()
