"""Checks of requests that a browser sends by itself, against pages of other sites and names of other owners.

A browser adds a session cookie, or its presence on this machine, to requests of any page. Three attacks follow. A page
of another site or of another port of this host sends requests (cross-site request forgery); the browser names the
sender in `Sec-Fetch-Site` or `Origin`. A page gives a name of its own this gateway's address (DNS rebinding). Then
the page has this gateway's origin, and only the `Host` header shows its name. A page shows the console in a frame;
the headers of the document forbid it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from argosy.deployment import ConsoleConfig
from argosy.gateway.auth import IpAddress, is_local_origin, parse_address, parse_authority
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError

_CONTENT_SECURITY_POLICY = (
    b"default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    b"frame-ancestors 'none'; form-action 'self'; require-trusted-types-for 'script'; "
    b"trusted-types 'none'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", _CONTENT_SECURITY_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of the console's responses: nothing comes from elsewhere, no text becomes markup, no page frames it."""


class BrowserGuard:
    """Checks hosts and origins.

    Args:
        config: Settings of the console.
        host: Address on which the gateway listens.
        has_tls: Whether it listens with TLS.
        is_trusted_proxy: Returns whether an address is a proxy whose headers are trusted.
    """

    def __init__(
        self,
        config: ConsoleConfig,
        host: str,
        *,
        has_tls: bool,
        is_trusted_proxy: Callable[[IpAddress], bool],
    ) -> None:
        self._allows_insecure_http = config.insecure_http
        self._has_tls = has_tls
        self._is_trusted_proxy = is_trusted_proxy
        names = (*config.allowed_hosts, host, socket.gethostname())
        self._allowed_hosts = frozenset(name.lower() for name in names if name)

    def check_host(self, exchange: HttpExchange) -> None:
        """Check that the browser knows this gateway by an address or by a name of its own.

        An address in the `Host` header is no name of an attacker, so it is always allowed.

        Raises:
            ApiError: 421 for another name, or without exactly one valid `Host` header.
        """
        authority = exchange.get_header(b"host").lower()
        name = parse_authority(authority)
        if name and (
            name in self._allowed_hosts
            or parse_address(name) is not None
            or is_local_origin(f"http://{authority}")
        ):
            return
        message = (
            f"The console has no name {authority[:200]!r}. Add the name to console.allowed_hosts."
        )
        raise ApiError(421, "host_not_allowed", message)

    def check_data_request(self, exchange: HttpExchange) -> None:
        """Check the host, and that the console's own page sent the request.

        Raises:
            ApiError: 421 or 403 if the browser may have sent it for another page.
        """
        self.check_host(exchange)
        fetch_site = exchange.get_header(b"sec-fetch-site").strip().lower()
        if fetch_site:
            is_own = fetch_site == "same-origin"
        elif b"origin" in exchange.headers:
            scheme = "https" if self.has_https(exchange) else "http"
            own_origin = f"{scheme}://{exchange.get_header(b'host')}"
            is_own = exchange.get_header(b"origin").lower() == own_origin.lower()
        else:
            # Over plain HTTP browsers send neither header with a GET. Other pages cannot read its response.
            is_own = exchange.method in {"GET", "HEAD"} and self._is_insecure(exchange)
        if not is_own:
            message = "Only the console's own page may send this request. Programs send an API key instead."
            raise ApiError(403, "origin_not_allowed", message)

    def check_sign_in(self, exchange: HttpExchange) -> None:
        """Check that no machine between the browser and the gateway can read a key or a session.

        Raises:
            ApiError: 403 over plain HTTP from another machine, unless the settings allow it.
        """
        if not (self.is_secure(exchange) or self._allows_insecure_http):
            message = (
                "Signing in over plain HTTP would show your key to the network. Use HTTPS, or start the gateway with "
                "--console-insecure-http."
            )
            raise ApiError(403, "insecure_connection", message)

    def is_secure(self, exchange: HttpExchange) -> bool:
        """Return whether browsers treat the connection as secure: HTTPS, or a name of this machine."""
        return self.has_https(exchange) or is_local_origin(
            f"http://{exchange.get_header(b'host').lower()}"
        )

    def has_https(self, exchange: HttpExchange) -> bool:
        """Return whether the browser uses HTTPS, here or at a trusted proxy."""
        if self._has_tls:
            return True
        peer = "127.0.0.1" if exchange.peer_address == "unix" else exchange.peer_address
        address = parse_address(peer)
        return (
            exchange.get_header(b"x-forwarded-proto").lower() == "https"
            and address is not None
            and self._is_trusted_proxy(address)
        )

    def _is_insecure(self, exchange: HttpExchange) -> bool:
        return self._allows_insecure_http and not self.is_secure(exchange)
