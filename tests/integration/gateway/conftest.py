"""The gateway's tests run on uvloop, as the gateway does, and on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test on both."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop}
