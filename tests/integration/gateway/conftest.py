"""Event loops of the gateway tests (uvloop, and asyncio's for tests of sockets), and the browser of the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import uvloop
from tests.support.console_browser import close_pages, launch_chromium

if TYPE_CHECKING:
    from playwright.async_api import Browser

FILES_ON_BOTH_LOOPS = frozenset(
    {
        "test_acceptor.py",
        "test_connection_limits.py",
        "test_fast_path.py",
        "test_http_connections.py",
        "test_tls.py",
        "test_upstream.py",
    }
)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """Return the event loops that a test runs on, once on each."""
    del config
    loops: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in FILES_ON_BOTH_LOOPS:
        loops["asyncio"] = asyncio.SelectorEventLoop
    return loops


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the variants on asyncio's loop as exhaustive, before markers are selected."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and asyncio.SelectorEventLoop in callspec.params.values():
            item.add_marker(pytest.mark.exhaustive)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with launch_chromium() as launched:
        yield launched


@pytest_asyncio.fixture(loop_scope="module")
async def browser(chromium: Browser) -> AsyncIterator[Browser]:
    """Return the browser that the tests of a file share. Pages of one test are closed before the next."""
    yield chromium
    await close_pages(chromium)
