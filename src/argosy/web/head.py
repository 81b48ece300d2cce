"""The head of a request as it comes: request line and headers, bounded, and the scope that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import httptools

from argosy.web.exchange import Scope

LIMIT_BYTES = 64 * 1024
"""Most bytes of request line and headers together."""


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
        self._bytes += len(name) + len(value)
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


def _too_large() -> ValueError:
    return ValueError("the request's headers are too large")
