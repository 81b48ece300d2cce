"""Lending sockets to the fast path, and taking them back when it does not accept them."""

from __future__ import annotations

from unittest.mock import Mock

from argosy.gateway.backends import DeliveredOutput
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.proxy.stream_splice import StreamSplice
from argosy.gateway.request_context import UNLIMITED_TOKENS, RequestContext
from argosy.gateway.upstream import UpstreamResponse
from argosy.http_server import HttpExchange


def make_splice(handle: int) -> tuple[Mock, StreamSplice, Mock]:
    """Return a fast path, a splice and an upstream response. Both sockets can be lent."""
    fast_path, response = Mock(spec=FastPath), Mock(spec=UpstreamResponse)
    exchange = Mock(spec=HttpExchange)
    fast_path.attach.return_value = 1, handle
    response.lend_socket.return_value, exchange.lend_socket.return_value = 3, 4
    context = Mock(
        spec=RequestContext,
        delivered=DeliveredOutput(output_tokens=1),
        covered_output_tokens=UNLIMITED_TOKENS,
        usage_slot=None,
    )
    return (
        fast_path,
        StreamSplice(fast_path, StreamingWriter(exchange), context),
        response,
    )


def test_rejected_stream_is_read_by_event_loop_again() -> None:
    fast_path, splice, response = make_splice(0)
    splice.begin(response, Mock())
    fast_path.attach.assert_called_once()
    response.reclaim_socket.assert_called_once_with(b"")
    times, unread = splice.end()
    assert (len(times), unread) == (0, b"")


def test_attached_stream_is_not_lent_again() -> None:
    """Two chunks that arrive together each ask for it."""
    fast_path, splice, response = make_splice(7)
    for _ in range(2):
        splice.begin(response, Mock())
    fast_path.attach.assert_called_once()
    response.lend_socket.assert_called_once()
    response.reclaim_socket.assert_not_called()


def test_lent_writer_cannot_be_discarded() -> None:
    writer = StreamingWriter(Mock(spec=HttpExchange))
    assert writer.discard()
    writer.lend_socket()
    assert not writer.discard()
