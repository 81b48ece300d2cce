"""Tests of the address by which a client is known, on which access without keys depends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import cast

import pytest

from argosy.http_server.client_connection import get_peer_address


class SocketTransport:
    """The part of a transport that is read: its socket."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._client if name == "socket" else None


def address_of(client: socket.socket) -> str:
    return get_peer_address(cast("asyncio.Transport", SocketTransport(client)))


@pytest.fixture
def accepted() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        client, _ = server.accept()
        with client:
            yield client


def test_tcp_client_has_the_address_of_its_peer(accepted: socket.socket) -> None:
    assert address_of(accepted) == "127.0.0.1"


def test_client_of_a_unix_socket_is_unix() -> None:
    first, second = socket.socketpair(socket.AF_UNIX)
    with first, second:
        assert address_of(first) == "unix"


def test_disconnected_client_has_no_address_and_is_not_local() -> None:
    with socket.socket() as never_connected:
        assert address_of(never_connected) == ""
