"""Proxies of the environment for connections to servers outside: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY.

Servers inside are reached directly: addresses that are not public, and names without a dot or of a local domain.
"""

from __future__ import annotations

import ipaddress
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_LOCAL_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Ends of names that only local resolvers know."""


class Proxy(NamedTuple):
    """HTTP proxy. Its credentials are no part of its name, so that no message contains them."""

    host: str
    port: int
    authorization: bytes
    """Value of the header `Proxy-Authorization`; empty without credentials."""

    @property
    def name(self) -> str:
        """Address for messages and logs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_inside(host: str) -> bool:
    """Return whether a host is reached directly, whatever the environment says."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.lower().rstrip(".")
        return "." not in name or name.endswith(_LOCAL_DOMAINS)


def find_proxy(scheme: str, host: str, port: int) -> Proxy | None:
    """Return the proxy that the environment names for a server; None if there is none, or NO_PROXY excludes the server.

    Args:
        scheme: `http` or `https`, by which HTTP_PROXY or HTTPS_PROXY applies. Lower case names go first.
        host: Host of the server.
        port: Its port.

    Raises:
        ValueError: The proxy's URL cannot be used. The message has the remedy, and no credentials.
    """
    # Imported late, because it takes long and few processes need it.
    from urllib import request

    proxies = request.getproxies_environment()
    kind = scheme if proxies.get(scheme) else "all"
    url = proxies.get(kind)
    is_excepted = request.proxy_bypass_environment(f"{host}:{port}", proxies)  # type: ignore[attr-defined]
    if not url or is_excepted:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        proxy_port = parts.port or 80
    except ValueError:
        parts, proxy_port = urlsplit(""), 0
    if parts.scheme != "http" or not parts.hostname:
        remedy = f"Write http://HOST:PORT, or except {host} in NO_PROXY."
        raise ValueError(f"{kind.upper()}_PROXY: a proxy is reached by http. {remedy}")
    authorization = b""
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = b"Basic " + b64encode(credentials.encode())
    return Proxy(parts.hostname, proxy_port, authorization)


def direct_mounts(url: str) -> dict[str, None]:
    """Return the `mounts` of an HTTP client that follows the environment, for a server that may be inside."""
    host = urlsplit(url).hostname or ""
    if not is_inside(host):
        return {}
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None}
