"""Head of a request: its headers within a limit, and checks of what a proxy in front might read differently."""

from __future__ import annotations

from urllib.parse import unquote

import httptools

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the request line and headers together, in bytes."""
HEADER_OVERHEAD_BYTES = 32
"""Size counted per header in addition to its name and value (as in RFC 9113, section 6.5.2). Tens of thousands of empty
headers would otherwise take megabytes and tens of milliseconds."""
_CHECKED_HEADERS = frozenset({b"host", b"expect", b"transfer-encoding"})


class InvalidHeadError(ValueError):
    """A request's head is invalid or too large. The message is safe to send to the client."""


class RequestHead:
    """Head of the request being parsed, reused for each request of a connection.

    Raises:
        InvalidHeadError: The head is invalid or too large.
    """

    __slots__ = (
        "_host_count",
        "_is_chunked",
        "_size_bytes",
        "_url",
        "expects_continue",
        "headers",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear the head for the next request."""
        self.expects_continue = False
        """Whether the client waits for a 100 response before sending the body."""
        self._url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers so far, with names in lower case."""
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
        if name in _CHECKED_HEADERS:
            self._check_header(name, value)
        self.headers.append((name, value))

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._host_count += 1
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue"
        elif self._is_chunked or value.strip().lower() != b"chunked":
            # The parser would accept `gzip, chunked` and pass the compressed bytes on. A proxy that reads the encodings
            # differently would see another end of the request (request smuggling).
            raise InvalidHeadError("the only supported Transfer-Encoding is a single 'chunked'")
        else:
            self._is_chunked = True

    def check_complete(self, version: str) -> None:
        """Check the head as a whole, for this HTTP version."""
        if self._host_count != 1 and (self._host_count or version == "1.1"):
            # RFC 9112, section 3.2
            raise InvalidHeadError("a request needs exactly one Host header")
        if self._is_chunked and version == "1.0":  # RFC 9112, section 6.1
            raise InvalidHeadError("HTTP/1.0 has no Transfer-Encoding")

    def parse_url(self) -> tuple[str, bytes]:
        """Return the path, with its escapes decoded, and the query string."""
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        return unquote(path) if "%" in path else path, url.query or b""

    def is_websocket_handshake(self, parser: httptools.HttpRequestParser) -> bool:
        """Return whether the request asks for a WebSocket, and has no body that would follow."""
        headers = dict(self.headers)
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
        kept = (b": ".join(header) for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((b"%b %b HTTP/%b" % (method, self._url, version), *kept, b"", b""))


def _head_too_large_error() -> InvalidHeadError:
    return InvalidHeadError("the request's headers are too large")
