"""What is looked after for as long as it is there, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

RETRY_INTERVAL_S = 5.0
"""After how long something that failed is looked after again."""

CoroutineFactory = Callable[[], Coroutine[Any, Any, None]]
"""Looks after something for as long as the gateway runs, or as there is something to look after."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


async def run_with_restarts(factory: CoroutineFactory) -> None:
    """Care until there is no more to care for: what went wrong, no thread left or no memory, may not go wrong again."""
    while True:
        try:
            return await factory()
        except Exception:
            log.exception("background_task_restarted", what=repr(factory), after_s=RETRY_INTERVAL_S)
        await asyncio.sleep(RETRY_INTERVAL_S)
