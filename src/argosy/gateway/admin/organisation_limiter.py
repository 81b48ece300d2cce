"""Limits concurrent admin calls per organisation, so that no organisation monopolises the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError

MAX_CONCURRENT_PER_ORGANISATION = 4
MAX_CONCURRENT = 10
"""Maximum for all organisations. A store has 15 connections, of which the gateway needs some itself."""
MAX_WAITING_PER_ORGANISATION = 100
"""Maximum number of waiting calls of one organisation. Further calls are rejected."""
RETRY_AFTER_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class _OrganisationCalls:
    """Calls of one organisation."""

    slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_PER_ORGANISATION)
    )
    in_progress: int = 0
    """Number of running and waiting calls."""


class OrganisationLimiter:
    """Limits concurrent admin calls per organisation. Not thread-safe: use it from one event loop."""

    def __init__(self) -> None:
        self._calls_by_organisation: dict[str, _OrganisationCalls] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run_in_thread(
        self, organisation: str, function: Callable[..., T], *arguments: object
    ) -> T:
        """Run a function in a worker thread once a concurrency slot of the organisation is free.

        Returns what the function returns and raises what it raises.

        Raises:
            ApiError: 429 `overloaded`, if too many calls of the organisation wait.
        """
        calls = self._calls_by_organisation.setdefault(organisation, _OrganisationCalls())
        if calls.in_progress >= MAX_CONCURRENT_PER_ORGANISATION + MAX_WAITING_PER_ORGANISATION:
            message = f"{MAX_WAITING_PER_ORGANISATION} calls of your organisation are waiting. Send fewer at once."
            raise ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)
        calls.in_progress += 1
        try:
            async with calls.slots, self._slots:
                return await run_in_daemon_thread(function, *arguments)
        finally:
            calls.in_progress -= 1
            if not calls.in_progress:
                del self._calls_by_organisation[organisation]
