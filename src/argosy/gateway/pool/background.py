"""What is looked after for as long as it is there, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

AGAIN_S = 5.0
"""After how long something that failed is looked after again."""

Care = Callable[[], Coroutine[Any, Any, None]]
"""Looks after something for as long as the gateway runs, or as there is something to look after."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


async def look_after(care: Care) -> None:
    """Care until there is no more to care for: what went wrong, no thread left or no memory, may not go wrong again."""
    while True:
        try:
            return await care()
        except Exception:
            log.exception("looked_after_again", what=repr(care), after_s=AGAIN_S)
        await asyncio.sleep(AGAIN_S)
