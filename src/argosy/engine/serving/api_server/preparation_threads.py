"""Threads that parse, render and tokenize requests, apart from those of the event loop's own default executor."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_THREADS = 32
"""Maximum number of requests in preparation. Most of the time their threads wait for a render process."""


class PreparationThreads:
    """Pool of threads. Its threads start on demand."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="prepare")

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in a thread, with the context of the caller, and return its result."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: context.run(function))

    def close(self) -> None:
        """End the threads that are idle, and the others when they become idle."""
        self._executor.shutdown(wait=False, cancel_futures=True)
