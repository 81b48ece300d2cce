"""Deadlines: whatever is not removed expires, in order, and nothing else does."""

from __future__ import annotations

import asyncio

from argosy.web import Deadlines


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
