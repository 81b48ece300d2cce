"""The gateway's ASGI application: every request gets exactly one answer, and no exception leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog

from argosy.gateway.config import GatewayConfig
from argosy.gateway.replicas import Pool
from argosy.gateway.serving import Serving
from argosy.protocol import ApiError, ModelCard, ModelList, Status
from argosy.telemetry import request_context
from argosy.web import DisconnectedError, Exchange, Receive, Scope, Send, SlowReaderError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

Handler = Callable[[Exchange], Awaitable[None]]
MODELS = "/v1/models/"
_encode = msgspec.json.Encoder().encode


class Front:
    """Routes requests to their handlers and answers what they raise."""

    def __init__(self, pools: Mapping[str, Pool], serving: Serving, config: GatewayConfig) -> None:
        self._pools = pools
        self._config = config
        self._created = int(time.time())
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", serving.chat),
            "/v1/completions": ("POST", serving.completion),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
        }
        self.in_flight = 0
        self.idle = asyncio.Event()
        """Set while no request is being answered."""
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        exchange = Exchange(scope, receive, send, self._config)
        self.in_flight += 1
        self.idle.clear()
        with request_context(exchange.request_id, exchange.header(b"traceparent")):
            try:
                await self._answer(exchange)
            finally:
                self.in_flight -= 1
                if not self.in_flight:
                    self.idle.set()
                log.info(
                    "request",
                    method=exchange.method,
                    path=exchange.path[:200],
                    status=exchange.status or 499,
                    error=exchange.failure,
                    ms=exchange.age_ms(),
                )

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)(exchange)
        except ApiError as error:
            exchange.failure = error.code
            await self._refuse(exchange, error)
        except DisconnectedError:
            exchange.failure = "client_closed_request"
        except SlowReaderError:
            exchange.failure = "slow_reader"
        except Exception:
            log.exception("request_failed", path=exchange.path)
            exchange.failure = "internal_error"
            message = "An internal error. Report it with the request id."
            await self._refuse(exchange, ApiError(500, "internal_error", message))

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        """Answer with `error`; when the answer has begun already, cutting it off is all there is."""
        if exchange.status is not None:
            if not exchange.complete:
                await exchange.drop()
            return
        try:
            await exchange.refuse(error)
        except SlowReaderError:
            exchange.failure = "slow_reader"

    def _handler(self, exchange: Exchange) -> Handler:
        path = exchange.path
        if path.startswith(MODELS) and len(path) > len(MODELS):
            return self._model
        found = self._routes.get(path)
        if found is None:
            raise ApiError(404, "not_found", f"There is nothing at {path[:200]!r}.")
        method, handler = found
        if exchange.method not in {method, "HEAD" if method == "GET" else method}:
            message = f"{path} takes {method}, not {exchange.method[:20]}. Use {method}."
            raise ApiError(405, "method_not_allowed", message)
        return handler

    async def _models(self, exchange: Exchange) -> None:
        cards = [self._card(name) for name in self._pools]
        listed = ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)
        await exchange.answer(200, _encode(listed))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(MODELS)
        if name not in self._pools:
            message = f"The model {name[:200]!r} is not served here. See /v1/models."
            raise ApiError(404, "model_not_found", message, param="model")
        await exchange.answer(200, _encode(self._card(name)))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name, created=self._created, root=self._pools[name].model, max_model_len=0
        )

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, _encode(Status(status="ok")))

    async def _ready(self, exchange: Exchange) -> None:
        await exchange.answer(200, _encode(Status(status="ready")))
