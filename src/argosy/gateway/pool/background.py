"""Supervision of background coroutines that must outlive their own failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

RETRY_INTERVAL_S = 5.0
"""Time after which a failed background coroutine is started again."""

CoroutineFactory = Callable[[], Coroutine[Any, Any, None]]
"""Function that starts a background coroutine. The coroutine returns when its work has ended for good."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


async def run_with_restarts(factory: CoroutineFactory) -> None:
    """Run a background coroutine until it returns.

    If it raises, log the exception and restart it after 5 seconds, because resource exhaustion (memory, threads) is
    usually temporary.
    """
    while True:
        try:
            return await factory()
        except Exception:
            log.exception("background_task_failed", task=repr(factory), retry_in_s=RETRY_INTERVAL_S)
        await asyncio.sleep(RETRY_INTERVAL_S)
