"""The gateway's tests run on uvloop, as the gateway does; those of its sockets on asyncio's own loop too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

ON_BOTH = frozenset(
    {
        "test_accepting.py",
        "test_connections.py",
        "test_fast_path.py",
        "test_tls.py",
        "test_upstream.py",
    }
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What a test runs on, once on each."""
    del config
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in ON_BOTH:
        loops["asyncio"] = asyncio.SelectorEventLoop
    return loops
