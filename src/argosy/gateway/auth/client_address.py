"""Client address of a request, from the peer's address and the headers of trusted proxies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

LOCALHOST = IPv4Address("127.0.0.1")
MAX_ADDRESS_LENGTH = 64
"""Maximum length of an address including port, brackets and quotes."""
_MAPPED_PREFIX_BITS = 96
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
"""Host and port of a Host header or an origin (RFC 3986, section 3.2)."""
PROXY_HEADERS = frozenset(
    {b"x-forwarded-for", b"forwarded", b"x-real-ip", b"x-forwarded-host", b"via"}
)
"""Headers that proxies add. A request with one of these did not come directly from the client."""


def parse_networks(cidrs: Iterable[str]) -> tuple[IpNetwork, ...]:
    """Parse networks in CIDR notation or single addresses.

    Raises:
        ValueError: An entry is neither; the message names the entry.
    """
    networks = []
    for text in cidrs:
        try:
            networks.append(_unmap_network(ip_network(text.strip(), strict=False)))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a network; write it like 10.0.0.0/8") from error
    return tuple(networks)


def _unmap_network(network: IpNetwork) -> IpNetwork:
    """Convert IPv4-mapped IPv6 networks (::ffff:10.0.0.0/104) to IPv4, as `parse_address` does with addresses."""
    network_address = network.network_address
    if isinstance(network_address, IPv6Address) and network_address.ipv4_mapped:
        return IPv4Network((network_address.ipv4_mapped, network.prefixlen - _MAPPED_PREFIX_BITS))
    return network


def parse_address(text: str) -> IpAddress | None:
    """Parse an address with or without a port, and return None if the text is no address."""
    return _parse_cached(text) if len(text) <= MAX_ADDRESS_LENGTH else None


@lru_cache(maxsize=4096)
def _parse_cached(text: str) -> IpAddress | None:
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    ipv4_address = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return ipv4_address or address


def is_in_networks(address: IpAddress | None, networks: tuple[IpNetwork, ...]) -> bool:
    """Return whether the address is in one of the networks. An unknown address is in none."""
    return address is not None and any(address in network for network in networks)


def client_address(
    peer: str, headers: Mapping[bytes, bytes], trusted_proxies: tuple[IpNetwork, ...]
) -> IpAddress | None:
    """Return the client's address, or None if it is unknown.

    X-Forwarded-For is read from its end, where the nearest proxy appended its peer, as long as the appending proxies
    are trusted.

    Args:
        peer: Address of the connection's peer, or "unix".
        headers: Request headers by lower-case name.
        trusted_proxies: Networks of the proxies whose header is trusted.
    """
    address = LOCALHOST if peer == "unix" else parse_address(peer)
    if not is_in_networks(address, trusted_proxies):
        return address
    hops = headers.get(b"x-forwarded-for", b"").decode("latin-1")
    for hop in reversed(hops.split(",") if hops.strip() else []):
        address = parse_address(hop)
        if not is_in_networks(address, trusted_proxies):
            break
    return address


def is_local_request(peer: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a program on this machine sent the request, through no proxy and for no web page of another site.

    A page can make a local browser send requests to a loopback address, even under a host name of the page's own. It
    cannot control the Host and Origin headers that the browser sends.
    """
    address = LOCALHOST if peer == "unix" else parse_address(peer)
    if address is None or not address.is_loopback or not PROXY_HEADERS.isdisjoint(headers):
        return False
    # Only HTTP/1.0 has requests without a Host header, and no browser speaks it. The header is also not local if
    # another program forwarded a request to this machine's public address.
    if b"host" in headers and not _is_local_authority(headers[b"host"].decode("latin-1").lower()):
        return False
    origin_of_page = headers.get(b"origin", b"").decode("latin-1").lower()
    return not origin_of_page or is_local_origin(origin_of_page)


def is_local_origin(origin: str) -> bool:
    """Return whether a page of this lower-case origin was served by the browser's machine. `null` is not local."""
    scheme, _, authority = origin.partition("://")
    return scheme in {"http", "https"} and _is_local_authority(authority)


def parse_authority(authority: str) -> str:
    """Return the name or address in `host`, `host:port` or `[IPv6]:port`, in lower case. Empty for another form."""
    parsed = _AUTHORITY.fullmatch(authority)
    return "" if parsed is None else parsed["ipv6"] or parsed["name"]


def _is_local_authority(authority: str) -> bool:
    """Return whether `host`, `host:port` or `[IPv6]:port`, in lower case, names only the machine itself.

    Anything else is not local, such as an empty host or text after the brackets of an IPv6 address.
    """
    name = parse_authority(authority)
    try:
        address = parse_address(str(ip_address(name)))
    except ValueError:
        # Systems and browsers resolve only these without asking a name server, which may be an attacker's.
        return name == "localhost" or name.endswith(".localhost")
    return address is not None and (address.is_loopback or address.is_unspecified)
