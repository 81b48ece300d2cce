"""Which web pages a browser lets ask the gateway, and read what it answers: cross-origin resource sharing (CORS)."""

from __future__ import annotations

import re

from argosy.gateway.auth import is_local_origin
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError

LOCALHOST = "localhost"
"""Stands for all pages that the browser's own machine serves."""
ANY_ORIGIN = "*"
_ORIGIN_PATTERN = re.compile(r"https?://[^/\s,*]+")
_REQUESTED_METHOD, _REQUESTED_HEADERS = (
    b"access-control-request-method",
    b"access-control-request-headers",
)
_PREFLIGHT_MAX_AGE_S = b"600"
"""After so long a browser asks again whether a page may."""


class CorsPolicy:
    """The pages that may ask. Raises ValueError for what is no origin.

    A browser sends no key of its own accord, so a page that may ask still has to have one.
    """

    def __init__(self, allowed_origins: tuple[str, ...]) -> None:
        for origin in allowed_origins:
            if origin not in {LOCALHOST, ANY_ORIGIN} and not _ORIGIN_PATTERN.fullmatch(origin):
                raise ValueError(
                    f"allowed origins: {origin!r} is no page's origin; write https://HOST, localhost or *"
                )
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)

    def apply_headers(self, exchange: HttpExchange) -> bool:
        """Let the page that asks read the answer, if it may; whether its browser asks only that (a preflight).

        Raises ApiError 403 to a preflight of a page that may not.
        """
        asked = exchange.method == "OPTIONS" and _REQUESTED_METHOD in exchange.headers
        origin = exchange.get_header(b"origin")
        exchange.extra_headers.append((b"vary", b"origin"))
        if self._is_allowed(origin.lower()):
            exchange.extra_headers += [
                (b"access-control-allow-origin", exchange.headers[b"origin"]),
                (b"access-control-expose-headers", b"*"),
            ]
        elif asked:
            message = (
                f"Pages of {origin[:200]} may not ask here. Have them among the allowed origins."
            )
            raise ApiError(403, "origin_not_allowed", message)
        if asked:
            exchange.extra_headers += [
                (b"access-control-allow-methods", exchange.headers[_REQUESTED_METHOD]),
                (b"access-control-allow-headers", exchange.headers.get(_REQUESTED_HEADERS, b"")),
                (b"access-control-max-age", _PREFLIGHT_MAX_AGE_S),
            ]
        return asked

    def _is_allowed(self, origin: str) -> bool:
        if ANY_ORIGIN in self._allowed_origins or origin in self._allowed_origins:
            return True
        return LOCALHOST in self._allowed_origins and is_local_origin(origin)
