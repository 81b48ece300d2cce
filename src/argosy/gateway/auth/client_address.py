"""Where a request comes from: the peer's address, or what trusted proxies say of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

LOCALHOST = IPv4Address("127.0.0.1")
MAX_ADDRESS_LENGTH = 64
"""No address is longer, with whatever may be around it."""
_MAPPED_PREFIX_BITS = 96
PROXY_HEADERS = frozenset(
    {b"x-forwarded-for", b"forwarded", b"x-real-ip", b"x-forwarded-host", b"via"}
)
"""A request with one of these came through a proxy."""


def parse_networks(cidrs: Iterable[str]) -> tuple[IpNetwork, ...]:
    """Networks in CIDR notation, or single addresses. Raises ValueError, naming the one that is neither."""
    networks = []
    for text in cidrs:
        try:
            networks.append(_unmap_network(ip_network(text.strip(), strict=False)))
        except ValueError as error:
            raise ValueError(f"{text!r} is no network; write it like 10.0.0.0/8") from error
    return tuple(networks)


def _unmap_network(network: IpNetwork) -> IpNetwork:
    """IPv4 that is written as IPv6 (::ffff:10.0.0.0/104) as what it is, as addresses are."""
    first = network.network_address
    if isinstance(first, IPv6Address) and first.ipv4_mapped:
        return IPv4Network((first.ipv4_mapped, network.prefixlen - _MAPPED_PREFIX_BITS))
    return network


def parse_address(text: str) -> IpAddress | None:
    """An address, with a port or without; None when it is none."""
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
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_in_networks(address: IpAddress | None, networks: tuple[IpNetwork, ...]) -> bool:
    """Whether the address lies in one of them; an unknown one lies nowhere."""
    return address is not None and any(address in network for network in networks)


def client_address(
    peer: str, headers: Mapping[bytes, bytes], trusted_proxies: tuple[IpNetwork, ...]
) -> IpAddress | None:
    """The client's address; None when nobody can tell.

    X-Forwarded-For is read from its end, where the nearest proxy wrote, for as long as the writers are trusted.
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
    """Whether a person or a program on this machine asks: nobody behind a proxy, and no web page from elsewhere.

    A page can make a browser here send requests to a loopback address, by a name of its own too; but it cannot choose
    what the browser says in Host and Origin.
    """
    address = LOCALHOST if peer == "unix" else parse_address(peer)
    if address is None or not address.is_loopback or not PROXY_HEADERS.isdisjoint(headers):
        return False
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not _is_local_authority(
        host
    ):  # also another address of ours: somebody forwarded what came to it
        return False
    origin_of_page = headers.get(b"origin", b"").decode("latin-1").lower()
    return not origin_of_page or is_local_origin(origin_of_page)


def is_local_origin(origin: str) -> bool:
    """Whether a page of this origin, in lower case, is the machine's own; `null` is anybody's."""
    authority = origin.partition("://")[2]
    return authority != "" and _is_local_authority(authority)


def _is_local_authority(authority: str) -> bool:
    """Whether `host:port` is a name or an address that only means the machine itself."""
    address = parse_address(authority)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    name = authority.partition(":")[0]
    return name in {"", "localhost", "host.docker.internal"} or name.endswith(".localhost")
