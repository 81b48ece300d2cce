"""Requests of the gateway itself to a model, on behalf of a client's request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec

from argosy.deployment import GatewayConfig
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import ApiShape, RequestContext
from argosy.http_server import (
    ClientListener,
    HttpExchange,
    HttpRequest,
    ResponseTransport,
    run_handler,
)
from argosy.protocol import ApiError

RequestHandler = Callable[[HttpExchange, Principal, ApiShape, bytes], Awaitable[None]]


class ResponseReceiver(ResponseTransport):
    """Transport of a request of the gateway itself, which keeps a response in one piece.

    Args:
        request_body: Body of the request, unless the exchange has it.
    """

    __slots__ = ("_is_disconnected", "_listener", "_request_body", "body", "status")

    def __init__(self, request_body: bytes = b"") -> None:
        self.status, self.body = 0, b""
        self._request_body = request_body
        self._listener: ClientListener | None = None
        self._is_disconnected = False

    @property
    def is_disconnected(self) -> bool:
        return self._is_disconnected

    async def read_body(self, max_bytes: int, tenant: str | None = None) -> bytes:  # noqa: ARG002 - not needed
        return self._request_body

    def start_sized_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:  # noqa: ARG002 - not needed
        self.status = status

    def write_nowait(self, data: bytes) -> None:
        self.body += data

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:  # noqa: ARG002 - not needed
        self.status, self.body = status, body

    def set_listener(self, listener: ClientListener | None) -> None:
        self._listener = listener

    def disconnect(self) -> None:
        """End the request, as a client that disconnects."""
        self._is_disconnected = True
        if self._listener is not None:
            self._listener.on_disconnect()


class ModelCaller:
    """Sends requests to models through the filters, queues and pools that requests of clients pass.

    They are limited, billed and explained as requests of the client's project. The models that its key may use do not
    matter, since the operator's settings name the model.
    """

    def __init__(self, handle: RequestHandler) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(
        self, context: RequestContext, api: ApiShape, body: bytes, timeout_s: float
    ) -> bytes:
        """Return the body of a model's response.

        Args:
            context: The client's request.
            api: API of the request.
            body: Body of the request, whose response is not streamed.
            timeout_s: How long to wait for it.

        Raises:
            ApiError: The request was refused, or failed.
            TimeoutError: The response took too long.
        """
        receiver = ResponseReceiver()
        headers = tuple(context.exchange.headers)
        exchange = context.exchange.detach(
            receiver, method="POST", path=api.path.decode(), dropped_headers=headers
        )
        principal = msgspec.structs.replace(context.principal, allowed_models=None)
        await self._run(exchange, receiver, principal, api, body, timeout_s)
        if receiver.status != HTTPStatus.OK:
            status, code = receiver.status or 502, exchange.error_code or "upstream_failed"
            raise ApiError(status, code, "A request of the gateway itself has failed.")
        return receiver.body

    async def call_alone(
        self,
        principal: Principal,
        limits: GatewayConfig,
        api: ApiShape,
        body: bytes,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """Return status and body of a model's response to a request that no client's request has caused.

        Args:
            principal: Whose limits and bill count.
            limits: Limits on the request.
            api: API of the request.
            body: Body of the request, whose response is not streamed.
            timeout_s: How long to wait for it.

        Raises:
            TimeoutError: The response took too long.
        """
        receiver = ResponseReceiver()
        request = HttpRequest("POST", api.path.decode(), b"", [], "", receiver)
        exchange = HttpExchange(request, limits)
        await self._run(exchange, receiver, principal, api, body, timeout_s)
        return receiver.status, receiver.body

    async def _run(
        self,
        exchange: HttpExchange,
        receiver: ResponseReceiver,
        principal: Principal,
        api: ApiShape,
        body: bytes,
        timeout_s: float,
    ) -> None:
        """Handle a request, whose response the receiver gets. Raises TimeoutError."""
        handled = self._handle(exchange, principal, api, body)
        task = asyncio.create_task(run_handler(exchange, handled))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                receiver.disconnect()
        if not task.done():
            raise TimeoutError
