"""Which web pages a browser lets ask the gateway, and read what it answers: cross-origin resource sharing (CORS)."""

from __future__ import annotations

import re

from argosy.gateway.auth import is_local_page
from argosy.http_server import Exchange
from argosy.protocol import ApiError

LOCAL = "localhost"
"""Stands for all pages that the browser's own machine serves."""
ANY = "*"
_ORIGIN = re.compile(r"https?://[^/\s,*]+")
_ASKED_METHOD, _ASKED_HEADERS = b"access-control-request-method", b"access-control-request-headers"
_FORGOTTEN_S = b"600"
"""After so long a browser asks again whether a page may."""


class Origins:
    """The pages that may ask. Raises ValueError for what is no origin.

    A browser sends no key of its own accord, so a page that may ask still has to have one.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        for origin in allowed:
            if origin not in {LOCAL, ANY} and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed origins: {origin!r} is no page's origin; write https://HOST, localhost or *"
                )
        self._allowed = frozenset(origin.lower() for origin in allowed)

    def admit(self, exchange: Exchange) -> bool:
        """Let the page that asks read the answer, if it may; whether its browser asks only that (a preflight).

        Raises ApiError 403 to a preflight of a page that may not.
        """
        asked = exchange.method == "OPTIONS" and _ASKED_METHOD in exchange.headers
        origin = exchange.header(b"origin")
        exchange.extra.append((b"vary", b"origin"))
        if self._allows(origin.lower()):
            exchange.extra += [
                (b"access-control-allow-origin", exchange.headers[b"origin"]),
                (b"access-control-expose-headers", b"*"),
            ]
        elif asked:
            message = (
                f"Pages of {origin[:200]} may not ask here. Have them among the allowed origins."
            )
            raise ApiError(403, "origin_not_allowed", message)
        if asked:
            exchange.extra += [
                (b"access-control-allow-methods", exchange.headers[_ASKED_METHOD]),
                (b"access-control-allow-headers", exchange.headers.get(_ASKED_HEADERS, b"")),
                (b"access-control-max-age", _FORGOTTEN_S),
            ]
        return asked

    def _allows(self, origin: str) -> bool:
        if ANY in self._allowed or origin in self._allowed:
            return True
        return LOCAL in self._allowed and is_local_page(origin)
