"""Routes of the gateway's HTTP server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange, ResponseDialect

Handler = Callable[[HttpExchange, Principal], Awaitable[None]]
ANY_METHOD = ""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """An HTTP route: one path, or all paths with a common prefix."""

    name: str
    """Value of the `route` label in metrics."""
    method: str
    """HTTP method, or `ANY_METHOD` if the handler checks it."""
    handler: Handler
    is_public: bool = False
    """Whether the route needs no authentication. Other routes authenticate before the body is read."""
    dialect: ResponseDialect | None = None
    """Shape of errors and headers; None for those of OpenAI."""
    open_session: Callable[[], Handler] | None = None
    """Returns the handler of the messages of one WebSocket, each of them a request; None for routes without one."""


@dataclass(frozen=True, slots=True)
class PrefixRoute:
    """Route of all paths that begin with `prefix`, have more than that, and end with `suffix`."""

    prefix: str
    route: HttpRoute
    suffix: str = ""

    def matches(self, path: str) -> bool:
        """Whether the route applies to a path."""
        return (
            path.startswith(self.prefix)
            and len(path) > len(self.prefix)
            and path.endswith(self.suffix)
        )
