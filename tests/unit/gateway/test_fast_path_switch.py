"""Whose sockets are lent to the fast path, and that they come back where it does not take them."""

from __future__ import annotations

from unittest.mock import Mock

from argosy.gateway.proxy.fast_path import FastPath, SplicedStream
from argosy.gateway.proxy.fast_path_switch import FastPathSwitch
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.upstream import UpstreamResponse
from argosy.http_server import HttpExchange


def sockets(ride: SplicedStream | None) -> tuple[Mock, FastPathSwitch, Mock]:
    """The fast path, a way by it, and an attempt; both sockets can be lent."""
    path, attempt = Mock(spec=FastPath), Mock(spec=UpstreamResponse)
    exchange = Mock(spec=HttpExchange)
    (
        path.attach.return_value,
        attempt.lend_socket.return_value,
        exchange.lend_socket.return_value,
    ) = ride, 3, 4
    return path, FastPathSwitch(path, StreamingWriter(exchange), []), attempt


def test_a_replica_whose_stream_is_not_taken_is_read_on() -> None:
    path, shortcut, attempt = sockets(None)
    shortcut.enter(attempt, 1, Mock())
    path.attach.assert_called_once()
    attempt.reclaim_socket.assert_called_once_with(b"")
    assert shortcut.exit() is None


def test_a_stream_that_goes_by_it_is_not_lent_again() -> None:
    """Two pieces that came together each ask for it."""
    path, shortcut, attempt = sockets(Mock(spec=SplicedStream))
    for _ in range(2):
        shortcut.enter(attempt, 1, Mock())
    path.attach.assert_called_once()
    attempt.lend_socket.assert_called_once()
    attempt.reclaim_socket.assert_not_called()
