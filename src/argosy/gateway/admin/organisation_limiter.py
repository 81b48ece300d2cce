"""How much of the store's time one organisation gets through the admin API: so many calls at once, others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from argosy.process import aside
from argosy.protocol import ApiError

AT_ONCE = 4
MOST_AT_ONCE = 10
"""Of all organisations: a store has 15 connections, and the gateway needs some for accounts and usage."""
MOST_WAITING = 100
"""Calls of one organisation, before more are refused."""
RETRY_AFTER_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class _Line:
    """An organisation's calls."""

    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    count: int = 0
    """Those that run, and those that wait."""


class Turns:
    """Of all organisations. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def aside(self, organisation: str, call: Callable[..., T], *given: object) -> T:
        """What the call returns, or raises, in a thread, once it is the organisation's turn.

        Raises ApiError 429 where too many of its calls wait.
        """
        line = self._lines.setdefault(organisation, _Line())
        if line.count >= AT_ONCE + MOST_WAITING:
            message = (
                f"{MOST_WAITING} calls of your organisation wait already. Ask one after the other."
            )
            raise ApiError(429, "overloaded", message, retry_after_s=RETRY_AFTER_S)
        line.count += 1
        try:
            async with line.places, self._places:
                return await aside(call, *given)
        finally:
            line.count -= 1
            if not line.count:
                del self._lines[organisation]
