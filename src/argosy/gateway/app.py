"""The gateway's ASGI application: routes each HTTP request to a handler and turns exceptions into error responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import msgspec
import structlog

from argosy.deployment import GatewayConfig
from argosy.gateway.azure_paths import to_openai_path
from argosy.gateway.console import CONSOLE_PREFIX, PLAYGROUND_PATHS, Console
from argosy.gateway.cors import CorsPolicy
from argosy.gateway.dialects import (
    ANTHROPIC,
    VERSION_HEADER,
    DialectRoutes,
    ResponseState,
)
from argosy.gateway.filters import LimitFilter
from argosy.gateway.http_route import ANY_METHOD, Handler, HttpRoute, PrefixRoute
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.operations import OperationsHandlers
from argosy.gateway.peer_gateways import PEER_REQUESTS_PREFIX
from argosy.gateway.pooling_handlers import PoolingHandlers
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.gateway.proxy import CompletionHandlers
from argosy.gateway.utility_handlers import (
    METRICS_PATH,
    REPLICAS_PREFIX,
    TOKENIZE_PATH,
    UtilityHandlers,
)
from argosy.gateway.websocket_session import serve_messages
from argosy.http_server import (
    AsgiApp,
    HttpExchange,
    Receive,
    Scope,
    Send,
    check_method,
    not_found_error,
    run_handler,
)
from argosy.protocol import StatusResponse, VersionResponse
from argosy.telemetry import GatewayMetrics, bind_request

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MODELS_PREFIX = "/v1/models/"
ADMIN_PREFIX = "/admin/"
_CHANGING_METHODS = frozenset({"POST", "PUT", "DELETE"})
_QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics", "/replicas/{name}/metrics"})
_encode = msgspec.json.Encoder().encode


class GatewayApp:
    """Routes requests to their handlers and sends an error response for each exception that they raise."""

    def __init__(
        self,
        models: ModelRouter,
        generation: CompletionHandlers,
        operations: OperationsHandlers,
        *,
        authenticate: Callable[[HttpExchange], Principal],
        admin: AsgiApp,
        render_openapi: Callable[[], bytes],
        cors: CorsPolicy,
        metrics: GatewayMetrics,
        config: GatewayConfig,
        limits: LimitFilter | None = None,
        gateway_id: str = "",
        answer_peer: Handler | None = None,
        peer_routes: Sequence[HttpRoute] = (),
        response_state: ResponseState | None = None,
        console: Console | None = None,
    ) -> None:
        self._models = models
        self._authenticate = authenticate
        self._admin = admin
        self._render_openapi = render_openapi
        self._cors = cors
        self._metrics = metrics
        self._log = log.bind()
        self._config = config
        self._gateway_id = gateway_id
        refuse_unknown_fields = config.unknown_fields == "refuse"
        pooling = PoolingHandlers(generation.handle, refuse_unknown_fields=refuse_unknown_fields)
        utility = UtilityHandlers(models, limits, refuse_unknown_fields=refuse_unknown_fields)
        self.dialects = DialectRoutes(
            models,
            response_state or ResponseState(None),
            chat=generation.chat_completions,
            completion=generation.completions,
            embeddings=pooling.embeddings,
            tokenize=partial(utility.tokenize, path=TOKENIZE_PATH),
            refuse_unknown_fields=refuse_unknown_fields,
        )
        routes = (
            HttpRoute(
                "/v1/chat/completions",
                "POST",
                generation.chat_completions,
                open_session=lambda: generation.chat_completions,
            ),
            HttpRoute("/v1/completions", "POST", generation.completions),
            HttpRoute("/v1/models", "GET", self._list_models),
            HttpRoute("/tokenize", "POST", utility.tokenize),
            HttpRoute("/detokenize", "POST", utility.tokenize),
            HttpRoute("/tokenizer_info", "GET", utility.tokenizer_info),
            HttpRoute("/metrics", "GET", operations.metrics),
            HttpRoute("/openapi.json", "GET", self._openapi),
            HttpRoute("/health", "GET", self._health, is_public=True),
            HttpRoute("/ready", "GET", operations.ready, is_public=True),
            HttpRoute("/version", "GET", self._version, is_public=True),
            *pooling.routes,
            *self.dialects.routes,
            *peer_routes,
        )
        self._routes = {route.name: route for route in routes}
        admin_route = HttpRoute(ADMIN_PREFIX, ANY_METHOD, self._forward_to_admin, is_public=True)
        replica_metrics = HttpRoute(
            REPLICAS_PREFIX + "{name}" + METRICS_PATH, "GET", utility.replica_metrics
        )
        self._same_origin_routes: tuple[HttpRoute, ...] = (admin_route,)
        """Routes without CORS, which pages of other origins cannot read."""
        self._prefix_routes = [
            PrefixRoute(ADMIN_PREFIX, admin_route),
            PrefixRoute(
                MODELS_PREFIX, HttpRoute(MODELS_PREFIX + "{model}", "GET", self._get_model)
            ),
            PrefixRoute(REPLICAS_PREFIX, replica_metrics, METRICS_PATH),
            *self.dialects.prefix_routes,
        ]
        if answer_peer is not None:
            peer_route = HttpRoute(
                PEER_REQUESTS_PREFIX + "{id}", "GET", answer_peer, is_public=True
            )
            self._prefix_routes.append(PrefixRoute(PEER_REQUESTS_PREFIX, peer_route))
        if console is not None:
            self._add_console(console)
        self.in_flight = 0
        """Number of requests that are being handled."""
        self._request_ended: asyncio.Event | None = None
        """Set after each request. None until `wait_until_idle` is called."""

    def _add_console(self, console: Console) -> None:
        """Serve the console. Browsers get its document at `/`, where Ollama's clients get a greeting."""
        home = self._routes["/"]

        async def send_home(exchange: HttpExchange, principal: Principal) -> None:
            is_browser = b"text/html" in exchange.headers.get(b"accept", b"")
            await (console.send_document if is_browser else home.handler)(exchange, principal)

        self._routes["/"] = replace(home, handler=send_home)
        console.playground = {path: self._routes[path] for path in PLAYGROUND_PATHS}
        route = HttpRoute(CONSOLE_PREFIX, ANY_METHOD, console.handle, is_public=True)
        self._prefix_routes.append(PrefixRoute(CONSOLE_PREFIX, route))
        self._same_origin_routes = (*self._same_origin_routes, route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        await self._answer(HttpExchange(scope, receive, send, self._config, self._gateway_id))

    async def _answer(self, exchange: HttpExchange, handler: Handler | None = None) -> None:
        """Answer a request, or a message of a WebSocket with the handler of its session."""
        exchange.path = to_openai_path(exchange.path)
        route = self._find_route(exchange.path)
        self.in_flight += 1
        bind_request(exchange.request_id, exchange.get_header(b"traceparent"))
        try:
            await run_handler(exchange, self._handle(exchange, route, handler))
        finally:
            self.in_flight -= 1
            if self._request_ended is not None:
                self._request_ended.set()
            self._record_request(exchange, "other" if route is None else route.name)

    async def wait_until_idle(self) -> None:
        """Wait until no request is in flight and no response runs in the background."""
        self._request_ended = self._request_ended or asyncio.Event()
        while self.in_flight:
            self._request_ended.clear()
            await self._request_ended.wait()
        await self.dialects.background.wait_until_idle()

    def _find_route(self, path: str) -> HttpRoute | None:
        found = self._routes.get(path)
        if found is not None:
            return found
        return next((one.route for one in self._prefix_routes if one.matches(path)), None)

    def _is_known_path(self, path: str) -> bool:
        return self._find_route(path) is not None

    async def _handle(
        self, exchange: HttpExchange, route: HttpRoute | None, handler: Handler | None
    ) -> None:
        """Apply CORS, authenticate the client, check the method and call the route's handler.

        Raises:
            ApiError: No route has this path, or the client may not use it.
        """
        if route is not None and route.dialect is not None:
            exchange.set_dialect(route.dialect)
        elif VERSION_HEADER in exchange.headers:
            exchange.set_dialect(ANTHROPIC)
        is_page_request = b"origin" in exchange.headers and route not in self._same_origin_routes
        if is_page_request and self._cors.apply_headers(exchange):
            await exchange.send_response(200, b"", b"text/plain")
            return
        if route is None:
            raise not_found_error(exchange.path, self._is_known_path)
        principal = ANONYMOUS if route.is_public else self._authenticate(exchange)
        if route.open_session is not None and exchange.is_websocket_handshake:
            self._cors.check_origin(exchange)  # also with a key, since browsers have no preflight
            await self._serve_session(exchange, route.open_session())
            return
        if route.method != ANY_METHOD:
            check_method(exchange, (route.method,))
        if exchange.method in _CHANGING_METHODS and principal.is_anonymous and not route.is_public:
            self._cors.check_origin(exchange)
        await (handler or route.handler)(exchange, principal)

    async def _serve_session(self, exchange: HttpExchange, handler: Handler) -> None:
        """Serve a WebSocket. Its messages are in flight, and the connection itself is not: it is idle between them."""
        self.in_flight -= 1
        try:
            await serve_messages(exchange, partial(self._answer, handler=handler))
        finally:
            self.in_flight += 1

    def _record_request(self, exchange: HttpExchange, route: str) -> None:
        status = exchange.status or 499
        self._metrics.record_http_response(route, status)
        log_request = self._log.debug if route in _QUIET_ROUTES else self._log.info
        log_request(
            "request",
            method=exchange.method,
            path=exchange.path[:200],
            status=status,
            error=exchange.error_code,
            ms=exchange.elapsed_ms(),
        )

    # --- handlers that need no replica -----------------------------------------------------------

    async def _list_models(self, exchange: HttpExchange, principal: Principal) -> None:
        if VERSION_HEADER in exchange.headers:
            await self.dialects.anthropic.list_models(exchange, principal)
            return
        await exchange.send_response(200, _encode(self._models.list_models(principal)))

    async def _get_model(self, exchange: HttpExchange, principal: Principal) -> None:
        name = exchange.path.removeprefix(MODELS_PREFIX)
        if VERSION_HEADER in exchange.headers:
            await self.dialects.anthropic.get_model(exchange, principal, name)
            return
        await exchange.send_response(200, _encode(self._models.get_model(name, principal)))

    async def _forward_to_admin(self, exchange: HttpExchange, principal: Principal) -> None:
        del principal  # the admin API authenticates by itself
        await exchange.delegate_to(self._admin)

    async def _openapi(self, exchange: HttpExchange, principal: Principal) -> None:
        del principal  # the document is the same for all
        await exchange.send_response(200, self._render_openapi())

    async def _health(self, exchange: HttpExchange, principal: Principal) -> None:
        del principal
        await exchange.send_response(200, _encode(StatusResponse(status="ok")))

    async def _version(self, exchange: HttpExchange, principal: Principal) -> None:
        del principal
        await exchange.send_response(200, _encode(VersionResponse(version=version("argosy"))))
