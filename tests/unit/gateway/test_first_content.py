"""Where an answer begins in a stream, however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.backends import FirstContentDetector

NOTHING = b"".join(
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
SOMETHING = [
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


@pytest.mark.parametrize("said", SOMETHING)
@given(cuts=st.sets(st.integers(1, len(NOTHING))))
def test_only_what_says_something_begins_an_answer(said: bytes, cuts: set[int]) -> None:
    opening = FirstContentDetector()
    ends = [0, *sorted(cuts), len(NOTHING)]
    assert not any(opening.feed(NOTHING[start:end]) for start, end in pairwise(ends))
    assert not opening.feed(b"data: ")
    assert not opening.feed(said)
    assert opening.feed(b"\n\n")
