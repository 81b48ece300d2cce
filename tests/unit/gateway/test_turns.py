"""Calls of the admin API that ask the store: an organisation has so many at a time, and keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.waiting import until

from argosy.gateway.admin.organisation_limiter import AT_ONCE, MOST_AT_ONCE, MOST_WAITING, Turns
from argosy.protocol import ApiError


async def test_an_organisation_has_so_many_at_a_time_and_others_have_their_own() -> None:
    turns, go_on = Turns(), threading.Event()
    running: list[str] = []

    def call(name: str) -> str:
        running.append(name)
        if name != "other":
            go_on.wait()
        return name

    many = AT_ONCE + MOST_WAITING
    asked = [asyncio.create_task(turns.aside("acme", call, f"{n}")) for n in range(many)]
    await until(lambda: len(running) == AT_ONCE)
    with pytest.raises(ApiError) as refused:
        await turns.aside("acme", call, "too many")
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    assert await turns.aside("zeta", call, "other") == "other"
    assert len(running) == AT_ONCE + 1
    asked[-1].cancel()
    go_on.set()
    done = await asyncio.gather(*asked[:-1])
    assert done == [f"{n}" for n in range(many - 1)]
    assert await turns.aside("acme", call, "again") == "again"


async def test_all_organisations_together_leave_the_gateway_some_connections() -> None:
    turns, go_on = Turns(), threading.Event()
    running: list[str] = []

    def call(name: str) -> str:
        running.append(name)
        go_on.wait()
        return name

    names = [f"org{n // AT_ONCE}" for n in range(MOST_AT_ONCE + 2 * AT_ONCE)]
    asked = [asyncio.create_task(turns.aside(name, call, name)) for name in names]
    await until(lambda: len(running) >= MOST_AT_ONCE)
    for _ in range(10):  # whoever may run besides has had time to begin
        await asyncio.to_thread(running.copy)
    assert len(running) == MOST_AT_ONCE
    go_on.set()
    assert await asyncio.gather(*asked) == names


async def test_what_a_call_raises_leaves_room() -> None:
    turns = Turns()

    def fails() -> None:
        raise ValueError("no")

    for _ in range(AT_ONCE * 2):
        with pytest.raises(ValueError, match="no"):
            await turns.aside("acme", fails)
