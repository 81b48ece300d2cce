"""Client addresses, which clients must not be able to choose themselves."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.auth.client_address import (
    client_address,
    is_in_networks,
    parse_address,
    parse_networks,
)

TRUSTED = parse_networks(["10.0.0.0/8", "fd00::/8"])
PROXIES = st.sampled_from(["10.0.0.1", "10.9.8.7", "fd00::1"])
ADDRESSES = st.ip_addresses().filter(
    lambda address: not is_in_networks(parse_address(str(address)), TRUSTED)
)
HEADER_ENTRIES = st.binary(max_size=40).filter(lambda text: b"," not in text)


@given(peer=ADDRESSES, forwarded=st.binary())
def test_untrusted_peer_address_ignores_forwarded_header(peer: object, forwarded: bytes) -> None:
    assert client_address(str(peer), {b"x-forwarded-for": forwarded}, TRUSTED) == parse_address(
        str(peer)
    )


@given(
    peer=PROXIES,
    client=ADDRESSES,
    forwarded=st.lists(HEADER_ENTRIES, max_size=3),
    proxies=st.lists(PROXIES, max_size=3),
)
def test_first_trusted_proxy_names_client(
    peer: str, client: object, forwarded: list[bytes], proxies: list[str]
) -> None:
    hops = [*forwarded, str(client).encode(), *(proxy.encode() for proxy in proxies)]
    headers = {b"x-forwarded-for": b", ".join(hops)}
    assert client_address(peer, headers, TRUSTED) == parse_address(str(client))


@given(peer=PROXIES, proxies=st.lists(PROXIES))
def test_chain_of_trusted_proxies_ends_at_first_of_them(peer: str, proxies: list[str]) -> None:
    headers = {b"x-forwarded-for": ",".join(proxies).encode()}
    assert client_address(peer, headers, TRUSTED) == ip_address([*proxies[:1], peer][0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        (" 192.0.2.1:80 ", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]:80", "2001:db8::1"),
        ('"[2001:db8::1]"', "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_address_forms_are_parsed(text: str, expected: str) -> None:
    assert parse_address(text) == ip_address(expected)


@given(st.text())
def test_any_text_is_parsed_without_error(text: str) -> None:
    parse_address(text)


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("::ffff:10.0.0.0/104", "10.1.2.3", "11.0.0.0"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7", "192.0.2.8"),
        ("::ffff:0:0/96", "203.0.113.1", "2001:db8::1"),
        ("::/0", "2001:db8::1", "192.0.2.1"),
    ],
)
def test_network_matches_in_any_notation(network: str, inside: str, outside: str) -> None:
    networks = parse_networks([network])
    assert is_in_networks(parse_address(inside), networks)
    assert not is_in_networks(parse_address(outside), networks)
