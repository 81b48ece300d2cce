"""Deadlines: every item that is not removed expires, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from argosy.http_server import Deadlines


async def test_items_that_are_not_removed_expire_in_order() -> None:
    expired: list[int] = []
    last = asyncio.Event()

    def on_expired(item: int) -> None:
        expired.append(item)
        if item == 9:
            last.set()

    deadlines = Deadlines(0.01, on_expired)
    for item in range(10):
        deadlines.add(item)
    deadlines.add(0)  # again, so it moves behind the others
    deadlines.add(9)
    for item in (3, 4):
        deadlines.remove(item)
    deadlines.remove(99)
    await last.wait()
    assert expired == [1, 2, 5, 6, 7, 8, 0, 9]


async def test_item_added_after_an_expiry_expires_too() -> None:
    expired: asyncio.Queue[str] = asyncio.Queue()
    deadlines = Deadlines(0.005, expired.put_nowait)
    for item in ("first", "second"):
        deadlines.add(item)
        assert await expired.get() == item


async def test_readded_items_share_one_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, timers, expirations, finished = asyncio.get_running_loop(), 0, 0, asyncio.Event()
    call_later = loop.call_later

    def count_timers(delay: float, on_expired: Callable[[], None]) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(delay, on_expired)

    def on_expired(item: int) -> None:
        nonlocal expirations
        expirations += 1
        deadlines.add(item)
        if expirations == 50:
            deadlines.remove(item)
            finished.set()

    monkeypatch.setattr(loop, "call_later", count_timers)
    deadlines = Deadlines(0.002, on_expired)
    deadlines.add(1)
    await finished.wait()
    assert timers <= 2 * expirations  # a timer may fire slightly early


async def test_failing_callback_does_not_affect_other_items() -> None:
    loop, failed, second_expired = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda *_: failed.set())
    actions: dict[str, Callable[[], object]] = {
        "failing": lambda: 1 / 0,
        "working": second_expired.set,
    }
    deadlines: Deadlines[str] = Deadlines(0.005, lambda item: actions[item]())
    deadlines.add("failing")
    deadlines.add("working")
    await failed.wait()
    await second_expired.wait()
