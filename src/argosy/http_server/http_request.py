"""Requests of a connection: their heads, checked and within a limit, and what the connection hands to a handler.

A connection parses each head with httptools, unless it equals the last one but for the length of the body, as most
heads of a client do. Parsing a head costs 5 % of a small request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote

import httptools
import msgspec

from argosy.http_server.response_transport import Headers, ResponseTransport
from argosy.http_server.websocket import WebSocketOpener

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the request line and headers together, in bytes."""
HEADER_OVERHEAD_BYTES = 32
"""Size counted per header in addition to its name and value (as in RFC 9113, section 6.5.2). Tens of thousands of empty
headers would otherwise take megabytes and tens of milliseconds."""
_CHECKED_HEADERS = frozenset({b"host", b"expect", b"transfer-encoding"})
MAX_MISSES = 8
"""Consecutive requests with differing heads after which a connection compares no more."""
MAX_LENGTH_DIGITS = 9
"""Maximum number of digits of a content length that matches."""
_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_UNCACHED_HEADERS = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that change how the rest of the request is read."""


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
        self.headers: Headers = []
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


@dataclass(frozen=True, slots=True)
class KnownHead:
    """Head of a parsed request: what it says, and its bytes before and after the content length."""

    method: str
    path: str
    query: bytes
    headers: Headers
    prefix: bytes
    suffix: bytes
    length_index: int
    """Index of the Content-Length header."""

    def match(self, data: bytes) -> tuple[KnownHead, Headers, bytes] | None:
        """Return this head, its headers and the body if `data` is one complete request with it, else None."""
        if not data.startswith(self.prefix):
            return None
        start = len(self.prefix)
        stop = data.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        length, body = data[start:stop], stop + len(self.suffix)
        if not (length.isdigit() and data.startswith(self.suffix, stop)):
            return None
        if int(length) != len(data) - body:
            return None
        headers = self.headers.copy()
        headers[self.length_index] = (b"content-length", length)
        return self, headers, data[body:]


class HeadCache:
    """The last head of one connection."""

    __slots__ = ("_known", "_misses", "_source")

    def __init__(self) -> None:
        self._known: KnownHead | None = None
        self._source = b""
        """Data being parsed that starts with a head."""
        self._misses = 0

    def match(self, data: bytes) -> tuple[KnownHead, Headers, bytes] | None:
        """Return head, headers and body if `data` is a complete request with the known head. Otherwise `learn` it."""
        found = None if self._known is None else self._known.match(data)
        if found is not None:
            self._misses = 0
        elif self._misses < MAX_MISSES:
            self._misses += 1
            self._source = data
        return found

    def learn(self, method: str, path: str, query: bytes, headers: Headers) -> None:
        """Remember the head at the start of the data that was not matched, now that it is parsed, if it is suitable.

        Use only requests after which the connection stays open.
        """
        data, self._source = self._source, b""
        if not data:  # a request that did not arrive alone
            return
        self._known = None
        head = data[: data.find(_HEAD_END) + len(_HEAD_END)]
        length = _CONTENT_LENGTH.search(head)
        names = [name for name, _ in headers]
        header_count = head.count(b"\n") - 2  # without the request line and the empty line
        if length is None or header_count != len(names) or names.count(b"content-length") != 1:
            return
        if _UNCACHED_HEADERS.isdisjoint(names):
            prefix, suffix = head[: length.start(1)], head[length.end(1) :]
            index = names.index(b"content-length")
            self._known = KnownHead(method, path, query, headers, prefix, suffix, index)


class HttpRequest(msgspec.Struct, eq=False):
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
