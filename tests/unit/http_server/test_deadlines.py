"""Deadlines: whatever is not removed expires, in order, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from argosy.http_server import Deadlines


async def test_what_is_not_removed_expires_in_order() -> None:
    expired: list[int] = []
    last = asyncio.Event()

    def ring(thing: int) -> None:
        expired.append(thing)
        if thing == 9:
            last.set()

    deadlines = Deadlines(0.01, ring)
    for thing in range(10):
        deadlines.add(thing)
    deadlines.add(0)  # anew: it is behind the others now
    deadlines.add(9)
    for thing in (3, 4):
        deadlines.remove(thing)
    deadlines.remove(99)
    await last.wait()
    assert expired == [1, 2, 5, 6, 7, 8, 0, 9]


async def test_it_rings_again_for_what_is_added_later() -> None:
    rung: asyncio.Queue[str] = asyncio.Queue()
    deadlines = Deadlines(0.005, rung.put_nowait)
    for thing in ("first", "second"):
        deadlines.add(thing)
        assert await rung.get() == thing


async def test_one_timer_is_enough_for_what_is_added_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, timers, rung, enough = asyncio.get_running_loop(), 0, 0, asyncio.Event()
    call_later = loop.call_later

    def counted(delay: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(delay, ring)

    def ring(thing: int) -> None:
        nonlocal rung
        rung += 1
        deadlines.add(thing)
        if rung == 50:
            deadlines.remove(thing)
            enough.set()

    monkeypatch.setattr(loop, "call_later", counted)
    deadlines = Deadlines(0.002, ring)
    deadlines.add(1)
    await enough.wait()
    assert timers <= 2 * rung  # one may ring a moment too early


async def test_one_that_fails_costs_no_other() -> None:
    loop, failed, went_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda *_: failed.set())
    ended: dict[str, Callable[[], object]] = {"ill": lambda: 1 / 0, "well": went_on.set}
    deadlines: Deadlines[str] = Deadlines(0.005, lambda thing: ended[thing]())
    deadlines.add("ill")
    deadlines.add("well")
    await failed.wait()
    await went_on.wait()
