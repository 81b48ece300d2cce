"""Writers of responses: the memory that a response in one piece takes, and sockets lent to the fast path."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from typing import Any, cast
from unittest.mock import Mock

from argosy.gateway.backends import DeliveredOutput
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.response_writers import AggregatingWriter, StreamingWriter
from argosy.gateway.proxy.stream_splice import StreamSplice
from argosy.gateway.request_context import UNLIMITED_TOKENS, RequestContext
from argosy.gateway.upstream import UpstreamResponse
from argosy.http_server import HttpExchange


def chat_event(number: int) -> bytes:
    """Return the event of one chat token with log-probabilities."""
    logprob = {"token": f"t{number}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice: dict[str, Any] = {"index": 0, "delta": {"content": "t"}, "token_ids": [number]}
    choice |= {"logprobs": {"content": [logprob]}, "finish_reason": None, "stop_reason": None}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


def test_memory_per_token_does_not_grow_with_length_of_response() -> None:
    """Otherwise each of 100,000 tokens with log-probabilities would block the event loop for longer than the last."""
    writer, allocated = AggregatingWriter(cast("RequestContext", None)), list[int]()
    events = [chat_event(number) for number in range(4000)]
    tracemalloc.start()
    try:
        for event in events:
            tracemalloc.reset_peak()
            used_before, _ = tracemalloc.get_traced_memory()
            writer.write_events(event)
            allocated.append(tracemalloc.get_traced_memory()[1] - used_before)
    finally:
        tracemalloc.stop()
    assert statistics.median(allocated[-500:]) < 2 * statistics.median(allocated[:500])


def test_stream_that_fast_path_rejects_is_read_by_event_loop_again() -> None:
    fast_path, response = Mock(spec=FastPath), Mock(spec=UpstreamResponse)
    exchange, context = Mock(spec=HttpExchange), Mock(spec=RequestContext)
    context.delivered, context.usage_slot = DeliveredOutput(output_tokens=1), None
    context.covered_output_tokens = UNLIMITED_TOKENS
    fast_path.attach.return_value = 1, 0
    splice = StreamSplice(fast_path, StreamingWriter(exchange), context)
    splice.begin(response, Mock())
    fast_path.attach.assert_called_once()
    response.reclaim_socket.assert_called_once_with(b"")
    times, unread = splice.end()
    assert (len(times), unread) == (0, b"")


def test_lent_writer_cannot_be_discarded() -> None:
    writer = StreamingWriter(Mock(spec=HttpExchange))
    assert writer.discard()
    writer.lend_socket()
    assert not writer.discard()
