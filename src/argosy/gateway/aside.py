"""Calls that may wait for the database, in threads that nobody waits for: none that hangs keeps a gateway here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[..., T], *given: object) -> T:
    """What the call returns, or raises. If this is cancelled the call goes on by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Callable[[], None]) -> None:
        if not done.done():
            result()

    def run() -> None:
        try:
            came = context.run(call, *given)
        except BaseException as error:  # noqa: BLE001 - whoever awaits it is told
            told = functools.partial(done.set_exception, error)
        else:
            told = functools.partial(done.set_result, came)
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            loop.call_soon_threadsafe(tell, told)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await done
