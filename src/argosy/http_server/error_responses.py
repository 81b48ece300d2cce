"""What handlers raise, as answers: one for every request, whatever goes wrong."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection

import structlog

from argosy.http_server.http_exchange import DisconnectedError, HttpExchange, SlowReaderError
from argosy.protocol import ApiError

API_PREFIX = "/v1"
CHAT_COMPLETIONS_PATH = f"{API_PREFIX}/chat/completions"
_UNSUPPORTED_API_PATHS = re.compile(rf"{API_PREFIX}/(responses|messages)(/|$)")
"""Paths of chats in the Responses API of OpenAI and in Anthropic's, which some clients speak unless told otherwise."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")
_PROXY_PROTOCOL_HINT = (
    "The PROXY protocol is not spoken here. Turn it off, and have the proxy add X-Forwarded-For."
)
_PROTOCOL_HINTS = (
    (b"PROXY ", _PROXY_PROTOCOL_HINT),
    (b"\r\n\r\n\0\r\nQUIT\n", _PROXY_PROTOCOL_HINT),
    (
        b"PRI * HTTP/2.0",
        "HTTP/2 is not spoken here. Have the client, or the proxy, speak HTTP/1.1.",
    ),
    (b"\x16\x03", "TLS is not spoken here. Ask http://, or start the server with a certificate."),
)
"""What connections may begin with that are meant for another protocol, and what to change then."""


async def run_handler(exchange: HttpExchange, handler: Awaitable[None]) -> None:
    """Let the request be handled. What that raises is its answer, and `exchange.failure`; no error leaves here."""
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
        message = "An internal error. Report it with the request id."
        await _send_error(exchange, ApiError(500, "internal_error", message))


async def _send_error(exchange: HttpExchange, error: ApiError) -> None:
    """Answer with `error`; when the answer has begun already, cutting it off is all there is."""
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
    """The method, one of `methods`; HEAD is GET without a body. Raises ApiError 405, and the answer names them all."""
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in methods:
        exchange.extra_headers.append((b"allow", ", ".join(methods).encode()))
        message = f"{exchange.path[:200]} takes {' or '.join(methods)}, not {exchange.method[:20]}."
        raise ApiError(405, "method_not_allowed", message)
    return method


def not_found(path: str, is_known_path: Callable[[str], bool]) -> ApiError:
    """404 for a path that is not `known`; it tells what is known that a client with such a path may have meant."""
    meant = API_PREFIX + path.rpartition(API_PREFIX)[2]
    if is_known_path(meant):
        remedy = f", but at {meant[:200]!r}: a client's base URL ends with {API_PREFIX}, once"
    elif is_known_path(path.rstrip("/")):
        remedy = f", but at {path.rstrip('/')[:200]!r}: without a slash at its end"
    elif _UNSUPPORTED_API_PATHS.match(meant) and is_known_path(CHAT_COMPLETIONS_PATH):
        remedy = f". Have the client speak chat completions, which are at {CHAT_COMPLETIONS_PATH!r}"
    else:
        remedy = ", see /openapi.json for what there is"
    return ApiError(404, "not_found", f"There is nothing at {path[:200]!r}{remedy}.")


def bad_protocol(data: bytes) -> ApiError:
    """The refusal of bytes that are no request; it tells whose they are, where they begin as another protocol does."""
    why = next((why for start, why in _PROTOCOL_HINTS if data.startswith(start)), None)
    return ApiError(400, "bad_http", why or "Invalid HTTP request received.")


def render_bad_request(error: ApiError) -> bytes:
    """The bytes of an answer to what is no request, with which the connection ends."""
    body = error.encode_body("")
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
