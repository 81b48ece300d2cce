"""Response to one message of a WebSocket: each server-sent event and each whole response becomes a message."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from argosy.http_server.response_transport import ClientListener, ResponseTransport
from argosy.http_server.websocket import WebSocket
from argosy.protocol import EventParser

_BODY_HEADERS = frozenset({b"content-type", b"content-length"})


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any]


class MessageTransport(ResponseTransport):
    """Transport of a request whose body is a message.

    An error response becomes an event of the type `error` with its status, error and headers, as in OpenAI's Responses
    API. The SDK expects the headers inside the error, and Codex beside it.
    """

    def __init__(self, websocket: WebSocket, message: bytes) -> None:
        self._websocket = websocket
        self._client = websocket.transport
        self._message = message
        self._events = EventParser()
        self._pieces: list[bytes] | None = None
        """Parts of a whole response so far."""

    @property
    def is_backpressured(self) -> bool:
        return self._client.is_backpressured

    @property
    def unsent_bytes(self) -> int:
        return self._client.unsent_bytes

    @property
    def is_disconnected(self) -> bool:
        return self._client.is_disconnected

    async def read_body(self, max_bytes: int, tenant: str | None = None) -> bytes:  # noqa: ARG002 - the WebSocket limits its messages
        return self._message

    async def wait_writable(self) -> None:
        await self._client.wait_writable()

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._websocket.send(
            body if status == HTTPStatus.OK else _render_error(status, headers, body)
        )

    def start_sized_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:  # noqa: ARG002 - a message has no headers
        self._pieces = []

    def write_nowait(self, data: bytes) -> None:
        if self._pieces is not None:
            self._pieces.append(data)
            return
        for event in self._events.feed(
            data
        ):  # without comments, since pings keep the connection alive
            self._websocket.send(event)

    def end_response(self) -> None:
        if self._pieces is not None:
            self._websocket.send(b"".join(self._pieces))

    def abort(self) -> None:
        self._client.abort()

    def set_listener(self, listener: ClientListener | None) -> None:
        self._client.set_listener(listener)


def _render_error(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    named = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name not in _BODY_HEADERS
    }
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:  # the body of another server, whose errors have another shape
        error = {"message": f"The request failed with status {status}.", "type": "server_error"}
    return msgspec.json.encode(
        {"type": "error", "status": status, "error": {**error, "headers": named}, "headers": named}
    )
