"""Server-sent events: what is framed comes out of the parser again, however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.protocol import SSE_DONE, EventParser, format_comment, format_event
from argosy.protocol.sse import MAX_EVENT_BYTES

data = st.binary(min_size=1, max_size=20).map(lambda raw: raw.hex().encode())


@given(st.lists(data, max_size=5), st.lists(st.integers(0, 400), max_size=6))
def test_any_cut_gives_the_same_events(payloads: list[bytes], cuts: list[int]) -> None:
    stream = (
        b"".join(format_event(payload) + format_comment(b"keep-alive") for payload in payloads)
        + SSE_DONE
    )
    parser = EventParser()
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    got = []
    for start, end in itertools.pairwise(places):
        got += parser.feed(stream[start:end])
    assert got == [*payloads, b"[DONE]"]


def test_carriage_returns_other_fields_and_several_lines() -> None:
    stream = b": hi\r\nevent: x\r\nid: 1\r\ndata: a\r\ndata:b\r\n\r\n\r\ndata: unfinished"
    assert EventParser().feed(stream) == [b"a\nb"]


@pytest.mark.parametrize("piece", [b"x", b"data: %b\n" % (b"x" * 1000)], ids=["line", "lines"])
def test_an_event_that_does_not_end_is_not_kept_for_ever(piece: bytes) -> None:
    parser, half = EventParser(), piece * (MAX_EVENT_BYTES // 2 // len(piece))
    assert parser.feed(half) == []
    with pytest.raises(ValueError, match="longer"):
        parser.feed(half + piece * 9)
