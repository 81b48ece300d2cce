"""The admin API: bounds on concurrent calls, and settings without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from argosy.deployment import GatewayConfig
from argosy.gateway.admin import call_limiter
from argosy.gateway.admin.call_limiter import (
    RUNNING_CHANGES,
    RUNNING_READS,
    WAITING,
    AdminCallLimiter,
)
from argosy.gateway.admin.endpoints import AdminRequest, AdminScope, NoParameters
from argosy.gateway.admin.settings import list_settings
from argosy.gateway.event_loop import OVERLOAD_LAG_S, LoopMonitor
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.protocol import ApiError
from argosy.store import StoreConfig


class Calls:
    """Calls that run until they are released."""

    def __init__(self) -> None:
        self.monitor = LoopMonitor()
        self.limiter = AdminCallLimiter(self.monitor)
        self.running: list[Principal] = []
        self.release = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def call(self, principal: Principal, *, is_change: bool = False) -> None:
        async with self.limiter.slot(principal, is_change=is_change):
            self.running.append(principal)
            await self.release.wait()

    async def start(self, *callers: Principal, is_change: bool = False) -> None:
        """Start a call of each caller, and let those run that may."""
        self.tasks += [asyncio.create_task(self.call(one, is_change=is_change)) for one in callers]
        await settle()

    async def end(self) -> None:
        self.release.set()
        await asyncio.gather(*self.tasks)


async def settle() -> None:
    """Let tasks run until none of them can do more without another event."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    calls = Calls()
    yield calls
    await calls.end()


def key(number: int, organisation: str = "acme") -> Principal:
    return Principal(organisation=organisation, key=f"{organisation}-{number}")


async def test_calls_are_limited_by_caller_organisation_and_in_all(calls: Calls) -> None:
    await calls.start(*[key(0)] * 50)
    assert len(calls.running) == RUNNING_READS.caller
    await calls.start(*[key(1)] * 50)
    assert len(calls.running) == RUNNING_READS.organisation
    await calls.start(*[key(0, "zeta")] * 9, *[key(0, "eta")] * 9)
    assert len(calls.running) == RUNNING_READS.total
    await calls.start(*[key(0)] * 9, is_change=True)
    assert len(calls.running) == RUNNING_READS.total + RUNNING_CHANGES.caller
    calls.tasks[60].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls.tasks.pop(60)
    await calls.end()
    assert len(calls.running) == 126


async def test_reads_run_one_at_a_time_while_the_event_loop_is_overloaded(calls: Calls) -> None:
    for _ in range(20):
        calls.monitor.record_lag(2 * OVERLOAD_LAG_S)
    assert calls.monitor.is_overloaded
    await calls.start(*[key(n) for n in range(9)])
    assert len(calls.running) == 1
    await calls.start(key(0), is_change=True)
    assert len(calls.running) == 2
    for _ in range(20):
        calls.monitor.record_lag(0.0)
    await settle()
    assert len(calls.running) == RUNNING_READS.organisation + 1


async def test_calls_that_wait_too_long_or_in_too_great_number_are_refused(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    await calls.start(*[key(0)] * (RUNNING_READS.caller + WAITING.caller))
    with pytest.raises(ApiError) as refused:
        await calls.call(key(0))
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    await calls.start(*[key(n, "zeta") for n in range(RUNNING_READS.total)])
    with pytest.raises(ApiError) as late:
        async with calls.limiter.slot(key(0, "eta"), max_wait_s=0.0):
            pass
    assert (late.value.status, late.value.code) == (503, "overloaded")
    assert late.value.retry_after_s
    monkeypatch.setattr(call_limiter, "WAITING", call_limiter.Bounds(1, 1, 1))
    with pytest.raises(ApiError) as busy:
        await calls.call(key(0, "eta"))
    assert busy.value.status == 503


async def test_failed_call_frees_its_slot(calls: Calls) -> None:
    for _ in range(2 * RUNNING_READS.total):
        with pytest.raises(ValueError, match="no"):
            async with calls.limiter.slot(key(0)):
                raise ValueError("no")


def test_one_long_callback_is_no_overload() -> None:
    monitor = LoopMonitor()
    monitor.record_lag(3600.0)  # the machine was suspended
    assert not monitor.is_overloaded


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:p4ss@db:5432/x", "postgresql://ann:(hidden)@db:5432/x"),
        ("postgresql://ann:p/4:ss@db/x", "postgresql://ann:(hidden)@db/x"),
        (
            "postgresql://db/x?sslpassword=p4ss&user=ann&password=p4ss",
            "postgresql://db/x?sslpassword=(hidden)&user=ann&password=(hidden)",
        ),
        ("sqlite:///argosy.db", "sqlite:///argosy.db"),
    ],
)
def test_passwords_in_urls_are_hidden(url: str, shown: str) -> None:
    async def explain(request_id: str, organisation_id: str | None, project_id: str | None) -> None:
        """Explain nothing."""

    unused: Any = None
    config = GatewayConfig(store=StoreConfig(url=url))
    scope = AdminScope(None, unused, unused, config, unused, explain)
    page = list_settings(scope, AdminRequest(ANONYMOUS, "", NoParameters(), None))
    assert {view.path: view.value for view in page.data}["store.url"] == shown
