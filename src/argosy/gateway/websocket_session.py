"""Session of a WebSocket, each of whose messages is a request of its own and is answered in turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from argosy.gateway.filters import IDEMPOTENCY_KEY_HEADER
from argosy.http_server import HttpExchange, MessageTransport

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
    await websocket.close(reason="the server ends this connection; open another one")
