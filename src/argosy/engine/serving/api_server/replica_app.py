"""The replica's endpoints: finds the handler, and turns whatever goes wrong into one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
import structlog

from argosy.engine.serving.api_server import replica_openapi
from argosy.engine.serving.api_server.generation_handlers import Answering
from argosy.engine.serving.api_server.kv_events_handler import KvEvents
from argosy.engine.serving.api_server.replica_state import Replica, Service
from argosy.http_server import Exchange, Receive, Scope, Send, answered, check_method, nothing_at
from argosy.protocol import (
    ApiError,
    DetokenizeRequest,
    DrainRequest,
    ModelCard,
    ModelList,
    Status,
    Text,
    TokenizeRequest,
    Tokens,
    Version,
    parse,
)
from argosy.telemetry import CONTENT_TYPE as METRICS_TYPE
from argosy.telemetry import Scrape, name_request

Handler = Callable[[Exchange], Awaitable[None]]

MODELS = "/v1/models/"
_QUIET = frozenset({"/health", "/ready", "/load", "/kv_events", "/metrics"})

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Route:
    """A path, or what paths have in common."""

    template: str
    method: str
    handler: Handler


class App:
    """The ASGI application. Every request gets exactly one answer, and no exception leaves."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._scrape = Scrape(self._exposition)
        answering = Answering(replica)
        get = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/load": self._load,
            "/kv_events": KvEvents(replica).follow,
            "/version": self._version,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        post = {
            "/v1/chat/completions": answering.chat,
            "/v1/completions": answering.completion,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/drain": self._drain,
        }
        self._routes = {path: Route(path, "GET", handler) for path, handler in get.items()}
        self._routes |= {path: Route(path, "POST", handler) for path, handler in post.items()}
        self._model_route = Route(MODELS + "{model}", "GET", self._model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        exchange = Exchange(scope, receive, send, self._replica.config)
        self._replica.request_begins()
        name_request(exchange.request_id, exchange.header(b"traceparent"))
        route = self._find(exchange.path)
        try:
            await answered(exchange, self._handle(exchange, route))
        finally:
            self._replica.request_ends()
            self._note(exchange, route)

    def _find(self, path: str) -> Route | None:
        if path.startswith(MODELS) and len(path) > len(MODELS):
            return self._model_route
        return self._routes.get(path)

    def _known(self, path: str) -> bool:
        return self._find(path) is not None

    async def _handle(self, exchange: Exchange, route: Route | None) -> None:
        if route is None:
            raise nothing_at(exchange.path, self._known)
        check_method(exchange, (route.method,))
        await route.handler(exchange)

    def _note(self, exchange: Exchange, route: Route | None) -> None:
        template = route.template if route else "other"
        status = exchange.status or 499
        self._replica.metrics.answered(template, status)
        write = log.debug if template in _QUIET else log.info
        write(
            "request",
            method=exchange.method,
            route=template,
            status=status,
            error=exchange.failure,
            ms=exchange.age_ms(),
        )

    # --- the model -------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        service = self._replica.loaded()
        names = self._replica.names
        cards = [self._card(name, service) for name in names]
        listed = ModelList(data=cards, first_id=names[0], last_id=names[-1])
        await exchange.answer(200, _encode(listed))

    async def _model(self, exchange: Exchange) -> None:
        service = self._replica.loaded()
        name = exchange.path.removeprefix(MODELS)
        self._replica.check_model(name)
        await exchange.answer(200, _encode(self._card(name, service)))

    def _card(self, name: str, service: Service) -> ModelCard:
        return ModelCard(
            id=name,
            created=service.created,
            root=self._replica.names[0],
            max_model_len=service.ready.max_model_len,
        )

    async def _tokenize(self, exchange: Exchange) -> None:
        service = self._replica.loaded()
        raw = await exchange.body()

        def work() -> Tokens:
            body = parse(TokenizeRequest, raw)
            if body.model is not None:
                self._replica.check_model(body.model)
            ids = service.door.tokenize(body)
            strs = list(map(service.tokenizer.token_text, ids)) if body.return_token_strs else None
            return Tokens(
                count=len(ids),
                max_model_len=service.ready.max_model_len,
                tokens=ids,
                token_strs=strs,
            )

        await exchange.answer(200, _encode(await asyncio.to_thread(work)))

    async def _detokenize(self, exchange: Exchange) -> None:
        service = self._replica.loaded()
        raw = await exchange.body()

        def work() -> Text:
            body = parse(DetokenizeRequest, raw)
            if body.model is not None:
                self._replica.check_model(body.model)
            return Text(prompt=service.door.detokenize(body))

        await exchange.answer(200, _encode(await asyncio.to_thread(work)))

    # --- for operators ---------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        if self._replica.engine.state == "failed":
            raise self._replica.unavailable()
        await exchange.answer(200, _encode(Status(status="ok")))

    async def _ready(self, exchange: Exchange) -> None:
        self._replica.service()
        await exchange.answer(200, _encode(Status(status="ready")))

    async def _load(self, exchange: Exchange) -> None:
        await exchange.answer(
            200, _encode(self._replica.load(exchange.header(b"x-argosy-gateway")))
        )

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer(200, _encode(Version(version=version("argosy"))))

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, replica_openapi.document())

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, await self._scrape.text(), METRICS_TYPE)

    async def _exposition(self) -> bytes:
        replica = self._replica
        replica.metrics.refresh(replica.engine.stats, ready=replica.state == "ready")
        shown = await asyncio.to_thread(replica.metrics.exposition)
        if replica.config.vllm_metrics:
            shown += await asyncio.to_thread(replica.metrics.vllm_exposition)
        return shown

    async def _drain(self, exchange: Exchange) -> None:
        if b"origin" in exchange.headers:  # browsers let any page send this to their own machine
            raise ApiError(403, "origin_not_allowed", "Web pages may not drain a replica.")
        raw = await exchange.body()
        body = parse(DrainRequest, raw) if raw.strip() else DrainRequest()
        self._replica.drain(body.deadline_s)
        await exchange.answer(200, _encode(Status(status="draining")))
