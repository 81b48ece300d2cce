"""Where a request comes from: no client can say so itself."""

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
WRITTEN = st.binary(max_size=40).filter(lambda text: b"," not in text)


@given(peer=ADDRESSES, written=st.binary())
def test_a_stranger_is_where_its_connection_comes_from(peer: object, written: bytes) -> None:
    assert client_address(str(peer), {b"x-forwarded-for": written}, TRUSTED) == parse_address(
        str(peer)
    )


@given(
    peer=PROXIES,
    client=ADDRESSES,
    written=st.lists(WRITTEN, max_size=3),
    proxies=st.lists(PROXIES, max_size=3),
)
def test_behind_trusted_proxies_the_client_is_whom_the_first_of_them_saw(
    peer: str, client: object, written: list[bytes], proxies: list[str]
) -> None:
    hops = [*written, str(client).encode(), *(proxy.encode() for proxy in proxies)]
    headers = {b"x-forwarded-for": b", ".join(hops)}
    assert client_address(peer, headers, TRUSTED) == parse_address(str(client))


@given(peer=PROXIES, proxies=st.lists(PROXIES))
def test_a_proxy_that_names_nobody_else_asks_for_itself(peer: str, proxies: list[str]) -> None:
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
def test_addresses_in_every_form(text: str, expected: str) -> None:
    assert parse_address(text) == ip_address(expected)


@given(st.text())
def test_anything_else_is_no_address_and_no_error(text: str) -> None:
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
def test_a_network_is_the_same_however_it_is_written(
    network: str, inside: str, outside: str
) -> None:
    networks = parse_networks([network])
    assert is_in_networks(parse_address(inside), networks)
    assert not is_in_networks(parse_address(outside), networks)
