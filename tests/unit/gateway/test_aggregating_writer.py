"""An answer that is put together from a stream, and what that takes."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from typing import Any, cast

from argosy.gateway.proxy.response_writers import AggregatingWriter
from argosy.gateway.request_context import RequestContext


def piece(number: int) -> bytes:
    """A token of a chat, with all that can be told of it."""
    told = {"token": f"t{number}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice: dict[str, Any] = {"index": 0, "delta": {"content": "t"}, "token_ids": [number]}
    choice |= {"logprobs": {"content": [told]}, "finish_reason": None, "stop_reason": None}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


def test_a_token_of_a_long_answer_takes_no_more_than_one_of_a_short_one() -> None:
    """Whoever asks for log-probabilities must not stop the others with each of a hundred thousand tokens."""
    gathered, taken = AggregatingWriter(cast("RequestContext", None)), list[int]()
    pieces = [piece(number) for number in range(4000)]
    tracemalloc.start()
    try:
        for each in pieces:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            gathered.write_events(each)
            taken.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert statistics.median(taken[-500:]) < 2 * statistics.median(taken[:500])
