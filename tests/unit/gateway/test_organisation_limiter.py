"""Calls of the admin API that ask the store: an organisation has so many at a time, and keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.support.waiting import until

from argosy.gateway.admin.organisation_limiter import (
    MAX_CONCURRENT,
    MAX_CONCURRENT_PER_ORGANISATION,
    MAX_WAITING_PER_ORGANISATION,
    OrganisationLimiter,
)
from argosy.protocol import ApiError


async def test_an_organisation_has_so_many_at_a_time_and_others_have_their_own() -> None:
    turns, go_on = OrganisationLimiter(), threading.Event()
    running: list[str] = []

    def call(name: str) -> str:
        running.append(name)
        if name != "other":
            go_on.wait()
        return name

    many = MAX_CONCURRENT_PER_ORGANISATION + MAX_WAITING_PER_ORGANISATION
    asked = [asyncio.create_task(turns.run_in_thread("acme", call, f"{n}")) for n in range(many)]
    await until(lambda: len(running) == MAX_CONCURRENT_PER_ORGANISATION)
    with pytest.raises(ApiError) as refused:
        await turns.run_in_thread("acme", call, "too many")
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    assert await turns.run_in_thread("zeta", call, "other") == "other"
    assert len(running) == MAX_CONCURRENT_PER_ORGANISATION + 1
    asked[-1].cancel()
    go_on.set()
    done = await asyncio.gather(*asked[:-1])
    assert done == [f"{n}" for n in range(many - 1)]
    assert await turns.run_in_thread("acme", call, "again") == "again"


async def test_all_organisations_together_leave_the_gateway_some_connections() -> None:
    turns, go_on = OrganisationLimiter(), threading.Event()
    running: list[str] = []

    def call(name: str) -> str:
        running.append(name)
        go_on.wait()
        return name

    names = [
        f"org{n // MAX_CONCURRENT_PER_ORGANISATION}"
        for n in range(MAX_CONCURRENT + 2 * MAX_CONCURRENT_PER_ORGANISATION)
    ]
    asked = [asyncio.create_task(turns.run_in_thread(name, call, name)) for name in names]
    await until(lambda: len(running) >= MAX_CONCURRENT)
    for _ in range(10):  # whoever may run besides has had time to begin
        await asyncio.to_thread(running.copy)
    assert len(running) == MAX_CONCURRENT
    go_on.set()
    assert await asyncio.gather(*asked) == names


async def test_what_a_call_raises_leaves_room() -> None:
    turns = OrganisationLimiter()

    def fails() -> None:
        raise ValueError("no")

    for _ in range(MAX_CONCURRENT_PER_ORGANISATION * 2):
        with pytest.raises(ValueError, match="no"):
            await turns.run_in_thread("acme", fails)
