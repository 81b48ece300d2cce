"""Detection of the first content in a stream, for any segmentation of the stream."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.backends import FirstContentDetector

EVENTS_WITHOUT_CONTENT = b"".join(
    (
        b": keep-alive\n\n",
        b"event: ping\n\n",
        b"data:\r\n\r\n",
        b'data: {"choices": [], "prompt_filter_results": []}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": null}, "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": ""}]}\n\n',
    )
)
EVENTS_WITH_CONTENT = [
    b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
    b'{"choices": [{"index": 0, "delta": {"reasoning_content": "a"}}]}',
    b'{"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": [{}]}}]}',
    b'{"choices": [{"index": 0, "text": " "}]}',
    b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
    b'{"error": {"message": "no"}}',
    b'{"choices": 7}',
    b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}',
    b"[DONE]",
]


@pytest.mark.parametrize("event", EVENTS_WITH_CONTENT)
@given(cuts=st.sets(st.integers(1, len(EVENTS_WITHOUT_CONTENT))))
def test_only_content_starts_response(event: bytes, cuts: set[int]) -> None:
    detector = FirstContentDetector()
    borders = [0, *sorted(cuts), len(EVENTS_WITHOUT_CONTENT)]
    assert not any(
        detector.feed(EVENTS_WITHOUT_CONTENT[start:end]) for start, end in pairwise(borders)
    )
    assert not detector.feed(b"data: ")
    assert not detector.feed(event)
    assert detector.feed(b"\n\n")
