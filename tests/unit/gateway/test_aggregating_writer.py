"""Memory that the writer of a non-streaming response takes for each token."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from typing import Any, cast

from argosy.gateway.proxy.response_writers import AggregatingWriter
from argosy.gateway.request_context import RequestContext


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
