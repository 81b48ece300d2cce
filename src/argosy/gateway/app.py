"""The gateway's ASGI application: every request gets exactly one answer, and no exception leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
import structlog

from argosy.gateway.config import GatewayConfig
from argosy.gateway.cors import Origins
from argosy.gateway.filters import Limits
from argosy.gateway.model_registry import Models
from argosy.gateway.operations import Operating
from argosy.gateway.principal import ANYONE, Caller
from argosy.gateway.proxy import Serving
from argosy.gateway.utility_handlers import METRICS, REPLICAS, Passing
from argosy.http_server import (
    App,
    Exchange,
    Receive,
    Scope,
    Send,
    answered,
    check_method,
    nothing_at,
)
from argosy.protocol import Status, Version
from argosy.telemetry import GatewayMetrics, name_request

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

Handler = Callable[[Exchange, Caller], Awaitable[None]]
MODELS = "/v1/models/"
ADMIN = "/admin/"
ANY = ""
_QUIET = frozenset({"/health", "/ready", "/metrics", "/replicas/{name}/metrics"})
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Route:
    """A path, or what paths have in common."""

    name: str
    """For metrics."""
    method: str
    """`ANY`: the handler knows."""
    handler: Handler
    open: bool = False
    """Everybody may ask; else the caller is identified, before anything else is read."""


class Front:
    """Routes requests to their handlers and answers what they raise."""

    def __init__(
        self,
        models: Models,
        serving: Serving,
        operating: Operating,
        *,
        identify: Callable[[Exchange], Caller],
        admin: App,
        origins: Origins,
        metrics: GatewayMetrics,
        config: GatewayConfig,
        limits: Limits | None = None,
    ) -> None:
        self._models = models
        self._identify = identify
        self._admin = admin
        self._origins = origins
        self._metrics = metrics
        self._log = log.bind()
        self._config = config
        passing = Passing(models, limits)
        routes = (
            Route("/v1/chat/completions", "POST", serving.chat),
            Route("/v1/completions", "POST", serving.completion),
            Route("/v1/models", "GET", self._list),
            Route("/tokenize", "POST", passing.text),
            Route("/detokenize", "POST", passing.text),
            Route("/metrics", "GET", operating.metrics),
            Route("/openapi.json", "GET", passing.document),
            Route("/health", "GET", self._health, open=True),
            Route("/ready", "GET", operating.ready, open=True),
            Route("/version", "GET", self._version, open=True),
        )
        self._routes = {route.name: route for route in routes}
        self._admin_route = Route(ADMIN, ANY, self._administer, open=True)
        self._replica_route = Route(REPLICAS + "{name}" + METRICS, "GET", passing.metrics)
        self._card_route = Route(MODELS + "{model}", "GET", self._card)
        self.in_flight = 0
        """Requests that are being answered."""
        self._ended: asyncio.Event | None = None
        """Somebody waits until none is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        exchange = Exchange(scope, receive, send, self._config)
        route = self._find(exchange.path)
        self.in_flight += 1
        name_request(exchange.request_id, exchange.header(b"traceparent"))
        try:
            await answered(exchange, self._handle(exchange, route))
        finally:
            self.in_flight -= 1
            if self._ended is not None:
                self._ended.set()
            self._note(exchange, "other" if route is None else route.name)

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        self._ended = self._ended or asyncio.Event()
        while self.in_flight:
            self._ended.clear()
            await self._ended.wait()

    def _find(self, path: str) -> Route | None:
        found = self._routes.get(path)
        if found is None and path.startswith(ADMIN):
            return self._admin_route
        if found is None and path.startswith(MODELS) and len(path) > len(MODELS):
            return self._card_route
        if found is None and path.startswith(REPLICAS) and path.endswith(METRICS):
            return self._replica_route
        return found

    def _known(self, path: str) -> bool:
        return self._find(path) is not None

    async def _handle(self, exchange: Exchange, route: Route | None) -> None:
        """Let in whoever asks, and answer them. Raises ApiError when nobody is there to, or not for them."""
        page = b"origin" in exchange.headers and route is not self._admin_route
        if page and self._origins.admit(exchange):
            await exchange.answer(200, b"", b"text/plain")
            return
        if route is None:
            raise nothing_at(exchange.path, self._known)
        caller = ANYONE if route.open else self._identify(exchange)
        if route.method != ANY:
            check_method(exchange, (route.method,))
        await route.handler(exchange, caller)

    def _note(self, exchange: Exchange, route: str) -> None:
        status = exchange.status or 499
        self._metrics.answered(route, status)
        write = self._log.debug if route in _QUIET else self._log.info
        write(
            "request",
            method=exchange.method,
            path=exchange.path[:200],
            status=status,
            error=exchange.failure,
            ms=exchange.age_ms(),
        )

    # --- what needs no replica -------------------------------------------------------------------

    async def _list(self, exchange: Exchange, caller: Caller) -> None:
        await exchange.answer(200, _encode(self._models.cards(caller)))

    async def _card(self, exchange: Exchange, caller: Caller) -> None:
        name = exchange.path.removeprefix(MODELS)
        await exchange.answer(200, _encode(self._models.card(name, caller)))

    async def _administer(self, exchange: Exchange, caller: Caller) -> None:
        del caller  # the admin API asks itself
        await exchange.hand_to(self._admin)

    async def _health(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        await exchange.answer(200, _encode(Status(status="ok")))

    async def _version(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        await exchange.answer(200, _encode(Version(version=version("argosy"))))
