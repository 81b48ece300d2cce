"""Error responses for exceptions of request handlers, unknown paths and methods, and input that is not HTTP/1."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from http import HTTPStatus

import structlog

from argosy.http_server.http_exchange import HttpExchange, SlowReaderError
from argosy.http_server.response_transport import DisconnectedError
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")
_PROXY_PROTOCOL_HINT = (
    "The PROXY protocol is not supported. Turn it off, and let the proxy add X-Forwarded-For."
)
_PROTOCOL_HINTS = (
    (b"PROXY ", _PROXY_PROTOCOL_HINT),
    (b"\r\n\r\n\0\r\nQUIT\n", _PROXY_PROTOCOL_HINT),
    (
        b"PRI * HTTP/2.0",
        "HTTP/2 is not supported. Configure the client or the proxy to use HTTP/1.1.",
    ),
    (b"\x16\x03", "TLS is not enabled. Use http://, or start the server with a certificate."),
)
"""First bytes of other protocols, with the error message for each."""


async def run_handler(exchange: HttpExchange, handler: Awaitable[None]) -> None:
    """Run the handler and answer its exceptions with an error response.

    `exchange.error_code` gets the error's code. No exception propagates, except cancellation.
    """
    try:
        await handler
    except ApiError as error:
        await _send_error(exchange, error)
    except DisconnectedError:
        exchange.error_code = "client_closed_request"
    except SlowReaderError:
        exchange.error_code = "slow_reader"
    except Exception:
        log.exception("request_failed", path=exchange.path[:200])
        await _send_error(exchange, internal_error())


def internal_error() -> ApiError:
    """Build the error for an unexpected exception."""
    message = "An internal error occurred. Report it with the request id."
    return ApiError(500, "internal_error", message)


async def _send_error(exchange: HttpExchange, error: ApiError) -> None:
    """Answer with `error`, or abort the connection if the response has already started."""
    exchange.error_code = error.code
    if exchange.status is not None:
        if not exchange.response_complete:
            await exchange.abort_and_yield()
        return
    try:
        await exchange.send_error(error)
    except SlowReaderError:
        exchange.error_code = "slow_reader"


def check_method(exchange: HttpExchange, methods: Collection[str]) -> str:
    """Return the request's method, with HEAD mapped to GET.

    Raises:
        ApiError: 405 if the method is not one of `methods`. The response's Allow header lists them.
    """
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in methods:
        exchange.extra_headers.append((b"allow", ", ".join(methods).encode()))
        message = (
            f"{exchange.path[:200]} supports {' or '.join(methods)}, not {exchange.method[:20]}."
        )
        raise ApiError(405, "method_not_allowed", message)
    return method


def bad_protocol_error(data: bytes, reason: str = "") -> ApiError:
    """Build the error for input that is not HTTP/1. The message names the protocol where its first bytes are known.

    Args:
        data: The input.
        reason: Reason why the head of the request is invalid, if it is known.
    """
    hint = next((hint for prefix, hint in _PROTOCOL_HINTS if data.startswith(prefix)), None)
    detail = f": {reason}" if reason else ""
    return ApiError(400, "bad_http", hint or f"The request is not valid HTTP/1{detail}.")


def render_error_response(error: ApiError) -> bytes:
    """Return the bytes of an error response after which the connection closes."""
    body = error.encode_body("")
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
