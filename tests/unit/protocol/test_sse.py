"""Server-sent events: the parser returns every framed event, at any split of the bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.protocol import SSE_DONE, EventParser, format_comment, format_event
from argosy.protocol.sse import MAX_EVENT_BYTES

data = st.binary(min_size=1, max_size=20).map(lambda raw: raw.hex().encode())


@given(
    st.lists(data, max_size=5),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_any_split_gives_the_same_events(
    payloads: list[bytes], cuts: list[int], line_break: bytes
) -> None:
    stream = (
        b"".join(format_event(payload) + format_comment(b"keep-alive") for payload in payloads)
        + SSE_DONE
    ).replace(b"\n", line_break)
    parser = EventParser()
    boundaries = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    events = []
    for start, end in itertools.pairwise(boundaries):
        events += parser.feed(stream[start:end])
    assert events == [*payloads, b"[DONE]"]


def test_carriage_returns_other_fields_and_multiline_data() -> None:
    stream = b": hi\r\nevent: x\r\nid: 1\r\ndata: a\r\ndata:b\r\n\r\n\r\ndata: unfinished"
    assert EventParser().feed(stream) == [b"a\nb"]


@pytest.mark.parametrize("piece", [b"x", b"data: %b\n" % (b"x" * 1000)], ids=["line", "lines"])
def test_unterminated_event_is_rejected_at_its_size_limit(piece: bytes) -> None:
    parser, half = EventParser(), piece * (MAX_EVENT_BYTES // 2 // len(piece))
    assert parser.feed(half) == []
    with pytest.raises(ValueError, match="longer"):
        parser.feed(half + piece * 9)
