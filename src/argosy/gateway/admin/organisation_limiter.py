"""How much of the store's time one organisation gets through the admin API: so many calls at once, others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError

MAX_CONCURRENT_PER_ORGANISATION = 4
MAX_CONCURRENT = 10
"""Of all organisations: a store has 15 connections, and the gateway needs some for accounts and usage."""
MAX_WAITING_PER_ORGANISATION = 100
"""Calls of one organisation, before more are refused."""
RETRY_AFTER_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class _OrganisationCalls:
    """An organisation's calls."""

    slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_PER_ORGANISATION)
    )
    in_progress: int = 0
    """Those that run, and those that wait."""


class OrganisationLimiter:
    """Of all organisations. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls_by_organisation: dict[str, _OrganisationCalls] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run_in_thread(
        self, organisation: str, function: Callable[..., T], *arguments: object
    ) -> T:
        """What the call returns, or raises, in a thread, once it is the organisation's turn.

        Raises ApiError 429 where too many of its calls wait.
        """
        line = self._calls_by_organisation.setdefault(organisation, _OrganisationCalls())
        if line.in_progress >= MAX_CONCURRENT_PER_ORGANISATION + MAX_WAITING_PER_ORGANISATION:
            message = f"{MAX_WAITING_PER_ORGANISATION} calls of your organisation wait already. Ask one after the other."
            raise ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)
        line.in_progress += 1
        try:
            async with line.slots, self._slots:
                return await run_in_daemon_thread(function, *arguments)
        finally:
            line.in_progress -= 1
            if not line.in_progress:
                del self._calls_by_organisation[organisation]
