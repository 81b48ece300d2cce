"""HTTP servers of tests: handlers of exchanges by path, and a server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.http_server import (
    CertificateWatcher,
    HttpExchange,
    HttpRequest,
    HttpServer,
    RequestHandler,
    bind_tcp,
    run_handler,
)

ExchangeHandler = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True)
class HttpLimits:
    """Limits of exchanges."""

    body_limit_bytes: int = 1 << 26
    body_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0


def answer_with(
    handlers: ExchangeHandler | Mapping[str, ExchangeHandler],
    limits: HttpLimits = HttpLimits(),
) -> RequestHandler:
    """Return the handler of a server that answers with one handler, or with one for each path."""

    async def handle(request: HttpRequest) -> None:
        handler = handlers[request.path] if isinstance(handlers, Mapping) else handlers
        exchange = HttpExchange(request, limits)
        await run_handler(exchange, handler(exchange))

    return handle


@contextlib.asynccontextmanager
async def run_server(
    handler: RequestHandler,
    certificates: CertificateWatcher | None = None,
    **options: Any,  # noqa: ANN401 - keyword arguments of `HttpServer`
) -> AsyncIterator[tuple[HttpServer, int]]:
    """Run a server on a free port, and yield both. It stops without waiting for responses."""
    server, listen_socket = HttpServer(handler, certificates, **options), bind_tcp("127.0.0.1", 0)
    port = listen_socket.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[listen_socket]))
    await server.started.wait()
    try:
        yield server, port
    finally:
        server.force_exit = True
        server.stop()
        await task
