"""Checks against web pages that use a visitor's browser to send requests to this server (cross-site request forgery).

A browser sends some requests of any page without asking the server first, and only hides the response from the page.
These are requests without a body, and those whose body has no content type or one of HTML forms.
"""

from __future__ import annotations

from collections.abc import Mapping

from argosy.http_server.http_exchange import JSON_CONTENT_TYPE, HttpExchange
from argosy.protocol import ApiError

_ORIGIN, _FETCH_SITE = b"origin", b"sec-fetch-site"


def is_cross_origin(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a web page of another origin than the requested host sent the request.

    `Sec-Fetch-Site` decides if the browser sends it, else the `Origin` header, whose host and port must be those of the
    `Host` header. A request with neither was not sent for a page.
    """
    fetch_site = headers.get(_FETCH_SITE, b"").strip().lower()
    if fetch_site:
        return fetch_site not in {b"same-origin", b"none"}
    if _ORIGIN not in headers:
        return False
    authority = headers[_ORIGIN].partition(b"://")[2]
    return authority.lower() != headers.get(b"host", b"").lower() or not authority


def check_same_origin(exchange: HttpExchange) -> None:
    """Check that no web page of another origin sent the request.

    Raises:
        ApiError: 403 if one did.
    """
    if is_cross_origin(exchange.headers):
        message = "Web pages of other origins may not send this request. Send it without an Origin header."
        raise ApiError(403, "origin_not_allowed", message)


def check_no_page_request(exchange: HttpExchange) -> None:
    """Check that no web page sent the request, not even one of the requested host.

    A server that accepts any Host header cannot trust it: the page's owner may have given a name of its own this
    server's address. Pages cannot set or remove the headers by which they are known.

    Raises:
        ApiError: 403 if a page did.
    """
    if _ORIGIN in exchange.headers or _FETCH_SITE in exchange.headers:
        message = "Web pages may not send this request. Send it without an Origin header."
        raise ApiError(403, "origin_not_allowed", message)


def check_json_content_type(exchange: HttpExchange) -> None:
    """Check that the body is declared as JSON, which no browser sends for another page without asking first.

    Raises:
        ApiError: 415 if it is not.
    """
    media_type = exchange.headers.get(b"content-type", b"").partition(b";")[0]
    if media_type.strip().lower() != JSON_CONTENT_TYPE:
        message = "The body must be JSON. Send it with the header 'Content-Type: application/json'."
        raise ApiError(415, "unsupported_media_type", message)
