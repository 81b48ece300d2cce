"""The gateway's application: checks each request by its route, calls the handler, and answers exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import structlog

from argosy.deployment import GatewayConfig
from argosy.gateway.auth import check_role
from argosy.gateway.console import ConsoleSessions
from argosy.gateway.cors import CorsPolicy
from argosy.gateway.dialects import ANTHROPIC, VERSION_HEADER
from argosy.gateway.filters import IDEMPOTENCY_KEY_HEADER
from argosy.gateway.http_route import Handler, HttpRoute, to_openai_path
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.http_server import (
    ANY_METHOD,
    HttpExchange,
    HttpRequest,
    MessageTransport,
    RouteMatch,
    RouteTable,
    check_method,
    check_same_origin,
    run_handler,
)
from argosy.telemetry import GatewayMetrics, bind_request

_CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_QUIET_ROUTES = frozenset(
    {"/health", "/ready", "/metrics", "/replicas/{name}/metrics", "/peer/pools"}
)
_HANDSHAKE_HEADERS = frozenset(
    {
        b"connection",
        b"upgrade",
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
        b"x-request-id",
        IDEMPOTENCY_KEY_HEADER,
    }
)
"""Headers that belong to the handshake, or to one request and not to each message."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class GatewayApp:
    """Handles requests, one after another or together, until none is left."""

    def __init__(
        self,
        routes: Iterable[HttpRoute],
        *,
        authenticate: Callable[[HttpExchange], Principal],
        sessions: ConsoleSessions | None,
        cors: CorsPolicy,
        metrics: GatewayMetrics,
        config: GatewayConfig,
        gateway_id: str = "",
    ) -> None:
        self._routes = RouteTable(routes)
        self._authenticate = authenticate
        self._sessions = sessions
        self._cors = cors
        self._metrics = metrics
        self._log = log.bind()
        self._config = config
        self._gateway_id = gateway_id
        self.in_flight = 0
        """Number of requests that are being handled."""
        self._request_ended: asyncio.Event | None = None
        """Set after each request. None until `wait_until_idle` is called."""

    async def __call__(self, request: HttpRequest) -> None:
        """Handle one HTTP request."""
        await self._answer(HttpExchange(request, self._config, self._gateway_id))

    async def _answer(self, exchange: HttpExchange, handler: Handler | None = None) -> None:
        """Answer a request, or a message of a WebSocket with the handler of its session."""
        exchange.path = to_openai_path(exchange.path)
        match = self._routes.find(exchange.path)
        self.in_flight += 1
        bind_request(exchange.request_id, exchange.get_header(b"traceparent"))
        try:
            await run_handler(exchange, self._handle(exchange, match, handler))
        finally:
            self.in_flight -= 1
            if self._request_ended is not None:
                self._request_ended.set()
            self._record_request(exchange, "other" if match is None else match.label)

    async def wait_until_idle(self) -> None:
        """Wait until no request is in flight."""
        self._request_ended = self._request_ended or asyncio.Event()
        while self.in_flight:
            self._request_ended.clear()
            await self._request_ended.wait()

    async def _handle(
        self, exchange: HttpExchange, match: RouteMatch[HttpRoute] | None, handler: Handler | None
    ) -> None:
        """Apply CORS, authenticate the client, check method, role and origin, and call the route's handler.

        Raises:
            ApiError: No route has this path, or the client may not use it.
        """
        route = None if match is None else match.route
        if route is not None and route.dialect is not None:
            exchange.set_dialect(route.dialect)
        elif VERSION_HEADER in exchange.headers or exchange.path.startswith("/v1/messages/"):
            exchange.set_dialect(ANTHROPIC)
        is_same_origin = route is not None and route.is_same_origin
        is_page_request = b"origin" in exchange.headers and not is_same_origin
        if is_page_request and self._cors.apply_headers(exchange):
            await exchange.send_response(200, b"", b"text/plain")
            return
        if match is None or route is None:
            raise self._routes.not_found_error(exchange.path)
        if route.is_public:
            principal = ANONYMOUS
        elif is_same_origin and self._sessions is not None:
            principal = await self._sessions.authenticate(exchange)
        else:
            principal = self._authenticate(exchange)
            exchange.tenant = principal.project or principal.organisation or None
        if route.open_session is not None and exchange.is_websocket_handshake:
            self._cors.check_origin(exchange)  # also with a key, since browsers have no preflight
            with route.open_session() as handle_message:
                await self._serve_session(exchange, handle_message)
            return
        if route.method != ANY_METHOD:
            route = match.methods[check_method(exchange, match.methods)]
        if route.role is not None:
            check_role(principal, route.role, route.scope)
        if principal.is_anonymous or route.is_same_origin:
            self._check_origin(exchange, route, principal)
        exchange.path_parameters = match.parameters
        await (handler or route.handler)(exchange, principal)

    def _check_origin(self, exchange: HttpExchange, route: HttpRoute, principal: Principal) -> None:
        """Check that no page sent a request whose browser adds the credential, or that needs none.

        Public routes have checks of their own, or change nothing.

        Raises:
            ApiError: 403 if one did.
        """
        if route.is_public:
            return
        is_change = exchange.method in _CHANGING_METHODS
        if route.is_same_origin:
            if is_change or principal.is_anonymous:
                check_same_origin(exchange)
        elif is_change and principal.is_anonymous:
            self._cors.check_origin(exchange)

    async def _serve_session(self, exchange: HttpExchange, handler: Handler) -> None:
        """Serve a WebSocket. Its messages are in flight, and the connection itself is not: it is idle between them."""
        self.in_flight -= 1
        try:
            await serve_messages(exchange, partial(self._answer, handler=handler))
        finally:
            self.in_flight += 1

    def _record_request(self, exchange: HttpExchange, route: str) -> None:
        status = exchange.status or 499
        self._metrics.http_requests.add((route, str(status)))
        log_request = self._log.debug if route in _QUIET_ROUTES else self._log.info
        log_request(
            "request",
            method=exchange.method,
            path=exchange.path[:200],
            status=status,
            error=exchange.error_code,
            ms=exchange.elapsed_ms(),
        )


async def serve_messages(
    exchange: HttpExchange, answer: Callable[[HttpExchange], Awaitable[None]]
) -> None:
    """Accept a WebSocket and answer its messages one after the other, until the client or the server closes it.

    Args:
        exchange: The handshake. Each message is a POST to its path, with its credentials.
        answer: Answers one message. Its errors are answered too.

    Raises:
        ApiError: 400 if the handshake is invalid, 503 if the server shuts down.
    """
    websocket = exchange.accept_websocket()
    while (message := await websocket.receive()) is not None:
        request = exchange.detach(
            MessageTransport(websocket, message), method="POST", dropped_headers=_HANDSHAKE_HEADERS
        )
        await answer(request)
        del message, request  # an idle connection keeps no message
    await websocket.close(reason="the server ends this connection; open another one")
