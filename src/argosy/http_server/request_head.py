"""The head of a request: bounded as it comes, the scope that it becomes, and the template of those like it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import httptools

from argosy.http_server.http_exchange import Scope

LIMIT_BYTES = 64 * 1024
"""Most bytes of request line and headers together."""
BESIDE_BYTES = 32
"""What a header counts for beside its name and value (as in RFC 9113, 6.5.2): tens of thousands of empty ones take
megabytes, and tens of milliseconds."""
MOST_DIGITS = 9
"""Of a body's length that comes with its head, in one piece."""
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_MORE = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that say more of how a request goes on than its length does."""


class Head:
    """Of one request after another on a connection. Raises ValueError for what cannot be answered."""

    __slots__ = ("_bytes", "_headers", "_hosts", "_url", "expects")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """What comes now is of another request."""
        self.expects = False
        """The client sends the body when it is told to."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._hosts = 0
        self._bytes = 0

    def add_url(self, url: bytes) -> None:
        """A part of the request line came."""
        self._url += url
        self._bytes += len(url)
        if self._bytes > LIMIT_BYTES:
            raise _too_large()

    def add_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        self._bytes += len(name) + len(value) + BESIDE_BYTES
        if self._bytes > LIMIT_BYTES:
            raise _too_large()
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self.expects = value.lower() == b"100-continue"
        self._headers.append((name, value))

    def scope(self, parser: httptools.HttpRequestParser, place: Mapping[str, Any]) -> Scope:
        """The request, in ASGI's words; `place` is what its connection knows of it."""
        version = parser.get_http_version()
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise ValueError("whom a request is for is not clear")  # RFC 9112, 3.2
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
            **place,
        }

    def plain(self, parser: httptools.HttpRequestParser) -> bytes:
        """The head, but that it does not ask to speak something else than HTTP. Raises HttpParserError for a tunnel."""
        method, version = parser.get_method(), parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("there are no tunnels here")
        kept = (b": ".join(header) for header in self._headers if header[0] != b"upgrade")
        return b"\r\n".join((b"%b %b HTTP/%b" % (method, self._url, version), *kept, b"", b""))


class HeadTemplate:
    """A head that came: a client's next is mostly the same, but for the length of its body, and need not be parsed."""

    __slots__ = ("_after", "_before", "_headers", "_place", "_scope")

    def __init__(self, before: bytes, after: bytes, scope: Scope, place: int) -> None:
        """It is what is before and after the length, which is the header at `place`; it became `scope`."""
        self._before, self._after = before, after
        self._scope, self._headers, self._place = dict(scope), scope["headers"], place

    def read(self, data: bytes) -> tuple[Scope, bytes] | None:
        """Scope and body of a request that is all of `data`, if its head is the same."""
        if not data.startswith(self._before):
            return None
        start, after = len(self._before), self._after
        stop = data.find(b"\r", start, start + MOST_DIGITS + 1)
        length = data[start:stop]
        body = stop + len(after)
        if not (length.isdigit() and data.startswith(after, stop)):
            return None
        if int(length) != len(data) - body:
            return None
        headers = self._headers.copy()
        headers[self._place] = (b"content-length", length)
        return {**self._scope, "headers": headers}, data[body:]


def template_of(data: bytes, scope: Scope) -> HeadTemplate | None:
    """Of heads like the one that `data` begins with, which became `scope`. None: others cannot be told by it.

    To be asked of a request that leaves its connection open.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    head = data[: data.find(_END) + len(_END)]
    length = _LENGTH.search(head)
    lines = head.count(b"\n") - 2  # without the request line and the empty one
    if length is None or lines != len(names) or names.count(b"content-length") != 1:
        return None
    if not _MORE.isdisjoint(names):
        return None
    place = names.index(b"content-length")
    return HeadTemplate(head[: length.start(1)], head[length.end(1) :], scope, place)


def _too_large() -> ValueError:
    return ValueError("the request's headers are too large")
