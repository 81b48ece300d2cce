"""Cache of a connection's last request head, which lets a request with an equal head skip the parser.

Successive heads of one client usually differ in the length of the body only. Parsing one costs 5 % of a small request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from argosy.http_server.http_request import Headers

MAX_MISSES = 8
"""Consecutive requests with differing heads after which a connection compares no more."""
MAX_LENGTH_DIGITS = 9
"""Maximum number of digits of a content length that matches."""
_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_UNCACHED_HEADERS = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that change how the rest of the request is read."""


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
