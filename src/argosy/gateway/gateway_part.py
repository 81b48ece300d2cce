"""Optional part of a gateway, such as its accounts or its console, as the server runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from argosy.gateway.event_loop import CoroutineFactory


def do_nothing() -> None:
    """Do nothing, where a part has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPart:
    """Calls of the server to one part. A gateway without the part does not have it in its list."""

    start: Callable[[], Awaitable[None]] | None = None
    """Called before the gateway listens."""
    tasks: Sequence[CoroutineFactory] = ()
    """Run while the gateway listens, and again after a failure."""
    reload: Callable[[], object] = do_nothing
    """Reads files again, on SIGHUP."""
    on_models_changed: Callable[[], object] = do_nothing
    """Called after models, versions or aliases have changed."""
    read_gauges: Callable[[], dict[str, Any]] = dict
    """Returns fields of `GatewayGauges`."""
    on_drain: Callable[[], object] = do_nothing
    """Called when the gateway begins to drain."""
