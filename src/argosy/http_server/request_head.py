"""The head of a request: bounded as it comes, the scope that it becomes, and the template of those like it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import httptools

from argosy.http_server.http_exchange import Scope

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of request line and headers together."""
HEADER_OVERHEAD_BYTES = 32
"""What a header counts for beside its name and value (as in RFC 9113, 6.5.2): tens of thousands of empty ones take
megabytes, and tens of milliseconds."""
MAX_LENGTH_DIGITS = 9
"""Of a body's length that comes with its head, in one piece."""
_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_UNTEMPLATED_HEADERS = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that say more of how a request goes on than its length does."""


class RequestHead:
    """Of one request after another on a connection. Raises ValueError for what cannot be answered."""

    __slots__ = ("_headers", "_host_count", "_size_bytes", "_url", "expects_continue")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """What comes now is of another request."""
        self.expects_continue = False
        """The client sends the body when it is told to."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._host_count = 0
        self._size_bytes = 0

    def add_url(self, url: bytes) -> None:
        """A part of the request line came."""
        self._url += url
        self._size_bytes += len(url)
        if self._size_bytes > MAX_HEAD_BYTES:
            raise _head_too_large_error()

    def add_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        self._size_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._size_bytes > MAX_HEAD_BYTES:
            raise _head_too_large_error()
        name = name.lower()
        if name == b"host":
            self._host_count += 1
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue"
        self._headers.append((name, value))

    def build_scope(
        self, parser: httptools.HttpRequestParser, connection_scope: Mapping[str, Any]
    ) -> Scope:
        """The request, in ASGI's words; `place` is what its connection knows of it."""
        version = parser.get_http_version()
        if self._host_count != 1 and (self._host_count or version == "1.1"):
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
            **connection_scope,
        }

    def render_without_upgrade(self, parser: httptools.HttpRequestParser) -> bytes:
        """The head, but that it does not ask to speak something else than HTTP. Raises HttpParserError for a tunnel."""
        method, version = parser.get_method(), parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("there are no tunnels here")
        kept = (b": ".join(header) for header in self._headers if header[0] != b"upgrade")
        return b"\r\n".join((b"%b %b HTTP/%b" % (method, self._url, version), *kept, b"", b""))


class HeadTemplate:
    """A head that came: a client's next is mostly the same, but for the length of its body, and need not be parsed."""

    __slots__ = ("_headers", "_length_index", "_prefix", "_scope", "_suffix")

    def __init__(self, prefix: bytes, suffix: bytes, scope: Scope, length_index: int) -> None:
        """It is what is before and after the length, which is the header at `place`; it became `scope`."""
        self._prefix, self._suffix = prefix, suffix
        self._scope, self._headers, self._length_index = dict(scope), scope["headers"], length_index

    def match_request(self, data: bytes) -> tuple[Scope, bytes] | None:
        """Scope and body of a request that is all of `data`, if its head is the same."""
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
    """Of heads like the one that `data` begins with, which became `scope`. None: others cannot be told by it.

    To be asked of a request that leaves its connection open.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    head = data[: data.find(_HEAD_END) + len(_HEAD_END)]
    length = _CONTENT_LENGTH.search(head)
    lines = head.count(b"\n") - 2  # without the request line and the empty one
    if length is None or lines != len(names) or names.count(b"content-length") != 1:
        return None
    if not _UNTEMPLATED_HEADERS.isdisjoint(names):
        return None
    place = names.index(b"content-length")
    return HeadTemplate(head[: length.start(1)], head[length.end(1) :], scope, place)


def _head_too_large_error() -> ValueError:
    return ValueError("the request's headers are too large")
