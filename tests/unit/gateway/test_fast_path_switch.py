"""Lending sockets to the fast path, and taking them back when it does not accept them."""

from __future__ import annotations

from unittest.mock import Mock

from argosy.gateway.backends import DeliveredOutput
from argosy.gateway.proxy.fast_path import FastPath, SplicedStream
from argosy.gateway.proxy.fast_path_switch import FastPathSwitch
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.upstream import UpstreamResponse
from argosy.http_server import HttpExchange


def make_switch(stream: SplicedStream | None) -> tuple[Mock, FastPathSwitch, Mock]:
    """Return a fast path, its switch and an upstream response. Both sockets can be lent."""
    fast_path, response = Mock(spec=FastPath), Mock(spec=UpstreamResponse)
    exchange = Mock(spec=HttpExchange)
    (
        fast_path.attach.return_value,
        response.lend_socket.return_value,
        exchange.lend_socket.return_value,
    ) = stream, 3, 4
    switch = FastPathSwitch(fast_path, StreamingWriter(exchange), [], DeliveredOutput())
    return fast_path, switch, response


def test_rejected_stream_is_read_by_event_loop_again() -> None:
    fast_path, switch, response = make_switch(None)
    switch.enter(response, 1, Mock())
    fast_path.attach.assert_called_once()
    response.reclaim_socket.assert_called_once_with(b"")
    assert switch.exit() == (None, b"")


def test_attached_stream_is_not_lent_again() -> None:
    """Two chunks that arrive together each request the switch."""
    fast_path, switch, response = make_switch(Mock(spec=SplicedStream))
    for _ in range(2):
        switch.enter(response, 1, Mock())
    fast_path.attach.assert_called_once()
    response.lend_socket.assert_called_once()
    response.reclaim_socket.assert_not_called()


def test_lent_writer_cannot_be_discarded() -> None:
    writer = StreamingWriter(Mock(spec=HttpExchange))
    assert writer.discard()
    writer.lend_socket()
    assert not writer.discard()
