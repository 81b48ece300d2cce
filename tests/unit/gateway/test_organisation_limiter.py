"""Concurrent admin calls are limited per organisation, so that one organisation does not delay another."""

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


async def test_concurrent_calls_are_limited_per_organisation() -> None:
    limiter, release = OrganisationLimiter(), threading.Event()
    running: list[str] = []

    def call(name: str) -> str:
        running.append(name)
        if name != "other":
            release.wait()
        return name

    allowed = MAX_CONCURRENT_PER_ORGANISATION + MAX_WAITING_PER_ORGANISATION
    tasks = [
        asyncio.create_task(limiter.run_in_thread("acme", call, f"{n}")) for n in range(allowed)
    ]
    await until(lambda: len(running) == MAX_CONCURRENT_PER_ORGANISATION)
    with pytest.raises(ApiError) as error:
        await limiter.run_in_thread("acme", call, "too many")
    assert (error.value.status, error.value.code) == (429, "overloaded")
    assert await limiter.run_in_thread("zeta", call, "other") == "other"
    assert len(running) == MAX_CONCURRENT_PER_ORGANISATION + 1
    tasks[-1].cancel()
    release.set()
    results = await asyncio.gather(*tasks[:-1])
    assert results == [f"{n}" for n in range(allowed - 1)]
    assert await limiter.run_in_thread("acme", call, "again") == "again"


async def test_concurrent_calls_of_all_organisations_are_limited() -> None:
    limiter, release = OrganisationLimiter(), threading.Event()
    running: list[str] = []

    def call(name: str) -> str:
        running.append(name)
        release.wait()
        return name

    names = [
        f"org{n // MAX_CONCURRENT_PER_ORGANISATION}"
        for n in range(MAX_CONCURRENT + 2 * MAX_CONCURRENT_PER_ORGANISATION)
    ]
    tasks = [asyncio.create_task(limiter.run_in_thread(name, call, name)) for name in names]
    await until(lambda: len(running) >= MAX_CONCURRENT)
    for _ in range(10):  # so that a call over the limit would have started
        await asyncio.to_thread(running.copy)
    assert len(running) == MAX_CONCURRENT
    release.set()
    assert await asyncio.gather(*tasks) == names


async def test_failed_call_frees_its_slot() -> None:
    limiter = OrganisationLimiter()

    def fails() -> None:
        raise ValueError("no")

    for _ in range(MAX_CONCURRENT_PER_ORGANISATION * 2):
        with pytest.raises(ValueError, match="no"):
            await limiter.run_in_thread("acme", fails)
