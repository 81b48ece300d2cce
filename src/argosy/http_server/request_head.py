"""Request head parsing under a size limit, conversion to an ASGI scope, and templates for repeated heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import httptools

from argosy.http_server.response_transport import Scope

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the request line and headers together, in bytes."""
HEADER_OVERHEAD_BYTES = 32
"""Size counted per header in addition to its name and value (as in RFC 9113, section 6.5.2). Tens of thousands of empty
headers would otherwise take megabytes and tens of milliseconds."""
MAX_LENGTH_DIGITS = 9
"""Maximum number of digits of the content length of a request that matches a template."""
_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_UNTEMPLATED_HEADERS = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that change how the rest of the request is read, so that a request with one gets no template."""


class InvalidHeadError(ValueError):
    """A request's head is invalid or too large. The message is safe to send to the client."""


class RequestHead:
    """Head of the request being parsed, reused for each request of a connection.

    Raises:
        InvalidHeadError: The head is invalid or too large.
    """

    __slots__ = (
        "_headers",
        "_host_count",
        "_is_chunked",
        "_size_bytes",
        "_url",
        "expects_continue",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear the head for the next request."""
        self.expects_continue = False
        """Whether the client waits for a 100 response before sending the body."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._host_count = 0
        self._is_chunked = False
        self._size_bytes = 0

    def add_url(self, url: bytes) -> None:
        """Append a part of the URL."""
        self._url += url
        self._size_bytes += len(url)
        if self._size_bytes > MAX_HEAD_BYTES:
            raise _head_too_large_error()

    def add_header(self, name: bytes, value: bytes) -> None:
        """Append a header."""
        self._size_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._size_bytes > MAX_HEAD_BYTES:
            raise _head_too_large_error()
        name = name.lower()
        if name == b"host":
            self._host_count += 1
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            self._add_transfer_encoding(value)
        self._headers.append((name, value))

    def _add_transfer_encoding(self, value: bytes) -> None:
        """Accept `chunked` once, and no other encoding.

        The parser would accept `gzip, chunked` and pass the compressed bytes on. A proxy that reads the encodings
        differently would see another end of the request (request smuggling).
        """
        if self._is_chunked or value.strip().lower() != b"chunked":
            raise InvalidHeadError("the only supported Transfer-Encoding is a single 'chunked'")
        self._is_chunked = True

    def build_scope(
        self, parser: httptools.HttpRequestParser, connection_scope: Mapping[str, Any]
    ) -> Scope:
        """Build the ASGI scope of the request.

        Args:
            parser: Parser that holds the method and the HTTP version.
            connection_scope: Scope entries of the connection: `server`, `client` and `scheme`.
        """
        version = parser.get_http_version()
        if self._host_count != 1 and (self._host_count or version == "1.1"):
            # RFC 9112, section 3.2
            raise InvalidHeadError("a request needs exactly one Host header")
        if self._is_chunked and version == "1.0":  # RFC 9112, section 6.1
            raise InvalidHeadError("HTTP/1.0 has no Transfer-Encoding")
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            **connection_scope,
        }

    def is_websocket_handshake(self, parser: httptools.HttpRequestParser) -> bool:
        """Return whether the request asks for a WebSocket, and has no body that would follow."""
        headers = dict(self._headers)
        return (
            parser.get_method() == b"GET"
            and parser.get_http_version() == "1.1"
            and headers.get(b"upgrade", b"").lower() == b"websocket"
            and headers.keys().isdisjoint({b"content-length", b"transfer-encoding"})
        )

    def render_without_upgrade(self, parser: httptools.HttpRequestParser) -> bytes:
        """Return the head without its Upgrade header, as bytes to parse again.

        Raises:
            HttpParserError: The request asks for a tunnel (CONNECT).
        """
        method, version = parser.get_method(), parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT tunnels are not supported")
        kept = (b": ".join(header) for header in self._headers if header[0] != b"upgrade")
        return b"\r\n".join((b"%b %b HTTP/%b" % (method, self._url, version), *kept, b"", b""))


class HeadTemplate:
    """Head of an earlier request, which lets a request with an equal head skip the parser.

    Successive heads of one client usually differ only in the body's length.

    Args:
        prefix: Bytes before the content length.
        suffix: Bytes after the content length.
        scope: ASGI scope of the earlier request.
        length_index: Index of the Content-Length header.
    """

    __slots__ = ("_headers", "_length_index", "_prefix", "_scope", "_suffix")

    def __init__(self, prefix: bytes, suffix: bytes, scope: Scope, length_index: int) -> None:
        self._prefix, self._suffix = prefix, suffix
        self._scope, self._headers, self._length_index = dict(scope), scope["headers"], length_index

    def match_request(self, data: bytes) -> tuple[Scope, bytes] | None:
        """Return scope and body if `data` is one complete request with this head, else None."""
        if not data.startswith(self._prefix):
            return None
        start, after = len(self._prefix), self._suffix
        stop = data.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        length = data[start:stop]
        body = stop + len(after)
        if not (length.isdigit() and data.startswith(after, stop)):
            return None
        if int(length) != len(data) - body:
            return None
        headers = self._headers.copy()
        headers[self._length_index] = (b"content-length", length)
        return {**self._scope, "headers": headers}, data[body:]


def build_head_template(data: bytes, scope: Scope) -> HeadTemplate | None:
    """Build a template from the head at the start of `data`, or return None if the head is unsuitable.

    Use only requests after which the connection stays open.

    Args:
        data: Bytes that start with a request's head.
        scope: ASGI scope that was built from this head.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    head = data[: data.find(_HEAD_END) + len(_HEAD_END)]
    length = _CONTENT_LENGTH.search(head)
    header_count = head.count(b"\n") - 2  # without the request line and the empty line
    if length is None or header_count != len(names) or names.count(b"content-length") != 1:
        return None
    if not _UNTEMPLATED_HEADERS.isdisjoint(names):
        return None
    length_index = names.index(b"content-length")
    return HeadTemplate(head[: length.start(1)], head[length.end(1) :], scope, length_index)


def _head_too_large_error() -> InvalidHeadError:
    return InvalidHeadError("the request's headers are too large")
