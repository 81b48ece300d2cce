"""Encodings of answers: pages as objects or as columns, compressed for clients that accept it."""

from __future__ import annotations

import gzip
from typing import Any, get_origin

import msgspec

from argosy.gateway.admin.schemas import Page
from argosy.http_server import HttpExchange
from argosy.process import run_in_daemon_thread
from argosy.protocol import JSON_MEDIA_TYPE

COLUMNS_MEDIA_TYPE = "application/vnd.argosy.columns+json"
"""Media type by which a client asks for a page as columns, which name each field once."""
COLUMNS_SCHEMA = {
    "type": "object",
    "description": "The page with the fields of its records as lists, each with one value for each record.",
    "properties": {
        "columns": {"type": "object", "additionalProperties": {"type": "array"}},
        "has_more": {"type": "boolean"},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
    },
    "required": ["columns", "has_more", "first_id", "last_id"],
}
MIN_COMPRESSED_BYTES = 1024
MAX_BYTES_ON_LOOP = 16_384
"""Larger answers are compressed in a thread, which takes a millisecond for each 50 kB."""
COMPRESSION_LEVEL = 1

_encode = msgspec.json.Encoder().encode


def is_page(response_type: Any) -> bool:  # noqa: ANN401 - any type that msgspec knows
    """Return whether an endpoint with this response type also answers with columns."""
    return get_origin(response_type) is Page


async def send_answer(exchange: HttpExchange, answer: Any) -> None:  # noqa: ANN401 - the endpoint's response type
    """Send an endpoint's answer in the encoding that the client accepts."""
    media_type = JSON_MEDIA_TYPE
    accepted = exchange.headers.get(b"accept", b"")
    if isinstance(answer, Page) and COLUMNS_MEDIA_TYPE.encode() in accepted:
        media_type = COLUMNS_MEDIA_TYPE
        answer = _to_columns(answer)
    body = answer if isinstance(answer, bytes) else _encode(answer)
    can_compress = b"gzip" in exchange.headers.get(b"accept-encoding", b"")
    # Answers to changes stay as they are: a new key must not be compressed with text that its name repeats.
    if exchange.method == "GET" and can_compress and len(body) >= MIN_COMPRESSED_BYTES:
        exchange.extra_headers.append((b"content-encoding", b"gzip"))
        if len(body) > MAX_BYTES_ON_LOOP:
            body = await run_in_daemon_thread(_compress, body)
        else:
            body = _compress(body)
    exchange.extra_headers.append((b"vary", b"accept, accept-encoding"))
    await exchange.send_response(200, body, media_type.encode())


def _compress(body: bytes) -> bytes:
    return gzip.compress(body, COMPRESSION_LEVEL, mtime=0)


def _to_columns(page: Page[Any]) -> dict[str, Any]:
    names = page.data[0].__struct_fields__ if page.data else ()
    columns = {name: [getattr(record, name) for record in page.data] for name in names}
    return {
        "columns": columns,
        "has_more": page.has_more,
        "first_id": page.first_id,
        "last_id": page.last_id,
    }
