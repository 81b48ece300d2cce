"""Cross-origin resource sharing (CORS): which web pages may call the gateway from a browser and read its responses."""

from __future__ import annotations

import re

from argosy.gateway.auth import is_local_origin
from argosy.http_server import HttpExchange, is_cross_origin
from argosy.protocol import ApiError

LOCALHOST = "localhost"
"""Stands for all origins that the browser's own machine serves."""
ANY_ORIGIN = "*"
_ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+", re.IGNORECASE)
"""Origin of a web page, or of an app or extension, such as `app://obsidian.md` and `chrome-extension://ID`."""
_REQUESTED_METHOD, _REQUESTED_HEADERS = (
    b"access-control-request-method",
    b"access-control-request-headers",
)
_PREFLIGHT_MAX_AGE_S = b"600"
"""How long a browser may cache the result of a preflight request."""


class CorsPolicy:
    """The origins whose pages may call the gateway.

    Browsers add no API key by themselves, so an allowed page still needs a key.
    """

    def __init__(self, allowed_origins: tuple[str, ...]) -> None:
        """Create a policy.

        Raises:
            ValueError: An entry is not an origin, `localhost` or `*`.
        """
        for origin in allowed_origins:
            if origin not in {LOCALHOST, ANY_ORIGIN} and not _ORIGIN_PATTERN.fullmatch(origin):
                raise ValueError(
                    f"allowed origins: {origin!r} is not an origin. Write https://HOST, SCHEME://ID, localhost or *."
                )
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)

    def apply_headers(self, exchange: HttpExchange) -> bool:
        """Add the CORS response headers if the page's origin is allowed.

        Returns:
            Whether the request is a preflight, which has no other response than these headers.

        Raises:
            ApiError: 403 for a preflight from an origin that is not allowed.
        """
        is_preflight = exchange.method == "OPTIONS" and _REQUESTED_METHOD in exchange.headers
        origin = exchange.get_header(b"origin")
        exchange.extra_headers.append((b"vary", b"origin"))
        if self._is_allowed(origin.lower()):
            exchange.extra_headers += [
                (b"access-control-allow-origin", exchange.headers[b"origin"]),
                (b"access-control-expose-headers", b"*"),
            ]
        elif is_preflight:
            raise _origin_not_allowed_error(origin)
        if is_preflight:
            exchange.extra_headers += [
                (b"access-control-allow-methods", exchange.headers[_REQUESTED_METHOD]),
                (b"access-control-allow-headers", exchange.headers.get(_REQUESTED_HEADERS, b"")),
                (b"access-control-max-age", _PREFLIGHT_MAX_AGE_S),
            ]
        return is_preflight

    def check_origin(self, exchange: HttpExchange) -> None:
        """Check that a request without a key was not sent for a web page whose origin is not allowed.

        A browser sends some requests without a preflight. Hiding the response from the page does not undo them.

        Raises:
            ApiError: 403 if the origin is not allowed.
        """
        origin = exchange.get_header(b"origin")
        if is_cross_origin(exchange.headers) and not self._is_allowed(origin.lower()):
            raise _origin_not_allowed_error(origin or "another site")

    def _is_allowed(self, origin: str) -> bool:
        if ANY_ORIGIN in self._allowed_origins or origin in self._allowed_origins:
            return True
        return LOCALHOST in self._allowed_origins and is_local_origin(origin)


def _origin_not_allowed_error(origin: str) -> ApiError:
    message = f"Pages of {origin[:200]} may not call this gateway. Add the origin to auth.allowed_origins."
    return ApiError(403, "origin_not_allowed", message)
