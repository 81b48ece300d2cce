"""Request of a client, as its connection hands it to the server's handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from argosy.http_server.response_transport import ResponseTransport
from argosy.http_server.websocket import WebSocketOpener

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class HttpRequest:
    """Request whose head has arrived. Its body arrives over the transport, which also takes the response."""

    method: str
    path: str
    """Path with its escapes decoded."""
    query: bytes
    """Query string, without the `?`."""
    headers: Headers
    """Headers in the order of their arrival, with names in lower case."""
    peer_address: str
    """Address of the client; "unix" over a Unix socket, and empty if it has disconnected already."""
    transport: ResponseTransport
    open_websocket: WebSocketOpener | None = None
    """Accepts the handshake of a WebSocket. None if the client asks for none."""


RequestHandler = Callable[[HttpRequest], Awaitable[None]]
"""Answers a request over its transport."""
