"""Whose sockets are lent to the fast path, and that they come back where it does not take them."""

from __future__ import annotations

from unittest.mock import Mock

from argosy.gateway.proxy.fast_path import FastPath, Ride
from argosy.gateway.proxy.fast_path_switch import Shortcut
from argosy.gateway.proxy.response_writers import Streamed
from argosy.gateway.upstream import Attempt
from argosy.http_server import Exchange


def sockets(ride: Ride | None) -> tuple[Mock, Shortcut, Mock]:
    """The fast path, a way by it, and an attempt; both sockets can be lent."""
    path, attempt = Mock(spec=FastPath), Mock(spec=Attempt)
    exchange = Mock(spec=Exchange)
    path.take.return_value, attempt.lend.return_value, exchange.lend.return_value = ride, 3, 4
    return path, Shortcut(path, Streamed(exchange), []), attempt


def test_a_replica_whose_stream_is_not_taken_is_read_on() -> None:
    path, shortcut, attempt = sockets(None)
    shortcut.take(attempt, 1, Mock())
    path.take.assert_called_once()
    attempt.take_back.assert_called_once_with(b"")
    assert shortcut.leave() is None


def test_a_stream_that_goes_by_it_is_not_lent_again() -> None:
    """Two pieces that came together each ask for it."""
    path, shortcut, attempt = sockets(Mock(spec=Ride))
    for _ in range(2):
        shortcut.take(attempt, 1, Mock())
    path.take.assert_called_once()
    attempt.lend.assert_called_once()
    attempt.take_back.assert_not_called()
