"""Dialects of the API besides OpenAI's chat: errors and headers of each, and how a request in one is run as a chat."""

from __future__ import annotations

import re
import time

import msgspec

from argosy.http_server import HttpExchange, ResponseDialect
from argosy.protocol import IGNORED_FIELDS_HEADER, format_names
from argosy.protocol.dialects import (
    BodyTranslator,
    DialectOutput,
    DialectTranslator,
    EndListener,
    ErrorEncoder,
    OutputIdentity,
    RenderedRequest,
    TranslatedRequest,
    encode_anthropic_error,
    encode_ollama_error,
    encode_responses_error,
    format_timestamp,
)

Headers = list[tuple[bytes, bytes]]
_RATE_LIMIT_HEADER = re.compile(rb"x-ratelimit-(limit|remaining|reset)-(requests|tokens)")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")


def _translate_anthropic_headers(headers: Headers) -> Headers:
    """Add the request id and the rate limits under Anthropic's names. Times of resets are absolute there."""
    added: Headers = []
    for name, value in headers:
        if name == b"x-request-id":
            added.append((b"request-id", value))
        elif match := _RATE_LIMIT_HEADER.fullmatch(name):
            field, unit = match[1], match[2]
            if field == b"reset":
                reset_at = time.time() + _parse_duration_s(value.decode())
                value = format_timestamp(int(reset_at)).encode()  # noqa: PLW2901 - the same value in another format
            added.append((b"anthropic-ratelimit-%s-%s" % (unit, field), value))
    return headers + added


def _parse_duration_s(text: str) -> float:
    """Parse a duration such as `1m30s` or `60ms`."""
    match = _DURATION.fullmatch(text)
    hours, minutes, seconds, milliseconds = match.groups() if match else ("0",) * 4
    total = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds or 0)
    return total + int(milliseconds or 0) / 1000


def _keep_headers(headers: Headers) -> Headers:
    return headers


ANTHROPIC = ResponseDialect(encode_anthropic_error, _translate_anthropic_headers)
OLLAMA = ResponseDialect(encode_ollama_error, _keep_headers)
RESPONSES = ResponseDialect(encode_responses_error, _keep_headers)


def start_translation(
    exchange: HttpExchange,
    request: TranslatedRequest[DialectOutput],
    encode_error: ErrorEncoder | None = None,
    on_end: EndListener | None = None,
    identity: OutputIdentity | None = None,
) -> int:
    """Replace a request by its chat, and translate the response to it. Returns the size of the chat in bytes.

    Args:
        exchange: The client's request.
        request: The chat and the builder of the response.
        encode_error: Encodes errors; None for the shape of OpenAI's errors.
        on_end: Called when the response has ended, before the client receives its end.
        identity: Identity of the response; None to create it.
    """
    name_ignored_fields(exchange, request.ignored)
    identity = identity or create_identity(exchange, request.body.get("model") or "")
    translator = DialectTranslator(request.output, identity, encode_error, on_end)
    body = msgspec.json.encode(request.body)
    exchange.translate(body, translator)
    return len(body)


def start_rendering(
    exchange: HttpExchange, request: RenderedRequest, encode_error: ErrorEncoder | None = None
) -> None:
    """Replace a request by its internal form, and render the response to it."""
    name_ignored_fields(exchange, request.ignored)
    translator = BodyTranslator(request.render, encode_error)
    exchange.translate(msgspec.json.encode(request.body), translator)


def create_identity(exchange: HttpExchange, model: str) -> OutputIdentity:
    """Return the identity of the response to a request, created now."""
    return OutputIdentity(id=exchange.unique_id, created=int(time.time()), model=model)


def name_ignored_fields(exchange: HttpExchange, ignored: tuple[str, ...]) -> None:
    """Name the fields of the request without effect in a header of the response."""
    if ignored:
        exchange.extra_headers.append((IGNORED_FIELDS_HEADER, format_names(ignored)))
