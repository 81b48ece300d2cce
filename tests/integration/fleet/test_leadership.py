"""Leadership of controllers on one store: one leads, a standby takes over, and a deposed one learns of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_clock import FakeClock
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

from argosy.fleet.control import process_holder
from argosy.fleet.control.leadership import Leadership, is_gone
from argosy.store import DeposedError, FleetStore

FLEET = "demo"
LEASE_S = 0.04


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FleetStore]:
    opened = open_migrated_store(f"sqlite:///{tmp_path / 'argosy.db'}")
    yield opened.fleets
    opened.close()


async def test_standby_takes_over_when_renewals_end(store: FleetStore) -> None:
    clock = FakeClock(100.0)
    first, second = (Leadership(store, FLEET, name, LEASE_S, clock) for name in ("a", "b"))
    with pytest.raises(DeposedError):
        _ = first.lease
    assert (await first.acquire()).epoch == 1
    standby, keeping = asyncio.create_task(second.acquire()), asyncio.create_task(first.keep())
    await until(lambda: store.read_lease(FLEET).renewals >= 4)
    assert first.lease.holder == "a"
    assert not standby.done()
    keeping.cancel()
    clock.now += 10 * LEASE_S
    with pytest.raises(DeposedError):
        _ = first.lease  # by its own clock, before anybody else leads
    while not standby.done():  # it may have seen the last renewal after the clock was set
        clock.now += LEASE_S
        await asyncio.sleep(LEASE_S / 4)
    lease = await standby
    assert (lease.epoch, lease.holder) == (2, "b")
    with pytest.raises(DeposedError):
        await first.keep()


async def test_released_lease_is_taken_over_at_once(store: FleetStore) -> None:
    clock = FakeClock(100.0)  # stands still, so that no lease ends
    first, second = (Leadership(store, FLEET, name, LEASE_S, clock) for name in ("a", "b"))
    await first.acquire()
    standby = asyncio.create_task(second.acquire())
    await first.release()
    assert (await standby).epoch == 2
    await first.release()
    assert second.lease.epoch == 2


async def test_lease_of_a_process_that_is_gone_is_taken_over_at_once(store: FleetStore) -> None:
    host, _, scope = process_holder().split("/")
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    gone = f"{host}/{process.pid}/{scope}"
    assert is_gone(gone)
    for holder in (process_holder(), f"{host}/{process.pid}/other-boot", "a", ""):
        assert not is_gone(holder)
    clock = FakeClock(100.0)  # stands still, so that no lease ends
    await Leadership(store, FLEET, gone, LEASE_S, clock).acquire()
    assert (await Leadership(store, FLEET, "b", LEASE_S, clock).acquire()).epoch == 2
